"""`DetectionDataset`: images with boxes, alone or as mosaics, written straight into the rows of a batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.datasets.bank_dataset import BankDataset
from lit_data.datasets.detection.labels import LabelTable
from lit_data.errors import ConfigError, DataError, show_path
from lit_data.io.images.image_source import ImageBank
from lit_data.mosaic import FILL, Ints, MosaicPlan, MosaicSpec, move_boxes, sample_mosaics
from lit_data.types import COUNT_SUFFIX, Array, FieldSpec, SampleRuns

BOX_COLUMNS: Final = 6
_KEEP_ALL: Final = MosaicSpec(min_box_px=0, min_box_visible=0, max_box_aspect=math.inf)


class BatchMosaics(NamedTuple):
    """Mosaics of a batch, made of its own images, to be drawn later."""

    plan: MosaicPlan
    """Its images are numbers of samples of the batch."""
    places_px: Ints
    """[B, 4] (top, left, bottom, right) of each image in its own sample."""
    boxes: NDArray[np.float32]
    """[N, 6] (row, class, cx, cy, w, h), the last four in shares of H and W, in the order of the rows."""
    counts: Ints
    """[B] how many boxes each sample has."""


class DetectionDataset(BankDataset):
    """Images of one split, map-style; writes many samples at once.

    A sample is a dict:

    - ``image`` [3, H, W] uint8: the image as large as it fits, in the middle of grey; or a mosaic
      of several;
    - ``boxes`` [n, 6] float32: (0, class, cx, cy, w, h), the last four in shares of H and W; in a
      batch they lie flat, and the first column is the row;
    - ``index`` int64: number of the image among those of *all* splits, of which its random stream
      is made;
    - ``image_index`` int64: the same number, that of the image in the bank;
    - ``shape`` [2] int64: (height, width) px of the image as it lies on the disk;
    - ``epoch`` int64: the epoch it was read for.

    Args:
        bank: Decoded images, [3, h, w] uint8 each, of any size.
        labels: Their boxes.
        original_px: [I, 2] (height, width) of the images on the disk.
        images: Numbers of this split's images; all of them by default. Mosaics take partners from
            these alone.
        size_px: (H, W) of a sample.
        mosaic: How mosaics are made; none shows each image alone.
        mosaic_epochs: Mosaics are made before this epoch; none makes them in all. Samples of later
            epochs show one image as it is, with all its boxes.
        draws_mosaics: Whether samples are mosaics; otherwise they show one image each, and
            `plan_batch` plans mosaics of a batch of them.
        seed: Seed of every draw.

    Raises:
        DataError: Images are not three channels of uint8.
        ConfigError: Labels or sizes are of another number of images.
    """

    def __init__(
        self,
        bank: ImageBank,
        labels: LabelTable,
        original_px: NDArray[np.int64],
        *,
        images: Sequence[int] | None = None,
        size_px: tuple[int, int],
        mosaic: MosaicSpec | None = None,
        mosaic_epochs: int | None = None,
        draws_mosaics: bool = True,
        seed: int = 0,
    ) -> None:
        if not len(bank) == len(labels) == len(original_px):
            raise ConfigError(
                f"{len(bank)} images, boxes of {len(labels)} and sizes of {len(original_px)} of them"
            )
        if bank.channels != 3 or bank.dtype != np.uint8:
            raise DataError(
                f"images are {bank.channels} channels of {bank.dtype}: detection needs three of uint8; set "
                "data.read.gray_to_rgb=true for grey images"
            )
        self.bank, self.labels, self.original_px = bank, labels, original_px
        self.images = np.arange(len(bank)) if images is None else np.array(images, np.int64)
        self.size_px, self.mosaic, self.mosaic_epochs, self.seed = (
            size_px,
            mosaic,
            mosaic_epochs,
            seed,
        )
        self.draws_mosaics = draws_mosaics
        self._sizes_px = np.stack(
            (np.asarray(bank.heights_px), np.asarray(bank.widths_px)), axis=1
        ).astype(np.int64)
        self.fields = self._describe()

    def __len__(self) -> int:
        return len(self.images)

    @property
    @override
    def runs(self) -> SampleRuns | Callable[[int], SampleRuns] | None:
        """See `BankDataset`; none where mosaics take parts of any images."""
        return None if self.mosaic is not None and self.draws_mosaics else super().runs

    @override
    def images_of(self, indices: Ints, epoch: int) -> Ints:
        return self.images[indices]

    @override
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        """See `BankDataset`; the number of boxes stands under ``boxes_count``."""
        images = self.images[indices]
        plan, limits = (
            self.plan(images, epoch),
            self.mosaic_of(epoch) if self.draws_mosaics else None,
        )
        draw_tiles(rows["image"], plan, self.bank)
        boxes, counts = self._find_boxes(
            plan, plan.image, self._sizes_px, len(images), limits or _KEEP_ALL
        )
        slot = np.arange(len(boxes)) - np.repeat(np.cumsum(counts) - counts, counts)
        row = np.repeat(np.arange(len(counts)), counts)
        rows["boxes"][row, slot, 0], rows["boxes"][row, slot, 1:] = 0, boxes[:, 1:]
        rows["boxes" + COUNT_SUFFIX][:] = counts
        rows["index"][:] = rows["image_index"][:] = images
        rows["shape"][:], rows["epoch"][:] = self.original_px[images], epoch

    def mosaic_of(self, epoch: int) -> MosaicSpec | None:
        """Return how samples of an epoch are put together; None if each shows one image."""
        return self.mosaic if self.mosaic_epochs is None or epoch < self.mosaic_epochs else None

    def plan(self, images: Ints, epoch: int) -> MosaicPlan:
        """Plan the tiles that the samples of some images have in an epoch."""
        spec = self.mosaic_of(epoch) if self.draws_mosaics else None
        return self._sample(spec, epoch, images, images, self._sizes_px, self.images)

    def plan_batch(self, images: Ints, spec: MosaicSpec, epoch: int) -> BatchMosaics:
        """Mosaics of a batch of samples that show one image each.

        Each sample has its own random stream, as when it is written as a mosaic, but draws its
        partners from the batch: their pixels are on the device then. So it depends on the images
        beside it. A batch is still the same in each run, resumed or not, because which images it
        has is a pure function of (seed, epoch, its number); but another batch size or number of
        ranks gives other mosaics.

        Args:
            images: [B] their images.
            spec: How mosaics are made.
            epoch: The epoch they were read for.
        """
        rows, places_px = np.arange(len(images)), self.find_places(images)
        sizes_px = places_px[:, 2:] - places_px[:, :2]
        plan = self._sample(spec, epoch, images, rows, sizes_px, rows)
        boxes, counts = self._find_boxes(plan, images[plan.image], sizes_px, len(images), spec)
        return BatchMosaics(plan, places_px, boxes, counts)

    def find_places(self, images: Ints) -> Ints:
        """Locate images that are alone in their samples: [M, 4] (top, left, bottom, right) px."""
        return self._sample(None, 0, images, images, self._sizes_px, images).window

    def describe_sample(self, index: int) -> str:
        """Name one sample of this split for a message, by its file."""
        return show_path(self.bank.name(int(self.images[index])))

    def find_originals(
        self, boxes: NDArray[np.float64], images: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Locate boxes in the images on the disk, of samples that show one image each.

        Boxes are cut to their images.

        Args:
            boxes: [N, 4] (left, top, right, bottom) px of a sample.
            images: [N] number of its image.

        Returns:
            [N, 4] (left, top, right, bottom) px.
        """
        plan = self._sample(None, 0, images, images, self._sizes_px, images)
        limits = np.tile(self.original_px[images][:, ::-1], 2).astype(np.float64)
        tile = boxes / plan.scale[:, None] - np.tile(plan.origin[:, ::-1], 2)
        return np.clip(tile * limits / np.tile(self._sizes_px[images][:, ::-1], 2), 0, limits)

    def _sample(
        self,
        spec: MosaicSpec | None,
        epoch: int,
        index: Ints,
        images: Ints,
        sizes_px: Ints,
        choices: Ints,
    ) -> MosaicPlan:
        return sample_mosaics(
            spec,
            self.seed,
            epoch,
            index,
            images=images,
            sizes_px=sizes_px,
            output_px=self.size_px,
            choices=choices,
        )

    def _find_boxes(
        self, plan: MosaicPlan, images: Ints, sizes_px: Ints, samples: int, limits: MosaicSpec
    ) -> tuple[NDArray[np.float32], Ints]:
        return find_boxes(
            self.labels,
            plan,
            images,
            sizes_px=sizes_px,
            size_px=self.size_px,
            samples=samples,
            limits=limits,
        )

    def _describe(self) -> dict[str, FieldSpec]:
        tiles = self.mosaic.tiles if self.mosaic and self.draws_mosaics else 1
        counts = np.diff(self.labels.ends, prepend=0)[self.images]
        most = max(1, tiles * int(counts.max(initial=0)))
        return {
            "image": FieldSpec((3, *self.size_px), "uint8"),
            "boxes": FieldSpec((BOX_COLUMNS,), "float32", max_items=most, row_column=True),
            "index": FieldSpec((), "int64"),
            "image_index": FieldSpec((), "int64"),
            "shape": FieldSpec((2,), "int64"),
            "epoch": FieldSpec((), "int64"),
        }


