"""Annotations of images in common formats: boxes, outlines, runs and tables."""
