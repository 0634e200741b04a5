"""Samples of volumes: their occupied voxels, or windows of them."""
