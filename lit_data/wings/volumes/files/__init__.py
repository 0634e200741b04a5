"""Volumes: dense files read slab by slab, and the sparse index of their occupied voxels.

Importing this imports no medical library; each reader imports its own when it is first used.
"""

from lit_data.wings.volumes.files.hounsfield import WINDOWS, Window, read_window
from lit_data.wings.volumes.files.indexing import IndexOptions, index_volume
from lit_data.wings.volumes.files.resampling import Resolution
from lit_data.wings.volumes.files.sources import VolumeSource, find_volumes, open_volume
from lit_data.wings.volumes.files.sparse import LabelIndex, SparseVolume, VolumeBank
from lit_data.wings.volumes.files.sparse_store import SparseStore
from lit_data.wings.volumes.files.volume import Volume, wrap_array

__all__ = [
    "WINDOWS",
    "IndexOptions",
    "LabelIndex",
    "Resolution",
    "SparseStore",
    "SparseVolume",
    "Volume",
    "VolumeBank",
    "VolumeSource",
    "Window",
    "find_volumes",
    "index_volume",
    "open_volume",
    "read_window",
    "wrap_array",
]
