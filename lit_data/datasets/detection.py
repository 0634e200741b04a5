"""`DetectionDataset`: images with boxes, alone or as mosaics, written straight into the rows of a batch."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.detection_labels import LabelTable
from lit_data.datasets.tiles import draw_tiles
from lit_data.errors import ConfigError, DataError
from lit_data.io.bank import ImageBank
from lit_data.io.problems import show_path
from lit_data.io.store import DecodedStore
from lit_data.mosaic import MosaicPlan, MosaicSpec, move_boxes, sample_mosaics
from lit_data.types import COUNT_SUFFIX, Array, FieldSpec

if TYPE_CHECKING:
    import torch

BOX_COLUMNS: Final = 6
_KEEP_ALL: Final = MosaicSpec(min_box_px=0, min_box_visible=0, max_box_aspect=math.inf)


class DetectionDataset:
    """Images of one split, map-style; writes many samples at once.

    A sample is a dict:

    - ``image`` [3, H, W] uint8: the image as large as it fits, in the middle of grey; or a mosaic of several;
    - ``boxes`` [n, 6] float32: (0, class, cx, cy, w, h), the last four in shares of H and W; in a batch they lie flat,
      and the first column is the row;
    - ``index`` int64: number of the image among those of *all* splits, of which its random stream is made;
    - ``image_index`` int64: the same number, that of the image in the bank;
    - ``shape`` [2] int64: (height, width) px of the image as it lies on the disk;
    - ``epoch`` int64: the epoch it was read for.

    Args:
        bank: Decoded images, [3, h, w] uint8 each, of any size.
        labels: Their boxes.
        original_px: [I, 2] (height, width) of the images on the disk.
        images: Numbers of this split's images; all of them by default. Mosaics take partners from these alone.
        size_px: (H, W) of a sample.
        mosaic: How mosaics are made; none shows each image alone.
        mosaic_epochs: Mosaics are made before this epoch; none makes them in all. Samples of later epochs show one
            image as it is, with all its boxes.
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
        seed: int = 0,
    ) -> None:
        if not len(bank) == len(labels) == len(original_px):
            raise ConfigError(f"{len(bank)} images, boxes of {len(labels)} and sizes of {len(original_px)} of them")
        if bank.channels != 3 or bank.dtype != np.uint8:
            raise DataError(
                f"images are {bank.channels} channels of {bank.dtype}: detection needs three of uint8; set "
                "data.read.gray_to_rgb=true for grey images"
            )
        self.bank, self.labels, self.original_px = bank, labels, original_px
        self.images = np.arange(len(bank)) if images is None else np.array(images, np.int64)
        self.size_px, self.mosaic, self.mosaic_epochs, self.seed = size_px, mosaic, mosaic_epochs, seed
        self.epoch = 0
        self._sizes_px = np.stack((np.asarray(bank.heights_px), np.asarray(bank.widths_px)), axis=1).astype(np.int64)
        self._counts = np.diff(labels.ends, prepend=0)
        self.fields: Mapping[str, FieldSpec] = self._describe()

    def set_epoch(self, epoch: int) -> None:
        """Samples read by `__getitem__` are those of this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> "dict[str, torch.Tensor]":
        import torch

        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        rows = {name: np.zeros((1, *shape), dtype) for name, shape, dtype in self._rows()}
        self.write_into(rows, np.array([index]), self.epoch)
        count = int(rows.pop("boxes" + COUNT_SUFFIX)[0])
        rows["boxes"] = rows["boxes"][:, :count]
        return {name: torch.from_numpy(array)[0] for name, array in rows.items()}

    def write_into(self, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int) -> None:
        """Write samples into the rows of a batch, without a copy in between.

        Args:
            rows: For each key of `fields` an array [M, ...], and the number of boxes under ``boxes_count``.
            indices: [M] sample numbers in this split.
            epoch: The epoch they are read for.
        """
        images = self.images[indices]
        plan = self.plan(images, epoch)
        draw_tiles(rows["image"], plan, self.bank)
        self._write_boxes(rows, plan, self._spec(epoch) or _KEEP_ALL)
        rows["index"][:] = rows["image_index"][:] = images
        rows["shape"][:], rows["epoch"][:] = self.original_px[images], epoch

    def plan(self, images: NDArray[np.int64], epoch: int) -> MosaicPlan:
        """Which tiles the samples of some images have in an epoch."""
        return sample_mosaics(
            self._spec(epoch),
            self.seed,
            epoch,
            images,
            images=images,
            sizes_px=self._sizes_px,
            output_px=self.size_px,
            choices=self.images,
        )

    def describe_sample(self, index: int) -> str:
        """Name one sample of this split for a message, by its file."""
        return show_path(self.bank.name(int(self.images[index])))

    def check_sources(self) -> None:
        """Find out, after a worker was killed, whether the store was cut short while it was read; cheap.

        Raises:
            StoreCorruptError: It was.
        """
        if isinstance(self.bank, DecodedStore):
            self.bank.check_size()

    def find_originals(self, boxes: NDArray[np.float64], images: NDArray[np.int64]) -> NDArray[np.float64]:
        """Where boxes of samples that show one image each lie in the images on the disk, cut to these.

        Args:
            boxes: [N, 4] (left, top, right, bottom) px of a sample.
            images: [N] number of its image.

        Returns:
            [N, 4] (left, top, right, bottom) px.
        """
        plan = sample_mosaics(
            None, self.seed, 0, images, images=images, sizes_px=self._sizes_px, output_px=self.size_px, choices=images
        )
        limits = np.tile(self.original_px[images][:, ::-1], 2).astype(np.float64)
        tile = boxes / plan.scale[:, None] - np.tile(plan.origin[:, ::-1], 2)
        return np.clip(tile * limits / np.tile(self._sizes_px[images][:, ::-1], 2), 0, limits)

    def _spec(self, epoch: int) -> MosaicSpec | None:
        """How samples of an epoch are put together."""
        return self.mosaic if self.mosaic_epochs is None or epoch < self.mosaic_epochs else None

    def _write_boxes(self, rows: Mapping[str, Array], plan: MosaicPlan, limits: MosaicSpec) -> None:
        counts = self._counts[plan.image]
        tile = np.repeat(np.arange(len(plan)), counts)
        starts = self.labels.ends[plan.image] - counts
        within = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
        boxes = self.labels.boxes[np.repeat(starts, counts) + within].astype(np.float64)
        edges, kept = move_boxes(boxes[:, 1:], tile, plan, self._sizes_px, limits)
        low, high = edges[:, :2] / self.size_px, edges[:, 2:] / self.size_px
        row = plan.row[tile[kept]]
        found = np.bincount(row, minlength=len(rows["image"]))
        place = np.arange(len(row)) - np.repeat(np.cumsum(found) - found, found)
        columns = (np.zeros(len(row)), boxes[kept, 0], *((low + high) / 2).T[::-1], *(high - low).T[::-1])
        rows["boxes"][row, place] = np.stack(columns, axis=1)  # rows ascend, as tiles do
        rows["boxes" + COUNT_SUFFIX][:] = found

    def _describe(self) -> dict[str, FieldSpec]:
        tiles = self.mosaic.tiles if self.mosaic else 1
        most = max(1, tiles * int(self._counts[self.images].max(initial=0)))
        return {
            "image": FieldSpec((3, *self.size_px), "uint8"),
            "boxes": FieldSpec((BOX_COLUMNS,), "float32", max_items=most, row_column=True),
            "index": FieldSpec((), "int64"),
            "image_index": FieldSpec((), "int64"),
            "shape": FieldSpec((2,), "int64"),
            "epoch": FieldSpec((), "int64"),
        }

    def _rows(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of what `write_into` fills for a sample."""
        found = []
        for name, field in self.fields.items():
            items = () if field.max_items is None else (field.max_items,)
            found.append((name, (*items, *field.shape), field.dtype))
        return [*found, ("boxes" + COUNT_SUFFIX, (), "int64")]
