"""Targets: single defects of known size on good patches, and what a model says of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from lit_data.core.types import IGNORED, Array, Batch, Bools, Doubles, Ints
from lit_data.datamodules.image import ImageDataModule
from lit_data.datamodules.image_batch import ImageTransform
from lit_data.predict.maps import ProbabilityMap, VerdictWriter
from lit_data.predict.options import PredictOptions
from lit_data.predict.predictor import TiledPredictor, find_defects
from lit_data.predict.verdicts import KnowsTruth
from lit_data.synthesis import DefectSpec
from lit_inspect.verdicts import GOOD

ReadMarks = Callable[[int], Bools | None]
"""Returns the pixels of an image that its mask marks, [H, W]; None without a mask."""

_EPOCH = 2**31
"""Of the random numbers, which no training comes to."""
_EDGE_PX = 16  # from the edge of a patch inwards, where the net lacks what is around
_REACH_PX = 3  # from a defect to where it still counts as found
_SPARE = 3  # drawn for each target: some are at edges of patches, or change nothing
_BATCH = 64


_SIZES: Mapping[str, tuple[str, float]] = {
    **dict.fromkeys(("scratch", "stripe_break", "extra_stripe"), ("length_px", 1.0)),
    **dict.fromkeys(("stain", "cut_paste", "texture", "shift", "blur"), ("size_px", 1.0)),
    "line": ("width_px", 1),  # whole
    "nick": ("radius_px", 0.5),
    "relief": ("sigma_px", 0.25),  # most of a Gaussian lies within two of them to either side
}
"""Option of a family that is its size, and the size in units of it."""


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
        family: Of the synthesis, or the kind of a real defect.
        image: Path below the root.
        y: Of its center in the image, px.
        x: As `y`.
        place_y: The same from 0 to 1.
        place_x: See there.
        size_px: Length, diameter or width as planned; of a real defect the longer side of its box.
        contrast: Mean change of the pixels that show it, in units of the 0..1 value range; NaN of a
            real one.
        hit: True if it was found.
    """

    family: str
    image: str
    y: float
    x: float
    place_y: float
    place_x: float
    size_px: float
    contrast: float
    hit: bool


@dataclass(frozen=True)
class _Drawn:
    """Patches with a defect each.

    Attributes:
        images: [n, C, H, W] float32 in 0..1.
        masks: [n, 1, H, W] in {0, 1}.
        image_index: [n] number of the image.
        position: [n, 2] (y, x) of the patch, px.
        centre: [n, 2] (y, x) of the defect in its patch, px.
        contrast: [n].
    """

    images: Tensor
    masks: Tensor
    image_index: Ints
    position: Ints
    centre: Doubles
    contrast: Doubles

    @classmethod
    def join(cls, parts: Sequence["_Drawn"]) -> "_Drawn":
        joined: dict[str, Any] = {}
        for name, value in vars(parts[0]).items():
            values = [getattr(part, name) for part in parts]
            joined[name] = (
                torch.cat(values) if isinstance(value, Tensor) else np.concatenate(values)
            )
        return cls(**joined)

    def select(self, chosen: Ints) -> "_Drawn":
        values = vars(self).items()
        return _Drawn(**{name: value[chosen] for name, value in values})


