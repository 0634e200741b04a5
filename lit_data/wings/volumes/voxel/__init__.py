"""Reconstruction of sparse voxels."""
