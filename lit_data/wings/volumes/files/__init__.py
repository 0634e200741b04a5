"""Volumes: dense files read slab by slab, and the sparse index of their occupied voxels.

Importing this imports no medical library; each reader imports its own when it is first used.
"""
