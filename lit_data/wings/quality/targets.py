"""Targets: single defects of known size on good patches, and the model's verdicts on them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_data.core.types import IGNORED, Array, Batch, Bools, Doubles, Ints
from lit_data.datamodules.image_batch import ImageTransform
from lit_data.datamodules.inspection import InspectionDataModule
from lit_data.datamodules.stripe import StripeDataModule
from lit_data.predict.defects import find_defects
from lit_data.predict.maps import ProbabilityMap, VerdictWriter
from lit_data.predict.options import PredictOptions
from lit_data.predict.predictor import TiledPredictor
from lit_data.synthesis import DefectSpec
from lit_inspect.verdicts import GOOD

_EPOCH = 2**31
"""Epoch of the random numbers, which no training reaches."""
_EDGE_PX = 16  # from the edge of a patch inward, where the net lacks the surroundings
_REACH_PX = 3  # distance from a defect at which it still counts as found
_SPARE = 3  # drawn for each target: some are at edges of patches, or change nothing
_BATCH = 64


_SIZES: Mapping[str, tuple[str, float]] = {
    **dict.fromkeys(("scratch", "stripe_break", "extra_stripe"), ("length_px", 1.0)),
    **dict.fromkeys(("stain", "cut_paste", "texture", "shift", "blur"), ("size_px", 1.0)),
    "line": ("width_px", 1),  # whole
    "nick": ("radius_px", 0.5),
    "relief": ("sigma_px", 0.25),  # most of a Gaussian is within two of them on either side
}
"""Option of a family that sets its size, and the option's value per px of size."""


def size_family(family: str, size_px: int) -> dict[str, Any]:
    """Return the options of a family of defects that all have one size."""
    if family == "spot":
        sigma_px = size_px / 3  # as in the spots of 3 px that training draws
        sides = {"height_px": size_px, "width_px": size_px}
        return {"shapes": [{**sides, "sigma_y_px": sigma_px, "sigma_x_px": sigma_px}]}
    name, unit = _SIZES[family]
    return {name: [unit * size_px, unit * size_px]}


class Target(NamedTuple):
    """A defect and its verdict.

    Attributes:
        family: Family of the synthesis, or the kind of a real defect.
        image: Path relative to the root.
        y: Position of its center in the image, px.
        x: As `y`.
        size_px: Planned length, diameter or width; for a real defect the longer side of its box.
        contrast: Mean change of the pixels that show it, in units of the 0..1 value range; NaN for
            a real defect.
        hit: True if it was found.
    """

    family: str
    image: str
    y: float
    x: float
    size_px: float
    contrast: float
    hit: bool


class _Drawn(NamedTuple):
    """A patch with a defect.

    Attributes:
        patch: [C, H, W] float32 in 0..1.
        image: Number of the image.
        corner: (y, x) of the patch in the image, px.
        centre: (y, x) of the defect in the patch, px.
        contrast: See `Target`.
    """

    patch: Tensor
    image: int
    corner: Ints
    centre: Doubles
    contrast: float


class _Defect(NamedTuple):
    """A real defect: a connected part of a mask.

    Attributes:
        y: Position of its center in the image, px.
        x: As `y`.
        size_px: Longer side of its box.
        box: Rows and columns of the image around it.
        near: [rows, columns] mask of the pixels at which it counts as found.
    """

    y: float
    x: float
    size_px: float
    box: tuple[slice, slice]
    near: Bools


