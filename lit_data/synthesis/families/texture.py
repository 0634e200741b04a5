"""Regions that another texture shows through."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.errors import DataError
from lit_data.io.discovery import find_images
from lit_data.io.images.readers import read_image
from lit_data.synthesis.families.base import Floats, Parameters
from lit_data.synthesis.families.region import Region
from lit_data.synthesis.outlines import CELL_PX, FIELD_PX, look_up, smooth_field

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lit_data.synthesis.pixels import Pixels
    from lit_data.synthesis.windows import Windows

TEXTURE_PX: Final = 256
_STRIDE: Final = 4
"""The smooth field is read at every fourth pixel, else its bumps were larger than most defects."""


@lru_cache(maxsize=8)
def load_textures(folder: str | None) -> NDArray[np.float32]:
    """Load the middle of every image below a folder: first channel, reflected where too small.

    Args:
        folder: Images of any depth; none gives smooth noise.

    Returns:
        [T, TEXTURE_PX, TEXTURE_PX] float32 with mean 0 and variance 1 each, in the order of the
        paths.

    Raises:
        DataError: The folder is missing or holds no image.
    """
    if folder is None:
        rows = np.arange(TEXTURE_PX) * _STRIDE % FIELD_PX
        return smooth_field()[rows[:, None], rows[None, :]][None]
    if not Path(folder).is_dir():
        raise DataError(f"textures_from={folder} is not a folder: give one that holds images")
    paths = find_images(Path(folder)).paths
    return np.stack([_standardise(read_image(path)[0]) for path in paths])


@lru_cache(maxsize=8)
def textures_on(folder: str | None, device: "torch.device") -> "Tensor":
    """Return the textures of `load_textures` on a device."""
    import torch

    with torch.inference_mode(mode=False):
        return torch.from_numpy(load_textures(folder)).to(device)


def _standardise(image: NDArray[np.generic]) -> NDArray[np.float32]:
    """Cut the middle out of an image, and give it mean 0 and variance 1."""
    pixels = image.astype(np.float32)
    for axis, length in enumerate(pixels.shape):
        start = max(0, length - TEXTURE_PX) // 2
        period = max(1, 2 * (length - 1))
        folded = (np.arange(TEXTURE_PX) + start) % period
        pixels = pixels.take(np.minimum(folded, period - folded), axis=axis)
    return np.asarray((pixels - pixels.mean()) / max(float(pixels.std()), 1e-6), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texture(Region):
    """A region with another texture of the same mean brightness, behind a mask of Perlin noise.

    After Zavrtanik et al., "DRAEM", ICCV 2021: there the texture is an image of another data set
    and the mask thresholded Perlin noise.

    Args:
        weight: See `Family`.
        amplitude: See `Family`; standard deviation of the texture.
        contrast: See `Family`.
        size_px: See `Region`.
        elongation: See `Region`.
        shapes_from: See `Region`.
        textures_from: Folder of images, of which random places are used; none uses smooth noise.
    """

    textures_from: str | None = None

    name: ClassVar[str] = "texture"
    parameters: ClassVar[tuple[str, ...]] = (*Region.outline, "texture_y", "texture_x", "texture")
    replaces: ClassVar[bool] = True

    @override
    def sample(self, draws: Floats, variant: NDArray[np.int64]) -> dict[str, Floats]:
        texture = {"texture_y": draws[:, 5], "texture_x": draws[:, 6], "texture": draws[:, 7]}
        return super(Texture, self).sample(draws, variant) | texture

    @override
    def cover(self, windows: "Windows", parameters: Parameters) -> "Tensor":
        cover = super(Texture, self).cover(windows, parameters)
        return cover if self.shapes_from else cover * _perlin_mask(windows, parameters)

    @override
    def change(self, pixels: "Pixels", parameters: Parameters) -> "Tensor":
        textures = textures_on(self.textures_from, pixels.cover.device)
        top = (pixels.of_each(parameters["texture_y"]).view(-1) * TEXTURE_PX).long()
        left = (pixels.of_each(parameters["texture_x"]).view(-1) * TEXTURE_PX).long()
        number = (pixels.of_each(parameters["texture"]).view(-1) * len(textures)).long()
        row = (top + pixels.y) % TEXTURE_PX
        column = (left + pixels.x) % TEXTURE_PX
        grain = pixels.strength.abs() * textures[number, row, column]
        source = pixels.of_each(pixels.windows.brightness) + grain[:, None]
        return (source - pixels.before) * pixels.cover[:, None]


def _perlin_mask(windows: "Windows", p: Parameters) -> "Tensor":
    """Return islands on three quarters of a surface, with edges of a pixel: [n, h, w] in 0..1."""
    waves = look_up(windows, p["seed_x"], p["seed_y"], 2 * CELL_PX / p["half_px"])
    return (waves.add(0.67) * p["half_px"] / 2 + 0.5).clamp_(0, 1)
