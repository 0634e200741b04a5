"""Default data of the detection experiment: a small synthetic dataset, made once if there is no ``data.root``."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lit_data.core.types import Bytes, Ints, Size
from lit_data.datasets.split_names import SPLITS
from lit_data.datasets.synthetic.sample_set import SampleSpec, open_streams
from lit_data.datasets.synthetic.surfaces import GREY_LEVELS, draw_texture, plan_defects
from lit_data.images.writing import write_png
from lit_data.synthesis import DefectSpec
from lit_data.synthesis.renderer import draw_boxes

CLASSES = ("scratch", "stain", "pit")
DEFECTS = DefectSpec(
    probability=1.0,
    count=(1, 8),
    true_count=(1, 8),
    amplitude=(0.25, 0.5),
    least_change=0.08,
    families={
        "scratch": {"length_px": (20, 90), "width_px": (2, 5), "interrupted": 0.0},
        "stain": {"size_px": (10, 60)},
        "relief": {"sigma_px": (3, 12)},
    },
)
"""One family for each class."""

SMALLEST_SIDE_PX = 64  # room for a few defects

README = """Detection samples, made by lit_data (lit_data.wings.detection.sample_set). Synthetic, CC0: free to use.

images/train, val, test   PNG, R, G, B: scratches, stains and pits on colored surfaces. One image in ten is tall, one
                          in ten is wide, and one in twelve has no defect.
labels/train, val, test   YOLO text with the stems of the images: class cx cy w h, in fractions of the image. A box
                          contains the pixels that show the defect.
data.yaml                 names of the classes, and folders of the splits.
samples.json              what the dataset was made from, and the size of each file. If it is missing, the dataset
                          is made again.
"""


@dataclass(frozen=True, slots=True)
class DetectionScene:
    """A rendered image.

    Attributes:
        image: [3, H, W] uint8, R, G, B.
        boxes: [N, 5] int64 = (class, top, left, bottom, right), ends excluded, around the pixels
            that show each defect.
    """

    image: Bytes
    boxes: Ints


def render_scene(seed: int, number: int, size_px: Size, *, empty: bool = False) -> DetectionScene:
    """Render one image, a pure function of the arguments.

    Args:
        seed: Seed of the dataset.
        number: Number of the image in the dataset.
        size_px: (height, width).
        empty: True to draw no defect.
    """
    (rng,) = open_streams(seed, number, 1)
    tint = rng.uniform(0.6, 1, (3, 1, 1))
    image = np.rint(tint * draw_texture(rng, size_px)).astype(np.uint8)
    if empty:
        return DetectionScene(image, np.zeros((0, 5), np.int64))
    plan = plan_defects(DEFECTS, seed, number, image.shape)
    edges = draw_boxes(torch.from_numpy(image)[None], plan, GREY_LEVELS).numpy()
    left, top, right, bottom = edges.T
    boxes = np.stack((plan.family, top, left, bottom, right), axis=1)
    return DetectionScene(image, boxes[bottom > 0])


@dataclass(frozen=True, kw_only=True)
class DetectionSampleSpec(SampleSpec):
    """Recipe of images with boxes; equal specs give equal pixels.

    The dataset's folder contains ``images``, ``labels``, ``data.yaml`` and ``README.txt``.

    Args:
        size_px: (height, width) of most images.
    """

    kind = "detection"
    sides = (SMALLEST_SIDE_PX, 2**13)
    folders = tuple(f"{part}/{split}" for part in ("images", "labels") for split in SPLITS)
    format_version = 2
    readme = README

    count: int = 160
    size_px: Size = (240, 320)

    def size_of(self, number: int) -> tuple[int, int]:
        """Return (height, width) of an image: one in ten is half as wide as high, one in ten half as high as wide."""
        side = min(self.size_px)
        return {3: (side, side // 2), 7: (side // 2, side)}.get(number % 10, self.size_px)

    def is_empty(self, number: int) -> bool:
        """Return True if an image has no defect, which holds for one in twelve."""
        return number % 12 == 5

    @override
    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        for number in numbers:
            size_px, split, stem = (
                self.size_of(number),
                self.split_of(number),
                f"detection_{number:04d}",
            )
            scene = render_scene(self.seed, number, size_px, empty=self.is_empty(number))
            write_png(root / "images" / split / f"{stem}.png", np.moveaxis(scene.image, 0, -1))
            lines = "".join(_format_box(box, size_px) for box in scene.boxes)
            (root / "labels" / split / f"{stem}.txt").write_text(lines, encoding="utf-8")
        names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES))
        folders = "".join(f"{split}: images/{split}\n" for split in SPLITS)
        (root / "data.yaml").write_text(f"path: .\n{folders}names:\n{names}", encoding="utf-8")


def _format_box(box: Ints, size_px: Size) -> str:
    kind, top, left, bottom, right = box.tolist()
    height, width = size_px
    centre = f"{(left + right) / 2 / width:.6f} {(top + bottom) / 2 / height:.6f}"
    return f"{kind} {centre} {(right - left) / width:.6f} {(bottom - top) / height:.6f}\n"
