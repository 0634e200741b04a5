"""Masks of defects and of watermarks."""
