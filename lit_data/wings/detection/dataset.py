"""`DetectionDataset`: images with boxes, alone or as mosaics, written directly into the rows of a batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from typing_extensions import override

from lit_data.annotations.labels import LabelTable
from lit_data.core.errors import ConfigError, DataError, show_path
from lit_data.core.mosaic import FILL, MosaicPlan, MosaicSpec, move_boxes, sample_mosaics
from lit_data.core.types import (
    COUNT_SUFFIX,
    Array,
    Doubles,
    FieldSpec,
    Floats,
    Ints,
    SampleRuns,
    Size,
)
from lit_data.datasets.bank_dataset import BankDataset
from lit_data.images.bank import ImageBank
from lit_data.wings.detection.sampling import PositiveImages

if TYPE_CHECKING:
    from lit_data.wings.detection.synthetic import SyntheticObjects

BOX_COLUMNS = 6
_DTYPES = ("uint8", "uint16", "float32")  # that OpenCV scales
_KEEP_ALL = MosaicSpec(min_box_px=0, min_box_visible=0, max_box_aspect=math.inf)

_CUTS = np.arange(5)
"""Px by which a cut of a tile may move outward, if that brings its edge closer to a whole pixel of the output."""
_CLOSE_PX = 0.1
"""Distance from a whole pixel of the output at which an edge needs no other cut."""
_BEYOND_PX = 8.0
"""Farthest that a tile is drawn beyond its window for a closer edge, in px of the output."""


class BatchMosaics(NamedTuple):
    """Mosaics of a batch, made from its own images, to be drawn later."""

    plan: MosaicPlan
    """Tiles; their image numbers are samples of the batch."""
    places_px: Ints
    """[B, 4] (top, left, bottom, right) of each image in its own sample."""
    boxes: Floats
    """[N, 6] (row, class, cx, cy, w, h), the last four in fractions of H and W, in the order of the rows."""
    counts: Ints
    """[B] number of boxes of each sample."""


class DetectionDataset(BankDataset):
    """Map-style images of one split; writes many samples at once.

    A sample is a dict:

    - ``image`` [C, H, W] of the dtype of the bank: the image scaled to fit, in the middle of gray;
      or a mosaic of several images;
    - ``boxes`` [n, 6] float32: (0, class, cx, cy, w, h), the last four in fractions of H and W; a
      batch has one flat array of boxes, whose first column is the row;
    - ``index`` int64: number of the image among those of *all* splits, which seeds the sample's
      random stream;
    - ``image_index`` int64: the same number, that of the image in the bank;
    - ``shape`` [2] int64: (height, width) px of the image on the disk;
    - ``epoch`` int64: the epoch it was read for;
    - ``draw`` int64: number of the sample in the split, which seeds its random stream instead; only
      with `positives`.

    Args:
        bank: Decoded images, [C, h, w] uint8, uint16 or float32 each, of any size.
        labels: Boxes of the images.
        original_px: [I, 2] (height, width) of the images on the disk.
        images: Numbers of this split's images, all by default. Mosaics use only these.
        size_px: (H, W) of a sample.
        mosaic: How mosaics are made; None shows each image alone.
        mosaic_epochs: Mosaics are made before this epoch; None makes them in all epochs. Samples of
            later epochs show one image as it is, with all its boxes.
        draws_mosaics: True if samples are mosaics; otherwise they show one image each, and
            `plan_batch` plans mosaics from a batch of them.
        seed: Seed of all random numbers.
        positives: Chooses the image of each sample; None takes each image once.
        synthetic: Draws defects into the samples, and adds their boxes after those of the image.
        fill: Pixel value of the gray.

    Raises:
        DataError: Images have another dtype.
        ConfigError: The numbers of images, labels and sizes differ.
    """

    def __init__(
        self,
        bank: ImageBank,
        labels: LabelTable,
        original_px: Ints,
        *,
        images: Sequence[int] | Ints | None = None,
        size_px: Size,
        mosaic: MosaicSpec | None = None,
        mosaic_epochs: int | None = None,
        draws_mosaics: bool = True,
        seed: int = 0,
        positives: PositiveImages | None = None,
        synthetic: "SyntheticObjects | None" = None,
        fill: float = FILL,
    ) -> None:
        if not len(bank) == len(labels) == len(original_px):
            raise ConfigError(
                f"{len(bank)} images, boxes of {len(labels)} and sizes of {len(original_px)} of them"
            )
        if bank.dtype.name not in _DTYPES:
            raise DataError(
                f"images are {bank.dtype}: detection needs {', '.join(_DTYPES)}; set "
                "data.read.as_float=true"
            )
        self.bank = bank
        self.labels = labels
        self.original_px = original_px
        self.images = np.arange(len(bank)) if images is None else np.array(images, np.int64)
        self.size_px = size_px
        self.mosaic = mosaic
        self.mosaic_epochs = mosaic_epochs
        self.draws_mosaics = draws_mosaics
        self.seed = seed
        self.positives = positives
        self.synthetic = synthetic
        self.fill = fill
        self._sizes_px = np.stack((bank.heights_px, bank.widths_px), axis=1).astype(np.int64)
        self.fields = self._describe()

    def __len__(self) -> int:
        return len(self.images)

    def find_lack(self) -> str:
        """Return ``boxes`` if no image has one, so that scores lack them; otherwise an empty string."""
        has_box = any((self.labels.of(image)[:, 0] >= 0).any() for image in self.images.tolist())
        return "" if has_box or self.synthetic is not None else "boxes"

    @property
    @override
    def runs(self) -> SampleRuns | Callable[[int], SampleRuns] | None:
        """See `BankDataset`; None if mosaics take parts of any images."""
        if self.mosaic is not None and self.draws_mosaics:
            return None
        return super().runs if self.positives is None else self._group_runs

    @override
    def images_of(self, indices: Ints, epoch: int) -> Ints:
        if self.positives is not None:
            return self.positives.choose(indices, epoch)
        return self.images[indices]

    @override
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        """See `BankDataset`; ``boxes_count`` gets the number of boxes."""
        images = self.images_of(indices, epoch)
        streams = images if self.positives is None else indices
        plan = self.plan(images, epoch, streams)
        draw_tiles(rows["image"], plan, self.bank, self.fill)
        limits = self._spec_of(epoch) or _KEEP_ALL
        boxes, counts = self._find_boxes(plan, plan.image, self._sizes_px, len(images), limits)
        if self.synthetic is not None:
            synthetic = self.synthetic.draw(
                rows["image"], self._leave_grey_out(plan), streams, epoch
            )
            boxes = np.concatenate((boxes, synthetic))
            boxes = boxes[np.argsort(boxes[:, 0], kind="stable")]
            counts = np.bincount(boxes[:, 0].astype(np.int64), minlength=len(images))
        # Boxes are flat and sorted by row: each goes to the next place of its row.
        box_in_row = np.arange(len(boxes)) - np.repeat(np.cumsum(counts) - counts, counts)
        row = np.repeat(np.arange(len(counts)), counts)
        rows["boxes"][row, box_in_row, 0] = 0
        rows["boxes"][row, box_in_row, 1:] = boxes[:, 1:]
        rows["boxes" + COUNT_SUFFIX][:] = counts
        rows["index"][:] = images
        rows["image_index"][:] = images
        rows["shape"][:] = self.original_px[images]
        rows["epoch"][:] = epoch
        if self.positives is not None:
            rows["draw"][:] = indices

    def mosaic_of(self, epoch: int) -> MosaicSpec | None:
        """Return how the mosaics of an epoch are made; None if each sample shows one image."""
        return self.mosaic if self.mosaic_epochs is None or epoch < self.mosaic_epochs else None

    def plan(self, images: Ints, epoch: int, streams: Ints | None = None) -> MosaicPlan:
        """Plan the tiles of samples in an epoch.

        Args:
            images: [M] numbers of the images.
            epoch: The epoch.
            streams: [M] numbers of the samples' random streams; by default those of the images.
        """
        return sample_mosaics(
            self._spec_of(epoch),
            self.seed,
            epoch,
            images if streams is None else streams,
            images=images,
            sizes_px=self._sizes_px,
            output_px=self.size_px,
            choices=self.images if self.positives is None else self.positives.partners,
        )

    def plan_batch(
        self, images: Ints, spec: MosaicSpec, epoch: int, streams: Ints | None = None
    ) -> BatchMosaics:
        """Plan mosaics of a batch of samples that show one image each.

        Each sample has its own random stream, as if it were written as a mosaic, but takes its
        partners from the batch, because their pixels are already on the device. A mosaic thus
        depends on the other images of its batch. A batch is still the same in each run, resumed or
        not, because its images are a pure function of (seed, epoch, number of the batch). But
        another batch size or number of ranks gives other mosaics.

        Args:
            images: [B] numbers of the images.
            spec: How mosaics are made.
            epoch: Epoch the images were read for.
            streams: [B] numbers of the samples' random streams; by default those of the images.
        """
        rows = np.arange(len(images))
        places_px = self.find_places(images)
        sizes_px = places_px[:, 2:] - places_px[:, :2]
        plan = sample_mosaics(
            spec,
            self.seed,
            epoch,
            images if streams is None else streams,
            images=rows,
            sizes_px=sizes_px,
            output_px=self.size_px,
            choices=rows,
        )
        boxes, counts = self._find_boxes(plan, images[plan.image], sizes_px, len(images), spec)
        return BatchMosaics(plan, places_px, boxes, counts)

    def find_places(self, images: Ints) -> Ints:
        """Locate images in samples that show one image each: [M, 4] (top, left, bottom, right) px."""
        return self._plan_alone(images).window

    def describe_sample(self, index: int) -> str:
        """Name one sample of this split by its file, for a message."""
        if self.positives is not None:
            return f"sample {index}, whose image is chosen again in each epoch"
        return show_path(self.bank.name(int(self.images[index])))

    def find_originals(self, boxes: Doubles, images: Ints) -> Doubles:
        """Convert boxes of samples that show one image each to pixels of the images on the disk.

        Boxes are clipped to their images.

        Args:
            boxes: [N, 4] (left, top, right, bottom) px of a sample.
            images: [N] number of the image of each box.

        Returns:
            [N, 4] (left, top, right, bottom) px.
        """
        plan = self._plan_alone(images)
        # (width, height, width, height) beside boxes of (left, top, right, bottom).
        original_px = np.tile(self.original_px[images][:, ::-1], 2).astype(np.float64)
        stored_px = np.tile(self._sizes_px[images][:, ::-1], 2)
        in_tile = boxes / plan.scale[:, None] - np.tile(plan.origin[:, ::-1], 2)
        return np.clip(in_tile * original_px / stored_px, 0, original_px)

    def _leave_grey_out(self, plan: MosaicPlan) -> MosaicPlan:
        """Return tiles whose rectangles contain pixels of images only."""
        return plan

    def _spec_of(self, epoch: int) -> MosaicSpec | None:
        """Return how mosaics are made if the dataset itself draws those of an epoch; otherwise None."""
        return self.mosaic_of(epoch) if self.draws_mosaics else None

    def _plan_alone(self, images: Ints) -> MosaicPlan:
        """Plan samples that show one image each."""
        return sample_mosaics(
            None,
            0,
            0,
            images,
            images=images,
            sizes_px=self._sizes_px,
            output_px=self.size_px,
            choices=images,
        )

    def _find_boxes(
        self, plan: MosaicPlan, images: Ints, sizes_px: Ints, samples: int, limits: MosaicSpec
    ) -> tuple[Floats, Ints]:
        """Return the boxes of samples, moved and cut like their tiles.

        Args:
            plan: T tiles.
            images: [T] number of the image that each tile has its boxes from.
            sizes_px: [I, 2] (height, width) of the images that the plan numbers.
            samples: Number of samples, B.
            limits: Limits of the boxes that stay.

        Returns:
            [N, 6] (row, class, cx, cy, w, h), the last four in fractions of H and W, in the order
            of the rows; and the number of boxes of each sample, [B].
        """
        starts = np.where(images > 0, self.labels.ends[images - 1], 0)
        counts = self.labels.ends[images] - starts
        tile = np.repeat(np.arange(len(plan)), counts)
        within = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
        boxes = self.labels.boxes[np.repeat(starts, counts) + within].astype(np.float64)
        edges, is_visible = move_boxes(boxes[:, 1:], tile, plan, sizes_px, limits)
        low, high = edges[:, :2] / self.size_px, edges[:, 2:] / self.size_px
        row = plan.row[tile[is_visible]]  # ascends, as tiles do
        # From (y, x) to (x, y).
        centres, sides = ((low + high) / 2)[:, ::-1], (high - low)[:, ::-1]
        columns = (row[:, None], boxes[is_visible, :1], centres, sides)
        return np.hstack(columns).astype(np.float32), np.bincount(row, minlength=samples)

    def _describe(self) -> dict[str, FieldSpec]:
        tiles = self.mosaic.tiles if self.mosaic and self.draws_mosaics else 1
        counts = np.diff(self.labels.ends, prepend=0)[self.images]
        most = tiles * int(counts.max(initial=0))
        if self.synthetic is not None:
            most += self.synthetic.most
        fields = {
            "image": FieldSpec((self.bank.channels, *self.size_px), self.bank.dtype.name),
            "boxes": FieldSpec((BOX_COLUMNS,), "float32", max_items=max(1, most), row_column=True),
            "index": FieldSpec((), "int64"),
            "image_index": FieldSpec((), "int64"),
            "shape": FieldSpec((2,), "int64"),
            "epoch": FieldSpec((), "int64"),
        }
        if self.positives is not None:
            fields["draw"] = FieldSpec((), "int64")
        return fields


# A warp by any matrix costs three times as much as scaling, which cuts and draws whole pixels only.
# So each side of a tile is moved to the nearest whole pixel of the output: by less than half a
# pixel, usually by far less.


def draw_tiles(rows: Array, plan: MosaicPlan, bank: ImageBank, fill: float = FILL) -> None:
    """Fill samples with their tiles; pixels without a tile become gray.

    Args:
        rows: [M, C, H, W]; written.
        plan: The tiles.
        bank: Images, [C, h, w] of the same dtype each.
        fill: Pixel value of the gray.
    """
    import cv2

    seen = np.flatnonzero((plan.window[:, 2:] > plan.window[:, :2]).all(1))
    uncovered = _find_uncovered(rows, plan, seen)
    images = [bank[image] for image in plan.image[seen].tolist()]
    sizes_px = np.array([image.shape[1:] for image in images], np.int64).reshape(-1, 2)
    cuts, targets = _choose_cuts(plan, seen, sizes_px)
    room = np.empty((targets[:, 2:] - targets[:, :2]).prod(1).max(initial=0), rows.dtype)
    columns = (plan.row[seen], plan.window[seen], cuts, targets)
    for image, row, (top, left, bottom, right), cut, (up, before, down, after) in zip(
        images, *(column.tolist() for column in columns), strict=True
    ):
        if row in uncovered:
            rows[row] = fill  # just before its tiles: it is still in the core's cache then
            uncovered.remove(row)
        part = image[:, cut[0] : cut[2], cut[1] : cut[3]]
        target = rows[row, :, top:bottom, left:right]
        window = slice(top - up, bottom - up), slice(left - before, right - before)
        height, width = down - up, after - before
        if part.shape[1:] == (height, width):
            target[...] = part[:, *window]
            continue
        # One plane at a time: small enough to stay in the core's own cache.
        scaled = room[: height * width].reshape(height, width)
        for source, plane in zip(part, target, strict=True):
            cv2.resize(source, (width, height), scaled, 0, 0, cv2.INTER_LINEAR)
            plane[...] = scaled[window]
    for row in uncovered:
        rows[row] = fill


def _find_uncovered(rows: Array, plan: MosaicPlan, seen: Ints) -> set[int]:
    """Return the samples that are not filled by their tiles, which never overlap."""
    areas = (plan.window[seen, 2:] - plan.window[seen, :2]).prod(1)
    covered = np.bincount(plan.row[seen], areas, minlength=len(rows))
    return set(np.flatnonzero(covered < rows.shape[2] * rows.shape[3]).tolist())


def _choose_cuts(plan: MosaicPlan, seen: Ints, sizes_px: Ints) -> tuple[Ints, Ints]:
    """Choose the part of each tile to scale, and the rectangle it is drawn to, which contains its window.

    Args:
        plan: The tiles.
        seen: [T] numbers of the visible tiles.
        sizes_px: [T, 2] (height, width) of their images.

    Returns:
        [T, 4] (top, left, bottom, right) in px of the tile, and the same in px of the output.
    """
    scale, origin = plan.scale[seen, None, None], plan.origin[seen][:, :, None]
    window, sizes = plan.window[seen][:, :, None], sizes_px[:, :, None]
    # Half a pixel of the tile more than is shown, because scaling interpolates between neighbors.
    first = np.floor(window[:, :2] / scale - origin - 0.5) - _CUTS
    last = np.ceil(window[:, 2:] / scale - origin + 0.5) + _CUTS
    edges = np.concatenate((np.maximum(first, 0), np.minimum(last, sizes)), axis=1)  # [T, 4, cuts]
    exact = (edges + np.tile(origin, (1, 2, 1))) * scale
    # Rounded as windows are; half a pixel with a rounding error goes down.
    nearest = np.ceil(exact - 0.5 - 1e-6)
    off_px = np.where((_CUTS > 0) & (_CUTS * scale > _BEYOND_PX), np.inf, np.abs(exact - nearest))
    best = np.maximum(off_px, _CLOSE_PX).argmin(2, keepdims=True)
    cuts = np.take_along_axis(edges, best, 2)[..., 0].astype(np.int64)
    targets = np.take_along_axis(nearest, best, 2)[..., 0].astype(np.int64)
    # The drawn rectangle contains the whole window.
    low = np.minimum(targets[:, :2], window[:, :2, 0])
    high = np.maximum(targets[:, 2:], window[:, 2:, 0])
    return cuts, np.concatenate((low, high), axis=1)
