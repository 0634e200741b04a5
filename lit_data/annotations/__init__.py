"""Annotations of images in the formats that people have: boxes, outlines, runs and tables."""