class Bench:
    """Good patches of held-out images, and the judgement of what is drawn into them.

    Args:
        datamodule: After `setup`.
        predictor: Of the model, for patches in 0..1.
        writer: Knows names and maps of the images, which are predicted as they are.
        options: Thresholds.
        images: Numbers of the images whose good patches are used.
        read_marks: See `open_marks`.
        amplitude: Weakest and strongest defect.
        seed: Of places and defects.

    Attributes:
        patches: [P] numbers of the good patches in the grid.
    """

    def __init__(
        self,
        datamodule: ImageDataModule,
        predictor: TiledPredictor,
        writer: VerdictWriter,
        options: PredictOptions,
        images: Sequence[int],
        *,
        read_marks: ReadMarks,
        amplitude: tuple[float, float],
        seed: int,
    ) -> None:
        self._data = datamodule
        self._read_marks = read_marks
        self._predictor = predictor
        self._writer = writer
        self._options = options
        self._amplitude = amplitude
        self._seed = seed
        self._read_map = lru_cache(maxsize=4)(writer.read_map)
        self._loader = datamodule.make_loader("predict")
        self.patches = self._find_good(images)

    def _find_good(self, images: Sequence[int]) -> Ints:
        """Return the patches of images without a real defect, which would decide their verdicts."""
        patches: list[int] = []
        for number in images:
            marks = self._read_marks(number)
            if marks is None or not marks.any():
                patches += self._data.grid.patches_of(number)
        return np.array(patches, np.int64)

    def list_images(self) -> list[int]:
        """Return the numbers of the images that have a good patch."""
        images, _, _ = self._data.grid.locate(self.patches)
        numbers: list[int] = np.unique(images).tolist()
        return numbers

    def count_false_calls(self) -> tuple[int, int]:
        """Return the good images that are not called good, and all good ones."""
        numbers = self.list_images()
        calls = sum(self._is_called(self._map_of(number)) for number in numbers)
        return calls, len(numbers)

    def judge(self, family: str, size_px: int, count: int, first: int) -> list[Target]:
        """Draw defects of one size, and ask the model for each.

        Args:
            family: Of `lit_data.synthesis.FAMILIES`.
            size_px: See `Target`.
            count: Of targets; fewer where most change nothing that can be seen.
            first: Number of the first, which decides places and defects with the seed.
        """
        drawn = self._draw(family, size_px, _SPARE * count, first)
        chosen = self._find_visible(drawn)[:count]
        # In the order of the images, as few maps are held in memory at a time.
        drawn = drawn.select(chosen[np.argsort(drawn.image_index[chosen], kind="stable")])
        targets = []
        for number, values in self._predictor.predict(list(drawn.images)):
            probability = values[0].numpy()
            image = int(drawn.image_index[number])
            name = self._writer.names[image]
            height, width = self._size_of(image)
            y, x = (drawn.position[number] + drawn.centre[number]).tolist()
            target = Target(
                family=family,
                image=name,
                y=y,
                x=x,
                place_y=y / height,
                place_x=x / width,
                size_px=size_px,
                contrast=float(drawn.contrast[number]),
                hit=self._is_found(drawn, number, probability),
            )
            targets.append(target)
        return targets

    def judge_real(self, images: Sequence[int]) -> list[Target]:
        """Judge real defects by what was found within a few pixels of each.

        Args:
            images: Numbers of the images, whose maps lie in the folder.
        """
        targets = []
        for number in images:
            marks = self._read_marks(number)
            if marks is None or not marks.any():
                continue
            name = self._writer.names[number]
            probability = self._read_map(name)
            kinds = getattr(self._data, "image_kinds", ())
            family = f"real {kinds[number]}" if kinds and kinds[number] else "real"
            height, width = marks.shape
            # Several defects share the verdict of their image, so each is judged by its pixels.
            for piece, size_px in _separate(marks):
                grown = _grow(torch.from_numpy(piece).float()[None, None])[0, 0].numpy() > 0
                y, x = (float(axis.mean()) for axis in np.nonzero(piece))
                hit = self._marks_enough(probability[grown])
                place_y, place_x = y / height, x / width
                targets.append(Target(family, name, y, x, place_y, place_x, size_px, np.nan, hit))
        return targets

    def _draw(self, family: str, size_px: int, count: int, first: int) -> _Drawn:
        transformation = self._data.transformation
        transform = replace(
            transformation,
            synthesis=DefectSpec(
                probability=1.0,
                count=(1, 1),
                true_count=(1, 1),
                families={family: size_family(family, size_px)},
                amplitude=self._amplitude,
            ),
            augment={},
            seed=self._seed,
            read_px={**transformation.read_px, "test": self._data.patch_px},
        )
        random = np.random.default_rng([self._seed % 2**63, first])
        patches = random.choice(self.patches, count)
        parts = []
        for start in range(0, count, _BATCH):
            numbers = np.arange(start, min(start + _BATCH, count))
            batch: Batch = self._loader.read(patches[numbers], 0)
            batch["index"] = torch.from_numpy(first + numbers)
            batch["epoch"] = torch.full((len(numbers),), _EPOCH)
            parts.append(_draw_batch(transform, batch))
        return _Drawn.join(parts)

    def _find_visible(self, drawn: _Drawn) -> Ints:
        """Return the numbers of defects that can be seen, with their surroundings."""
        has_pixels = drawn.masks.flatten(1).any(1).numpy()
        is_visible = has_pixels & (drawn.contrast > 0)
        sizes = np.array([self._size_of(image) for image in drawn.image_index.tolist()])
        patch_px = np.array(self._data.patch_px)
        edge_px = np.minimum(_EDGE_PX, patch_px // 8)
        # At an edge of the image there is nothing beyond it that the net could miss.
        low = np.where(drawn.position > 0, edge_px, 0)
        ends = np.where(
            drawn.position + patch_px < sizes, patch_px - edge_px, sizes - drawn.position
        )
        is_inside = ((drawn.centre >= low) & (drawn.centre < ends)).all(1)
        return np.flatnonzero(is_visible & is_inside)

    def _is_found(self, drawn: _Drawn, number: int, probability: Array) -> bool:
        # The image is as it was beside the patch, so its map is too.
        values = self._map_of(int(drawn.image_index[number])).copy()
        top, left = drawn.position[number].tolist()
        part = values[top : top + probability.shape[0], left : left + probability.shape[1]]
        part[...] = probability[: part.shape[0], : part.shape[1]]
        return self._is_called(values)

    def _is_called(self, values: Array) -> bool:
        """Return True if an image with a map does not get the verdict good."""
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

    def _size_of(self, image: int) -> tuple[int, int]:
        grid = self._data.grid
        return int(grid.heights_px[image]), int(grid.widths_px[image])


def open_marks(datamodule: KnowsTruth) -> ReadMarks:
    """Return the reader of what masks of real defects mark, by the number of an image."""

    def read_marks(number: int) -> Bools | None:
        mask = datamodule.read_mask(number)
        return None if mask is None else (mask > 0) & (mask != IGNORED)

    return read_marks


def _draw_batch(transform: ImageTransform, batch: Batch) -> _Drawn:
    planned = transform.plan(batch, "test")
    annotated = transform.annotate(batch["image"], planned, "test")
    assert annotated is not None  # it has a plan
    plan, annotations = annotated
    # Defects lie in the plan by the sizes of their windows, and here by patches.
    order = torch.argsort(plan.row)
    drawn = transform.draw(planned)
    return _Drawn(
        images=drawn["image"],
        masks=drawn["mask"],
        image_index=batch["image_index"].numpy(),
        position=batch["position"].numpy(),
        centre=torch.stack((plan.y, plan.x), 1)[order].double().numpy(),
        contrast=annotations.change[order].double().numpy(),
    )


def _grow(masks: Tensor) -> Tensor:
    """Return masks [n, 1, H, W] with the pixels around what they mark."""
    return max_pool2d(masks, 2 * _REACH_PX + 1, 1, _REACH_PX)


def _separate(marks: Bools) -> list[tuple[Bools, float]]:
    """Return each connected piece of a mask, and the longer side of its box, px."""
    import cv2

    count, labels, boxes, _ = cv2.connectedComponentsWithStats(
        marks.astype(np.uint8), connectivity=8
    )
    pieces = []
    for number in range(1, count):  # 0 is the ground
        width, height = boxes[number][cv2.CC_STAT_WIDTH], boxes[number][cv2.CC_STAT_HEIGHT]
        pieces.append((labels == number, float(max(width, height))))
    return pieces
