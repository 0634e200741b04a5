"""CT volumes: files, occupied voxels and windows, nets, scores and predictions."""

from typing import TYPE_CHECKING

from lit_data.core.lazy import offer

if TYPE_CHECKING:
    from lit_data.wings.volumes.augment import VolumeAugment
    from lit_data.wings.volumes.datamodule import CTDataModule
    from lit_data.wings.volumes.datasets.dataset import CTDataset
    from lit_data.wings.volumes.datasets.windows import WindowSpec
    from lit_data.wings.volumes.files.hounsfield import WINDOWS, Window, read_window
    from lit_data.wings.volumes.files.indexing import IndexOptions, index_volume
    from lit_data.wings.volumes.files.resampling import Resolution
    from lit_data.wings.volumes.files.sources import VolumeSource, find_volumes, open_volume
    from lit_data.wings.volumes.files.sparse import LabelIndex, SparseVolume, VolumeBank
    from lit_data.wings.volumes.files.sparse_store import SparseStore
    from lit_data.wings.volumes.files.volume import Volume, wrap_array
    from lit_data.wings.volumes.monai import MonaiLoss, MonaiNet
    from lit_data.wings.volumes.predictions import VolumeTask
    from lit_data.wings.volumes.recognition import recognize
    from lit_data.wings.volumes.segmentation import VolumeSegmentationModule
    from lit_data.wings.volumes.voxel.blocks import VectorQuantiser
    from lit_data.wings.volumes.voxel.module import VoxelModule
    from lit_data.wings.volumes.voxel.net import PointVoxelNet
    from lit_data.wings.volumes.voxel.points import QueryCounts

__all__ = [
    "CTDataModule",
    "CTDataset",
    "IndexOptions",
    "LabelIndex",
    "MonaiLoss",
    "MonaiNet",
    "PointVoxelNet",
    "QueryCounts",
    "Resolution",
    "SparseStore",
    "SparseVolume",
    "VectorQuantiser",
    "Volume",
    "VolumeAugment",
    "VolumeBank",
    "VolumeSegmentationModule",
    "VolumeSource",
    "VolumeTask",
    "VoxelModule",
    "WINDOWS",
    "Window",
    "WindowSpec",
    "find_volumes",
    "index_volume",
    "open_volume",
    "read_window",
    "wrap_array",
    "recognize",
]

TARGETS = (
    "CTDataModule",
    "MonaiLoss",
    "MonaiNet",
    "PointVoxelNet",
    "QueryCounts",
    "Resolution",
    "VectorQuantiser",
    "VolumeAugment",
    "VolumeSegmentationModule",
    "VoxelModule",
    "WindowSpec",
)
"""Classes that a configuration may name."""

__getattr__, __dir__ = offer(
    __name__,
    {
        "CTDataModule": "datamodule",
        "CTDataset": "datasets.dataset",
        "IndexOptions": "files.indexing",
        "LabelIndex": "files.sparse",
        "MonaiLoss": "monai",
        "MonaiNet": "monai",
        "PointVoxelNet": "voxel.net",
        "QueryCounts": "voxel.points",
        "Resolution": "files.resampling",
        "SparseStore": "files.sparse_store",
        "SparseVolume": "files.sparse",
        "VectorQuantiser": "voxel.blocks",
        "Volume": "files.volume",
        "VolumeAugment": "augment",
        "VolumeBank": "files.sparse",
        "VolumeSegmentationModule": "segmentation",
        "VolumeSource": "files.sources",
        "VolumeTask": "predictions",
        "VoxelModule": "voxel.module",
        "WINDOWS": "files.hounsfield",
        "Window": "files.hounsfield",
        "WindowSpec": "datasets.windows",
        "find_volumes": "files.sources",
        "index_volume": "files.indexing",
        "open_volume": "files.sources",
        "read_window": "files.hounsfield",
        "wrap_array": "files.volume",
        "recognize": "recognition",
    },
)
