"""Manifests: loading, cells, meaning, capability, plan and cost."""

from __future__ import annotations

from attnrepro.manifest.load import load
from attnrepro.manifest.model import Cell, ImageRef, Manifest, Note, Subject

__all__ = ["Cell", "ImageRef", "Manifest", "Note", "Subject", "load"]
