"""What runs inside an image: standard library and torch only, mounted read-only.

It reads one job file and writes one result file a task. It never imports `attnrepro`. The modules
`semantics`, `work` and `orderstats` use the standard library alone, and the host imports them too,
so that a mask, a FLOP count and a rank are defined once.
"""

from __future__ import annotations

__version__ = "0.1.0"
