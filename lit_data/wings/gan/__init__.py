"""Generative models of images and objects: data, nets and pictures."""

from typing import TYPE_CHECKING

from lit_data.core.lazy import offer

if TYPE_CHECKING:
    from lit_data.wings.gan.datamodule import GANDataModule
    from lit_data.wings.gan.dataset import GANDataset
    from lit_data.wings.gan.model.conditions import Conditions, RayPatches
    from lit_data.wings.gan.model.module import GANModule
    from lit_data.wings.gan.model.nets import ConvDiscriminator, ConvGenerator
    from lit_data.wings.gan.model.rays import RayGenerator
    from lit_data.wings.gan.predictions import GenerateTask

__all__ = [
    "Conditions",
    "ConvDiscriminator",
    "ConvGenerator",
    "GANDataModule",
    "GANDataset",
    "GANModule",
    "GenerateTask",
    "RayGenerator",
    "RayPatches",
]

TARGETS = (
    "Conditions",
    "ConvDiscriminator",
    "ConvGenerator",
    "GANDataModule",
    "GANModule",
    "RayGenerator",
    "RayPatches",
)
"""Classes that a configuration may name."""

__getattr__, __dir__ = offer(
    __name__,
    {
        "Conditions": "model.conditions",
        "ConvDiscriminator": "model.nets",
        "ConvGenerator": "model.nets",
        "GANDataModule": "datamodule",
        "GANDataset": "dataset",
        "GANModule": "model.module",
        "GenerateTask": "predictions",
        "RayGenerator": "model.rays",
        "RayPatches": "model.conditions",
    },
)