def find_boxes(
    labels: LabelTable,
    plan: MosaicPlan,
    images: Ints,
    *,
    sizes_px: Ints,
    size_px: tuple[int, int],
    samples: int,
    limits: MosaicSpec,
) -> tuple[NDArray[np.float32], Ints]:
    """The boxes of samples, moved and cut as their tiles are.

    Args:
        labels: The boxes of all images.
        plan: The tiles.
        images: [T] whose boxes each tile has.
        sizes_px: [I, 2] (height, width) of the images that the plan counts.
        size_px: (H, W) of a sample.
        samples: B, how many there are.
        limits: Which boxes are kept.

    Returns:
        [N, 6] (row, class, cx, cy, w, h), the last four in shares of H and W, in the order of the
        rows; and how many boxes each sample has [B].
    """
    starts = np.where(images > 0, labels.ends[images - 1], 0)
    counts = labels.ends[images] - starts
    tile = np.repeat(np.arange(len(plan)), counts)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    boxes = labels.boxes[np.repeat(starts, counts) + within].astype(np.float64)
    edges, is_visible = move_boxes(boxes[:, 1:], tile, plan, sizes_px, limits)
    low, high = edges[:, :2] / size_px, edges[:, 2:] / size_px
    row = plan.row[tile[is_visible]]  # ascends, as tiles do
    columns = (row, boxes[is_visible, 0], *((low + high) / 2).T[::-1], *(high - low).T[::-1])
    return np.stack(columns, axis=1).astype(np.float32), np.bincount(row, minlength=samples)


