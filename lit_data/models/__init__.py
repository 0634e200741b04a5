"""LightningModules that train on our batches: use them, copy from them, or replace them with your own."""

from lit_data.models.anomaly.bank import MemoryBank
from lit_data.models.anomaly.encoder import TextureEncoder
from lit_data.models.anomaly.gaussians import PlaceGaussians
from lit_data.models.anomaly.module import AnomalyModule
from lit_data.models.classification import ClassificationModule, ConvClassifier
from lit_data.models.pretrained.efficientnet_lite import EfficientNetLite
from lit_data.models.pretrained.lite_classifier import LiteClassifier
from lit_data.models.pretrained.lite_compare import LiteCompareNet, LiteDifference
from lit_data.models.pretrained.lite_unet import LiteUNet
from lit_data.models.pretrained.nets import (
    SmpNet,
    TimmNet,
    TorchvisionClassifier,
    TorchvisionSegmenter,
)
from lit_data.models.segmentation.features import FeatureDifferenceModule
from lit_data.models.segmentation.module import SegmentationModule
from lit_data.models.segmentation.nets import CompareNet, UNet, VolumeUNet

__all__ = [
    "AnomalyModule",
    "ClassificationModule",
    "CompareNet",
    "ConvClassifier",
    "EfficientNetLite",
    "FeatureDifferenceModule",
    "LiteClassifier",
    "LiteCompareNet",
    "LiteDifference",
    "LiteUNet",
    "MemoryBank",
    "PlaceGaussians",
    "SegmentationModule",
    "SmpNet",
    "TextureEncoder",
    "TimmNet",
    "TorchvisionClassifier",
    "TorchvisionSegmenter",
    "UNet",
    "VolumeUNet",
]
