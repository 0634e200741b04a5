"""Synthetic dataset of the segmentation experiment: gray surfaces, some with defects, and masks."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lit_data.core.types import Bytes, Size
from lit_data.datasets.synthetic.sample_set import SampleSpec
from lit_data.datasets.synthetic.surfaces import GREY_LEVELS, draw_texture, plan_defects
from lit_data.images.writing import write_png
from lit_data.synthesis import DefectSpec
from lit_data.synthesis.renderer import draw

DEFECTS = DefectSpec(
    probability=0.5,
    count=(1, 3),
    true_count=(1, 3),
    amplitude=(0.2, 0.43),
    least_change=0.08,
    families={
        "stain": {"size_px": (6, 18)},
        "scratch": {"length_px": (30, 90), "width_px": (2, 5), "interrupted": 0.0},
    },
)


@dataclass(frozen=True, kw_only=True)
class InspectionSampleSpec(SampleSpec):
    """Recipe of surfaces, half of them with defects.

    The files are ``NUMBER.png``, and ``NUMBER_mask.png`` for surfaces with a defect.

    Args:
        size_px: (height, width) of a surface.
    """

    kind = "inspection"
    sides = (64, 4096)
    format_version = 2
    folders = (".",)

    count: int = 60
    size_px: Size = (192, 256)

    @override
    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        for number in numbers:
            image, mask = draw_surface(self.seed, number, self.size_px)
            write_png(root / f"{number:04}.png", image)
            if mask.any():
                write_png(root / f"{number:04}_mask.png", mask * np.uint8(255))


def draw_surface(seed: int, number: int, size_px: Size) -> tuple[Bytes, Bytes]:
    """Draw a surface, as a pure function of the arguments.

    Args:
        seed: Seed of the dataset.
        number: Number of the image in the dataset.
        size_px: (height, width) of the surface.

    Returns:
        The gray image [H, W], and the mask [H, W], which is 1 at defects.
    """
    image = draw_texture(np.random.default_rng((seed, number)), size_px)
    mask = np.zeros(size_px, np.uint8)
    plan = plan_defects(DEFECTS, seed, number, (1, *size_px))
    draw(torch.from_numpy(image)[None, None], torch.from_numpy(mask)[None, None], plan, GREY_LEVELS)
    return image, mask
