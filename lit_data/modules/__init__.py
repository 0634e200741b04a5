"""LightningModules that learn from our batches; examples to use, to copy from, or to replace by your own."""

from lit_data.modules.compare_net import CompareNet
from lit_data.modules.detection import DetectionModule
from lit_data.modules.detector_net import DetectorNet
from lit_data.modules.gan import GANModule
from lit_data.modules.gan_conditions import Conditions, RayPatches
from lit_data.modules.gan_nets import ConvDiscriminator, ConvGenerator
from lit_data.modules.gan_rays import RayGenerator
from lit_data.modules.segmentation import SegmentationModule
from lit_data.modules.unet import UNet
from lit_data.modules.vector_quantiser import VectorQuantiser
from lit_data.modules.voxel import VoxelModule
from lit_data.modules.voxel_net import PointVoxelNet
from lit_data.modules.voxel_queries import QueryCounts

__all__ = [
    "CompareNet",
    "Conditions",
    "ConvDiscriminator",
    "ConvGenerator",
    "DetectionModule",
    "DetectorNet",
    "GANModule",
    "PointVoxelNet",
    "QueryCounts",
    "RayGenerator",
    "RayPatches",
    "SegmentationModule",
    "UNet",
    "VectorQuantiser",
    "VoxelModule",
]
