"""Where the shipped data lie: schema/, images/, manifests/.

Installed, they stand in the package's `_data`; in a checkout they are the top-level folders.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def data_root() -> Path:
    """Folder that holds `schema`, `images` and `manifests`."""
    package = Path(__file__).resolve().parent
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent.parent


def schema_dir() -> Path:
    """Folder of the JSON Schema documents."""
    return data_root() / "schema"


def images_dir() -> Path:
    """Folder of the shipped stacks."""
    return data_root() / "images"


def manifests_dir() -> Path:
    """Folder of the shipped manifests and their reference artifacts."""
    return data_root() / "manifests"
