"""Image files: strict readers, headers, resizing, writing."""
