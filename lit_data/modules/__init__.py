"""LightningModules that learn from our batches; examples to use, to copy from, or to replace by your own."""

from lit_data.modules.anomaly.bank import MemoryBank
from lit_data.modules.anomaly.encoder import TextureEncoder
from lit_data.modules.anomaly.gaussians import PlaceGaussians
from lit_data.modules.anomaly.module import AnomalyModule
from lit_data.modules.classification import ClassificationModule, ConvClassifier
from lit_data.modules.detection.module import DetectionModule
from lit_data.modules.detection.net import DetectorNet
from lit_data.modules.gan.conditions import Conditions, RayPatches
from lit_data.modules.gan.module import GANModule
from lit_data.modules.gan.nets import ConvDiscriminator, ConvGenerator
from lit_data.modules.gan.rays import RayGenerator
from lit_data.modules.pretrained.detection import TorchvisionDetectionModule, TorchvisionDetector
from lit_data.modules.pretrained.efficientnet_lite import EfficientNetLite
from lit_data.modules.pretrained.lite_classifier import LiteClassifier
from lit_data.modules.pretrained.lite_compare import LiteCompareNet, LiteDifference
from lit_data.modules.pretrained.lite_detector import LiteDetector
from lit_data.modules.pretrained.lite_unet import LiteUNet
from lit_data.modules.pretrained.nets import (
    SmpNet,
    TimmNet,
    TorchvisionClassifier,
    TorchvisionSegmenter,
)
from lit_data.modules.pretrained.volumes import MonaiLoss, MonaiNet
from lit_data.modules.segmentation.features import FeatureDifferenceModule
from lit_data.modules.segmentation.module import SegmentationModule
from lit_data.modules.segmentation.nets import CompareNet, UNet, VolumeUNet
from lit_data.modules.segmentation.volumes import VolumeSegmentationModule
from lit_data.modules.voxel.blocks import VectorQuantiser
from lit_data.modules.voxel.module import VoxelModule
from lit_data.modules.voxel.net import PointVoxelNet
from lit_data.modules.voxel.points import QueryCounts

__all__ = [
    "AnomalyModule",
    "ClassificationModule",
    "CompareNet",
    "Conditions",
    "ConvClassifier",
    "ConvDiscriminator",
    "ConvGenerator",
    "DetectionModule",
    "DetectorNet",
    "EfficientNetLite",
    "FeatureDifferenceModule",
    "GANModule",
    "LiteClassifier",
    "LiteCompareNet",
    "LiteDetector",
    "LiteDifference",
    "LiteUNet",
    "MemoryBank",
    "MonaiLoss",
    "MonaiNet",
    "PlaceGaussians",
    "PointVoxelNet",
    "QueryCounts",
    "RayGenerator",
    "RayPatches",
    "SegmentationModule",
    "SmpNet",
    "TextureEncoder",
    "TimmNet",
    "TorchvisionClassifier",
    "TorchvisionDetectionModule",
    "TorchvisionDetector",
    "TorchvisionSegmenter",
    "UNet",
    "VectorQuantiser",
    "VolumeSegmentationModule",
    "VolumeUNet",
    "VoxelModule",
]
