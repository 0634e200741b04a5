"""Default data of the stripe experiment: a small dataset, generated once if there is no ``data.root``."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from typing_extensions import override

from lit_data.core.checks import check_choice, check_count
from lit_data.core.types import Bools, Floats, Size
from lit_data.datasets.split_names import SPLITS
from lit_data.datasets.synthetic.sample_set import SampleSpec, open_streams
from lit_data.datasets.synthetic.stripe_drawing import (
    DrawnDefect,
    draw_defects,
    draw_pattern,
    draw_views,
    expose,
    grey_change,
)
from lit_data.images.writing import write_png

SampleDtype = Literal["uint8", "float32"]

SMALLEST_SIDE_PX = 112  # has space for three true defects

README = """Stripe samples, made by lit_data (lit_data.datasets.synthetic). Synthetic, CC0: use them for anything.

train/, val/, test/   images of a striped web under a line camera; channels as stored: target, ref1, ref2.
                      The references are neighboring repeats of the pattern, up to 1 px out of register.
test_masks/           the same file stems; 255 where the target has a true defect, 0 elsewhere.
defects.json          every defect of the test images: kind, channels, box_px = [top, left, bottom, right] with ends
                      excluded, and whether it is true (only in the target) or a distractor (not in the mask).
samples.json          what the dataset was made from, and the size of each file. If it is missing, the dataset is
                      made again.

train/ and val/ have no defects: training synthesizes them.
"""


@dataclass(frozen=True, slots=True)
class StripeSample:
    """One rendered sample.

    Attributes:
        clean: [3, H, W] float32 in 0..1, the image without its defects, but with noise.
        image: [3, H, W] float32 in 0..1.
        mask: [H, W] bool, true defects of the target.
        defects: One row per defect as in ``defects.json``, without the name of the image.
    """

    clean: Floats
    image: Floats
    mask: Bools
    defects: list[dict[str, Any]]


def render_sample(seed: int, number: int, shape: Size, *, with_defects: bool) -> StripeSample:
    """Render one sample; pattern, noise and defects have separate random streams.

    Args:
        seed: Seed of the dataset.
        number: Number of the image in the dataset.
        shape: (height, width) px.
        with_defects: Draw defects into the image.
    """
    # Separate streams, so that a sample without defects has the same pattern and noise.
    looks, noise, flaws = open_streams(seed, number, 3)
    pattern, views = draw_pattern(looks), draw_views(looks)
    clean = np.stack([expose(pattern, view, shape, noise) for view in views]).clip(0, 1)
    image, mask, rows = clean.copy(), np.zeros(shape, dtype=np.bool_), []
    for defect in draw_defects(flaws, pattern, views, shape) if with_defects else []:
        part = np.s_[defect.window[0] : defect.window[2], defect.window[1] : defect.window[3]]
        # A defect is marked wherever any of its channels changes.
        changed = np.zeros(image[0][part].shape, dtype=np.bool_)
        for channel in defect.channels:
            change = grey_change(defect, pattern, views[channel], shape)
            image[channel][part] += change
            changed |= change != 0
        if defect.is_true:
            mask[part] |= changed
        rows.append(_describe(defect, changed))
    return StripeSample(clean, image.clip(0, 1), mask, rows)


def _describe(defect: DrawnDefect, changed: Bools) -> dict[str, Any]:
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    top, left = defect.window[:2]
    return {
        "kind": defect.kind,
        "role": "true" if defect.is_true else "distractor",
        "channels": [("target", "ref1", "ref2")[channel] for channel in defect.channels],
        "box_px": [
            int(top + rows[0]),
            int(left + columns[0]),
            int(top + rows[-1] + 1),
            int(left + columns[-1] + 1),
        ],
    }


@dataclass(frozen=True, kw_only=True)
class StripeSampleSpec(SampleSpec):
    """Recipe of images of a web; equal specs give equal pixels.

    The folder of the dataset has ``train``, ``val``, ``test``, ``test_masks``, ``defects.json`` and
    ``README.txt``.

    Args:
        count: Number of images, divided 44 : 8 : 12 into train, val and test.
        height_px: Number of rows of an image.
        width_px: Number of columns of an image.
        dtype: ``uint8`` writes PNG, ``float32`` writes TIFF with values in 0..1.

    Raises:
        ConfigError: A value is not allowed.
    """

    kind = "stripe"
    sides = (SMALLEST_SIDE_PX, 2**15)
    folders = (*SPLITS, "test_masks")
    readme = README

    count: int = 64
    height_px: int = 976
    width_px: int = 176
    dtype: SampleDtype = "uint8"

    def __post_init__(self) -> None:
        check_count("height_px", self.height_px, *self.sides)
        check_count("width_px", self.width_px, *self.sides)
        super().__post_init__()
        check_choice("dtype", self.dtype, get_args(SampleDtype))

    @property
    def size_px(self) -> tuple[int, int]:
        """(height, width) of an image."""
        return self.height_px, self.width_px

    @property
    def folder_name(self) -> str:
        """Name of the folder of the dataset, which differs by spec."""
        size = f"{self.height_px}x{self.width_px}"
        return f"stripe-{self.count}x{size}-{self.dtype}-seed{self.seed}"

    @override
    def split_of(self, number: int) -> str:
        # Of 64 images, 12 test and 8 validate; small datasets have one of each.
        test, val = max(1, round(self.count * 12 / 64)), max(1, round(self.count * 8 / 64))
        if number < self.count - test - val:
            return "train"
        return "val" if number < self.count - test else "test"

    def has_defects(self, number: int) -> bool:
        """Return True for images with defects: five of six test images."""
        return self.split_of(number) == "test" and (self.count - number) % 6 != 0

    @override
    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        defects: list[dict[str, Any]] = []
        for number in numbers:
            defects += self._write_sample(root, number)
        (root / "defects.json").write_text(json.dumps(defects, indent=1), encoding="utf-8")

    def _write_sample(self, root: Path, number: int) -> list[dict[str, Any]]:
        """Write an image, with its mask in the test split, and return its defects."""
        with_defects = self.has_defects(number)
        sample = render_sample(self.seed, number, self.size_px, with_defects=with_defects)
        split, stem = self.split_of(number), f"stripe_{number:04d}"
        pixels = np.moveaxis(sample.image, 0, -1)
        if self.dtype == "float32":
            name = f"{stem}.tif"
            _write_tiff(root / split / name, pixels)
        else:
            name = f"{stem}.png"
            write_png(root / split / name, np.rint(pixels * 255).astype(np.uint8))
        if split == "test":
            mask = sample.mask.astype(np.uint8)[..., None] * 255
            write_png(root / "test_masks" / f"{stem}.png", mask)
        return [{"image": f"{split}/{name}", **row} for row in sample.defects]


def _write_tiff(path: Path, pixels: Floats) -> None:
    import tifffile

    tifffile.imwrite(
        path,
        pixels,
        photometric="rgb",
        compression="zlib",
        compressionargs={"level": 1},
        metadata=None,
        software="lit_data",
    )
