"""Sparse voxels, reconstructed."""

from lit_data.modules.voxel.module import VoxelModule
from lit_data.modules.voxel.net import PointVoxelNet
from lit_data.modules.voxel.queries import QueryCounts
from lit_data.modules.voxel.vector_quantiser import VectorQuantiser

__all__ = ["PointVoxelNet", "QueryCounts", "VectorQuantiser", "VoxelModule"]