class Bench:
    """Good patches of held-out images, and the verdicts on defects drawn into them.

    Args:
        datamodule: Datamodule after `setup`.
        predictor: Predictor of the model, for patches in 0..1.
        writer: Has names and maps of the images, which are predicted unchanged.
        options: Thresholds.
        images: Numbers of the images whose good patches and real defects are used.
        amplitude: Smallest and largest amplitude of a defect.
        seed: Seed of places and defects.

    Attributes:
        patches: [P] numbers of the good patches in the grid.
    """

    def __init__(
        self,
        datamodule: InspectionDataModule | StripeDataModule,
        predictor: TiledPredictor,
        writer: VerdictWriter,
        options: PredictOptions,
        images: Sequence[int],
        *,
        amplitude: tuple[float, float],
        seed: int,
    ) -> None:
        self._data = datamodule
        self._predictor = predictor
        self._writer = writer
        self._options = options
        self._amplitude = amplitude
        self._seed = seed
        self._read_map = lru_cache(maxsize=4)(writer.read_map)
        self._loader = datamodule.make_loader("predict")
        self._defects = {number: self._find_defects(number) for number in images}
        # A real defect would decide the verdict of its image.
        good = [number for number, defects in self._defects.items() if not defects]
        patches = [patch for number in good for patch in datamodule.grid.patches_of(number)]
        self.patches = np.array(patches, np.int64)

    def list_images(self) -> list[int]:
        """Return the numbers of the images that have a good patch."""
        images, _, _ = self._data.grid.locate(self.patches)
        numbers: list[int] = np.unique(images).tolist()
        return numbers

    def count_false_calls(self) -> tuple[int, int]:
        """Return the number of good images that are not called good, and of all good ones."""
        numbers = self.list_images()
        calls = sum(self._is_called(self._map_of(number)) for number in numbers)
        return calls, len(numbers)

    def judge(self, family: str, size_px: int, count: int, first: int) -> list[Target]:
        """Draw defects of one size, and let the model judge each.

        Args:
            family: One of `lit_data.synthesis.FAMILIES`.
            size_px: See `Target`.
            count: Number of targets; there are fewer if most make no visible change.
            first: Number of the first target, which determines places and defects together with the
                seed.
        """
        targets: list[Target] = []
        for batch in self._draw(family, size_px, _SPARE * count, first):
            # Sorted by image, so that few maps are in memory at a time.
            drawn = sorted(batch[: count - len(targets)], key=lambda one: one.image)
            for number, values in self._predictor.predict([one.patch for one in drawn]):
                targets.append(self._judge(family, size_px, drawn[number], values[0].numpy()))
            if len(targets) == count:
                break
        return targets

    def _judge(self, family: str, size_px: int, drawn: _Drawn, probability: Array) -> Target:
        name = self._writer.names[drawn.image]
        # The image is unchanged outside the patch, so its map is too.
        values = self._map_of(drawn.image).copy()
        top, left = drawn.corner.tolist()
        part = values[top : top + probability.shape[0], left : left + probability.shape[1]]
        part[...] = probability[: part.shape[0], : part.shape[1]]
        y, x = (drawn.corner + drawn.centre).tolist()
        return Target(family, name, y, x, size_px, drawn.contrast, self._is_called(values))

    def judge_real(self) -> list[Target]:
        """Judge real defects by the pixels found within a few pixels of each."""
        kinds = self._data.image_kinds
        targets = []
        for number, defects in self._defects.items():
            family = f"real {kinds[number]}" if kinds and kinds[number] else "real"
            name = self._writer.names[number]
            # Several defects share the verdict of their image, so each is judged by its pixels.
            for y, x, size_px, box, near in defects:
                hit = self._marks_enough(self._map_of(number)[box][near])
                targets.append(Target(family, name, y, x, size_px, np.nan, hit))
        return targets

    def _draw(self, family: str, size_px: int, count: int, first: int) -> Iterator[list[_Drawn]]:
        """Yield visible defects, a batch of patches at a time."""
        transform = replace(
            self._data.transformation,
            synthesis=DefectSpec(
                probability=1.0,
                count=(1, 1),
                true_count=(1, 1),
                families={family: size_family(family, size_px)},
                amplitude=self._amplitude,
            ),
            seed=self._seed,
        )
        random = np.random.default_rng([self._seed % 2**63, first])
        patches = random.choice(self.patches, count)
        for start in range(0, count, _BATCH):
            numbers = np.arange(start, min(start + _BATCH, count))
            batch: Batch = self._loader.read(patches[numbers], 0)
            batch["index"] = torch.from_numpy(first + numbers)
            batch["epoch"] = torch.full((len(numbers),), _EPOCH)
            yield [drawn for drawn in _draw_batch(transform, batch) if self._is_inside(drawn)]

    def _is_inside(self, drawn: _Drawn) -> bool:
        """Return True for a defect that is in its patch together with its surroundings."""
        patch_px = np.array(self._data.patch_px)
        edge_px = np.minimum(_EDGE_PX, patch_px // 8)
        # At an edge of the image, there is nothing beyond it that the net could lack.
        beyond = self._size_of(drawn.image) - drawn.corner
        low = np.where(drawn.corner > 0, edge_px, 0)
        ends = np.where(patch_px < beyond, patch_px - edge_px, beyond)
        return bool(((drawn.centre >= low) & (drawn.centre < ends)).all())

    def _is_called(self, values: Array) -> bool:
        """Return True if an image with this map does not get the verdict good."""
        writer = self._writer
        defects = find_defects(
            values, threshold=self._options.least_score, min_area_px=self._options.min_area_px
        )
        score = writer.score(ProbabilityMap(values))
        return writer.judge(score, is_found=bool(defects)) != GOOD

    def _marks_enough(self, values: Array) -> bool:
        least_px = max(1, self._options.min_area_px)
        return bool((values >= self._options.least_score).sum() >= least_px)

    def _map_of(self, image: int) -> Array:
        return np.asarray(self._read_map(self._writer.names[image]), np.float32)

    def _find_defects(self, number: int) -> list[_Defect]:
        """Return the real defects of an image; empty without a mask."""
        mask = self._data.read_mask(number)
        return [] if mask is None else _separate((mask > 0) & (mask != IGNORED))

    def _size_of(self, image: int) -> Ints:
        grid = self._data.grid
        return np.array((grid.heights_px[image], grid.widths_px[image]))


def _draw_batch(transform: ImageTransform, batch: Batch) -> Iterator[_Drawn]:
    """Yield the defects that change a pixel."""
    planned = transform.plan(batch)
    annotated = transform.annotate(batch["image"], planned)
    assert annotated is not None  # it has a plan
    plan, annotations = annotated
    # The plan orders defects by the sizes of their windows; here they are ordered by patch.
    order = torch.argsort(plan.row)
    centres = torch.stack((plan.y, plan.x), 1)[order].double().numpy()
    contrasts = annotations.change[order].tolist()
    drawn = transform.draw(planned)
    corners = batch["position"].numpy()
    for number, image in enumerate(batch["image_index"].tolist()):
        if contrasts[number] > 0 and drawn["mask"][number].any():
            patch = drawn["image"][number]
            yield _Drawn(patch, image, corners[number], centres[number], contrasts[number])


def _separate(marks: Bools) -> list[_Defect]:
    """Return the connected parts of a mask [H, W]."""
    import cv2

    around = np.ones((2 * _REACH_PX + 1,) * 2, np.uint8)
    count, labels, boxes, centres = cv2.connectedComponentsWithStats(
        marks.astype(np.uint8), connectivity=8
    )
    defects = []
    for number in range(1, count):  # 0 is the background
        left, top, width, height, _ = boxes[number].tolist()
        rows = slice(max(0, top - _REACH_PX), top + height + _REACH_PX)
        columns = slice(max(0, left - _REACH_PX), left + width + _REACH_PX)
        piece = (labels[rows, columns] == number).astype(np.uint8)
        x, y = centres[number].tolist()
        near = cv2.dilate(piece, around) > 0
        defects.append(_Defect(y, x, float(max(width, height)), (rows, columns), near))
    return defects
