"""Regions that another texture shows through."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.synthesis.families.base import Floats, Parameters
from lit_data.synthesis.families.region import Region
from lit_data.synthesis.fields import CELL_PX, look_up
from lit_data.synthesis.texture_bank import TEXTURE_PX, textures_on

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.pixels import Pixels
    from lit_data.synthesis.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Texture(Region):
    """A region whose surface is another texture of the same mean brightness, behind a mask of Perlin noise.

    After Zavrtanik et al., "DRAEM", ICCV 2021: there the texture is an image of another data set and the mask
    thresholded Perlin noise.

    Args:
        weight: See `Family`.
        amplitude: See `Family`; standard deviation of the texture.
        contrast: See `Family`.
        size_px: See `Region`.
        elongation: See `Region`.
        shapes_from: See `Region`.
        textures_from: Folder of images, of which random places are taken; none takes smooth noise.
    """

    textures_from: str | None = None

    name: ClassVar[str] = "texture"
    parameters: ClassVar[tuple[str, ...]] = (*Region.outline, "texture_y", "texture_x", "texture")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        place = {"texture_y": draws[:, 5], "texture_x": draws[:, 6], "texture": draws[:, 7]}
        return super(Texture, self).sample(draws, variant) | place

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        cover = super(Texture, self).cover(windows, parameters)
        return cover if self.shapes_from else cover * _perlin_mask(windows, parameters)

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        textures = textures_on(self.textures_from, pixels.cover.device)
        place = [pixels.of_each(parameters[name]).view(-1) for name in ("texture_y", "texture_x", "texture")]
        row, column = (
            (start * TEXTURE_PX).long() + way for start, way in zip(place, (pixels.y, pixels.x), strict=False)
        )
        tile = textures[(place[2] * len(textures)).long(), row % TEXTURE_PX, column % TEXTURE_PX]
        source = pixels.of_each(pixels.windows.brightness) + (pixels.strength.abs() * tile)[:, None]
        return (source - pixels.before) * pixels.cover[:, None]


def _perlin_mask(windows: "Windows", p: Parameters) -> "Tensor":
    """Islands that hold three quarters of a surface, with an edge of about a pixel: [n, h, w] in 0..1."""
    waves = look_up(windows, p["seed_x"], p["seed_y"], 2 * CELL_PX / p["half_px"])
    return (waves.add(0.67) * p["half_px"] / 2 + 0.5).clamp_(0, 1)
