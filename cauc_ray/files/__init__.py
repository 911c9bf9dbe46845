"""Files on any filesystem: local paths and URIs, read, listed, and written atomically."""
