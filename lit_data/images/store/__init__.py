"""Decoded images in one memory-mapped store that every worker shares."""
