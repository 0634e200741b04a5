"""Generated images and objects."""

from lit_data.modules.gan.conditions import Conditions, RayPatches
from lit_data.modules.gan.module import GANModule
from lit_data.modules.gan.nets import ConvDiscriminator, ConvGenerator
from lit_data.modules.gan.rays import RayGenerator

__all__ = [
    "Conditions",
    "ConvDiscriminator",
    "ConvGenerator",
    "GANModule",
    "RayGenerator",
    "RayPatches",
]
