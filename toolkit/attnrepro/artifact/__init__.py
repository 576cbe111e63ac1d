"""The signed artifact: container, content, statement, keys, bundle, trust, verify."""
