"""Folders into which a run's compilers write: its own, empty at its start, gone at its end."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

VARIABLES: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "cute",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Variable to folder, below a folder of one subject's."""


SWITCHES: Final = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
"""flash-attn-4 keeps its kernels in memory alone by default, where nobody can take their digests,
and each process compiles them again."""


def make_root() -> Path:
    """Make the folder of this run's caches.

    Compilers write the path of their cache into the code (inductor's libraries on a CPU: measured),
    so that equal digests need equal paths: in a container, whose /tmp is its own, it is always the
    same one.
    """
    usual = Path(tempfile.gettempdir()) / "attnrepro-caches"
    try:
        usual.mkdir(mode=0o700)
    except OSError:  # another run's, on a host without a container
        return Path(tempfile.mkdtemp(prefix="attnrepro-caches-"))
    return usual


def environment(folder: Path) -> dict[str, str]:
    """Each variable with its folder below `folder`, and what makes a compiler use it."""
    return {name: str(folder / part) for name, part in VARIABLES.items()} | SWITCHES
