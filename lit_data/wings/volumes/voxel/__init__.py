"""Reconstruction of sparse voxels."""

from lit_data.wings.volumes.voxel.blocks import VectorQuantiser
from lit_data.wings.volumes.voxel.module import VoxelModule
from lit_data.wings.volumes.voxel.net import PointVoxelNet
from lit_data.wings.volumes.voxel.points import QueryCounts

__all__ = ["PointVoxelNet", "QueryCounts", "VectorQuantiser", "VoxelModule"]