_CUTS: Final = np.arange(5)
"""Tiles may be cut this many pixels further out, where that edge comes closer to a whole pixel of the output."""
_CLOSE_PX: Final = 0.1
"""An edge that is as close needs no other cut."""
_BEYOND_PX: Final = 8.0
"""How far beyond its window a tile is drawn for a closer edge, in the output."""


def draw_tiles(rows: Array, plan: MosaicPlan, bank: ImageBank) -> None:
    """Fill samples with their tiles; what none covers becomes grey.

    Args:
        rows: [M, C, H, W] uint8, written.
        plan: The tiles.
        bank: The images, [C, h, w] uint8 each.
    """
    import cv2

    seen = np.flatnonzero((plan.window[:, 2:] > plan.window[:, :2]).all(1))
    uncovered = _find_uncovered(rows, plan, seen)
    images = [bank[image] for image in plan.image[seen].tolist()]
    sizes_px = np.array([image.shape[1:] for image in images], np.int64).reshape(-1, 2)
    cuts, drawn = _choose_cuts(plan, seen, sizes_px)
    room = np.empty((drawn[:, 2:] - drawn[:, :2]).prod(1).max(initial=0), np.uint8)
    places = zip(
        plan.row[seen].tolist(),
        plan.window[seen].tolist(),
        cuts.tolist(),
        drawn.tolist(),
        strict=True,
    )
    for image, (row, (top, left, bottom, right), cut, (up, before, down, after)) in zip(
        images, places, strict=True
    ):
        if row in uncovered:
            rows[row] = FILL  # just before its tiles: it is still in the core's cache then
            uncovered.remove(row)
        part, target = (
            image[:, cut[0] : cut[2], cut[1] : cut[3]],
            rows[row, :, top:bottom, left:right],
        )
        window = slice(top - up, bottom - up), slice(left - before, right - before)
        height, width = down - up, after - before
        if part.shape[1:] == (height, width):
            target[...] = part[:, *window]
            continue
        scaled = room[: height * width].reshape(
            height, width
        )  # small enough to stay in the core's own cache
        for source, plane in zip(part, target, strict=True):
            cv2.resize(source, (width, height), scaled, 0, 0, cv2.INTER_LINEAR)
            plane[...] = scaled[window]
    for row in uncovered:
        rows[row] = FILL


