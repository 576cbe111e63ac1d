"""Pinned stacks: fetched by hash, built without network, written as one canonical OCI image."""
