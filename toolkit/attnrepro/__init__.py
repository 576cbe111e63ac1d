"""Reproducible attention-kernel benchmarks: pinned images, checked results, signed artifacts.

This is the host side. It never imports torch; what runs inside an image is `attnrepro_runner`.
"""

from __future__ import annotations

__version__ = "0.1.0"
