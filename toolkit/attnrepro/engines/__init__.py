"""Container engines: one small Protocol, and Docker, podman and the bare host behind it."""
