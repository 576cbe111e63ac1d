"""Backend adapters, one file each, all of the shape in `base`."""
