"""Sparse voxels, reconstructed."""

from lit_data.modules.voxel.blocks import VectorQuantiser
from lit_data.modules.voxel.module import VoxelModule
from lit_data.modules.voxel.net import PointVoxelNet
from lit_data.modules.voxel.points import QueryCounts

__all__ = ["PointVoxelNet", "QueryCounts", "VectorQuantiser", "VoxelModule"]