def _find_uncovered(rows: Array, plan: MosaicPlan, seen: NDArray[np.int64]) -> set[int]:
    """Samples that their tiles, which never overlap, do not fill."""
    areas = (plan.window[seen, 2:] - plan.window[seen, :2]).prod(1)
    covered = np.bincount(plan.row[seen], areas, minlength=len(rows))
    return set(np.flatnonzero(covered < rows.shape[2] * rows.shape[3]).tolist())


def _choose_cuts(
    plan: MosaicPlan, seen: NDArray[np.int64], sizes_px: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose the part of each tile that is scaled, and its target: a rectangle that holds its window.

    Args:
        plan: The tiles.
        seen: [T] which of them.
        sizes_px: [T, 2] (height, width) of their images.

    Returns:
        [T, 4] (top, left, bottom, right) in px of the tile, and in px of the output.
    """
    scale, origin = plan.scale[seen, None, None], plan.origin[seen][:, :, None]
    window, sizes = plan.window[seen][:, :, None], sizes_px[:, :, None]
    # Half a pixel of the tile more than is shown: its pixels lie between two of their neighbours.
    first = np.floor(window[:, :2] / scale - origin - 0.5) - _CUTS
    last = np.ceil(window[:, 2:] / scale - origin + 0.5) + _CUTS
    edges = np.concatenate((np.maximum(first, 0), np.minimum(last, sizes)), axis=1)  # [T, 4, cuts]
    exact = (edges + np.tile(origin, (1, 2, 1))) * scale
    nearest = np.ceil(
        exact - 0.5 - 1e-6
    )  # as windows are rounded; half a pixel that was computed otherwise goes down
    off_px = np.where((_CUTS > 0) & (_CUTS * scale > _BEYOND_PX), np.inf, np.abs(exact - nearest))
    best = np.maximum(off_px, _CLOSE_PX).argmin(2, keepdims=True)
    cuts, drawn = (
        np.take_along_axis(values, best, 2)[..., 0].astype(np.int64) for values in (edges, nearest)
    )
    low, high = (
        np.minimum(drawn[:, :2], window[:, :2, 0]),
        np.maximum(drawn[:, 2:], window[:, 2:, 0]),
    )
    return cuts, np.concatenate((low, high), axis=1)
