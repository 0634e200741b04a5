"""The synthetic dataset of the segmentation experiment: grey surfaces, some with pits and scratches, and masks."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.io.images.writing import write_png
from lit_data.samples.sample_set import SampleSpec
from lit_data.samples.watermarks import draw_texture
from lit_data.types import Bytes, Floats, Size

_DEFECTIVE = 0.5


@dataclass(frozen=True, kw_only=True)
class InspectionSampleSpec(SampleSpec):
    """Recipe of surfaces, half of them with defects.

    ``NUMBER.png``, and ``NUMBER_mask.png`` of those with a defect.

    Args:
        size_px: (height, width).
    """

    kind = "inspection"
    sides = (64, 4096)
    folders = (".",)

    count: int = 60
    size_px: Size = (192, 256)

    @override
    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        for number in numbers:
            image, mask = draw_surface(np.random.default_rng((self.seed, number)), self.size_px)
            write_png(root / f"{number:04}.png", image)
            if mask.any():
                write_png(root / f"{number:04}_mask.png", mask * np.uint8(255))


def draw_surface(rng: np.random.Generator, size_px: Size) -> tuple[Bytes, Bytes]:
    """Draw a surface.

    Args:
        rng: Where it comes from.
        size_px: (height, width).

    Returns:
        [H, W] grey, and [H, W] 1 where there is a defect.
    """
    image = draw_texture(rng, size_px).astype(np.float32)
    mask = np.zeros(size_px, np.uint8)
    if rng.random() < _DEFECTIVE:
        for _ in range(int(rng.integers(1, 4))):
            shape = _draw_scratch(rng, size_px) if rng.random() < 0.5 else _draw_pit(rng, size_px)
            # Pits and scratches brighten or darken, and are marked where they are plainly seen.
            image += np.float32(rng.choice((-1, 1)) * rng.uniform(50, 110)) * shape
            mask |= (shape > 0.4).astype(np.uint8)
    return np.asarray(np.rint(image.clip(0, 255)), np.uint8), mask


def _draw_pit(rng: np.random.Generator, size_px: Size) -> Floats:
    rows, columns = _choose_place(rng, size_px)
    radii = rng.uniform(3, 9, 2)
    # A flat bottom and a steep rim: the square of the usual exponent.
    depth: Any = np.exp(-(((rows / radii[0]) ** 2 + (columns / radii[1]) ** 2) ** 2))
    return np.asarray(depth, np.float32)


def _draw_scratch(rng: np.random.Generator, size_px: Size) -> Floats:
    rows, columns = _choose_place(rng, size_px)
    angle, length, width = rng.uniform(0, np.pi), rng.uniform(15, 45), rng.uniform(1.2, 2.5)
    along = columns * np.cos(angle) + rows * np.sin(angle)
    across = rows * np.cos(angle) - columns * np.sin(angle)
    # Nearly constant along its length, a Gaussian across it.
    depth: Any = np.exp(-((along / length) ** 8) - (across / width) ** 2)
    return np.asarray(depth, np.float32)


def _choose_place(
    rng: np.random.Generator, size_px: Size
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Return rows [H, 1] and columns [1, W], px from a random place off the edges."""
    y, x = rng.uniform(0.1, 0.9) * size_px[0], rng.uniform(0.1, 0.9) * size_px[1]
    return np.arange(size_px[0])[:, None] - y, np.arange(size_px[1])[None] - x
