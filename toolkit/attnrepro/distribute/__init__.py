"""Sharing artifacts: OCI registries and sweeps on many hosts."""
