"""`PatchDataset`: patches of images, cut from decoded pixels."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from typing_extensions import override

from lit_data.core.errors import ConfigError, DataError, show_path
from lit_data.core.shared_arrays import share_state
from lit_data.core.types import Array, Bools, FieldSpec, Ints, SampleRuns, Size
from lit_data.datasets.bank_dataset import BankDataset
from lit_data.datasets.patch_source import PatchSource, Places
from lit_data.images.bank import ImageBank
from lit_data.images.header import refuse_mask_sizes
from lit_inspect.counts import counted

if TYPE_CHECKING:
    import torch

_SHARED = ("bank", "patches", "masks", "labels", "unmarked", "paster")
"""Attributes that are shared with copies in worker processes."""
_PLANES = ("image", "mask", "cover")
"""Fields [C, h, w] of which only the upper left corner is written if patches grow with the epochs."""


class PatchWriter(Protocol):
    """Writer of synthetic marks, which workers draw as they write the patches."""

    def describe(self, size_px: Size) -> Mapping[str, FieldSpec]:
        """Return the fields of samples of (height, width) in addition to ``image``."""
        ...

    def write_into(self, rows: Mapping[str, Array], index: Ints, epoch: int) -> None:
        """Draw into samples whose ``image`` has been written.

        Args:
            rows: [M, ...] values of each field.
            index: [M] numbers of the random streams of the samples.
            epoch: Epoch of the samples.
        """
        ...


class DefectPaster(Protocol):
    """Paster of defects from other patches into samples without one."""

    def paste_into(
        self,
        rows: Mapping[str, Array],
        indices: Ints,
        epoch: int,
        cut: Callable[[Places], tuple[Array, Array]],
    ) -> None:
        """Paste into samples whose ``image`` and ``mask`` have been written.

        Args:
            rows: [M, ...] values of each field.
            indices: [M] numbers of the samples in the split.
            epoch: Epoch of the samples.
            cut: Cuts pixels and masks of other patches.
        """
        ...


class PatchDataset(BankDataset):
    """Map-style dataset of the patches of one split, which writes many samples at once.

    A sample is a dict:

    - ``image`` [C, h, w], dtype of the bank: the patch, with the channels of the bank;
    - ``mask`` [K, h, w] uint8, with the channels of `masks`: only with `masks`;
    - ``index`` int64: number of the patch among those of *all* images of the bank, so that the
      random stream of a sample does not depend on the split;
    - ``image_index`` int64: number of the image in the bank;
    - ``position`` [2] int64: (y, x) of the patch in the image, px;
    - ``epoch`` int64: epoch of the sample;
    - ``draw`` int64: number of the sample in the split, which seeds its augmentation; only with
      `SampledPatches`;
    - ``label`` int64: only with `labels`;
    - ``unmarked`` bool: only if `unmarked` is True for an image of the split;
    - the fields of `writer`.

    If `pixels` is False, a sample has no ``image``, and instead of ``mask`` the number of its mask,
    ``mask_index`` int64. This is enough to cut the patch elsewhere, see
    `lit_data.datasets.device_bank`. If patches grow with the epochs, rows of a batch are as large
    as the largest patch, and samples are written into their upper left corner.

    A pickled copy shares the arrays of a large set with this one, see
    `lit_data.core.shared_arrays.SharedState`.

    Args:
        bank: Decoded images.
        patches: Patches of this split.
        masks: Decoded masks of the images of this split, in the order of `patches.images`, [K, H,
            W] uint8 each.
        pixels: False leaves out pixels, so that samples only have their position.
        writer: Draws into the patches as they are written; for images without real masks.
        drawn_late: True if defects are drawn into batches, after the loader.
        margin_px: Margin of pixels (above and below, left and right) around every patch that is
            read, as space for augmentation; `position` stays that of the patch.
        labels: [n] label of each image of the bank.
        unmarked: [n] True for images of the bank with a defect that no mask marks; None if there
            are none.
        paster: Pastes defects into patches without one; needs masks.

    Raises:
        ConfigError: Both `masks` and `writer` are given.
        DataError: A mask is missing, or its size differs from its image.
    """

    def __init__(
        self,
        bank: ImageBank,
        patches: PatchSource,
        *,
        masks: ImageBank | None = None,
        pixels: bool = True,
        writer: PatchWriter | None = None,
        drawn_late: bool = False,
        margin_px: Size = (0, 0),
        labels: Ints | None = None,
        unmarked: Bools | None = None,
        paster: DefectPaster | None = None,
    ) -> None:
        if masks is not None and writer is not None:
            raise ConfigError("give marks to draw, or existing masks, not both")
        self.bank = bank
        self.patches = patches
        self.masks = masks
        self.pixels = pixels
        self.writer = writer
        self.drawn_late = drawn_late
        self.margin_px = margin_px
        self.labels = labels
        is_any_unmarked = unmarked is not None and unmarked[patches.images].any()
        self.unmarked = unmarked if is_any_unmarked else None
        self.paster = paster
        if masks is not None:
            _check_masks(masks, bank, patches.images)
        self.fields = self._describe()

    @property
    def images(self) -> Ints:
        """Numbers of the images of this split, [I]."""
        return self.patches.images

    def find_lack(self) -> str:
        """Return the name of the marks that scores need, if no mask marks anything."""
        masks = self.masks
        if masks is None or any(masks[number].any() for number in range(len(masks))):
            return ""
        return "marked defects"

    @property
    def read_px(self) -> Size:
        """(height, width) of the largest patches with their margin."""
        return self._add_margin(self.patches.patch_px)

    @property
    @override
    def runs(self) -> SampleRuns | Callable[[int], SampleRuns] | None:
        """Samples of each image or shard; None if they are cut elsewhere, or combine two images."""
        if not self.pixels or self.paster is not None:
            return None
        ends, images = self.patches.image_ends, self.images
        if ends is None:  # the patches of an image change with the epoch
            return self._group_runs
        # Images of a split are in the order of their groups.
        last = np.flatnonzero(np.diff(self.bank.groups_of(images), append=-1))
        ends, images = ends[last], images[last]
        # An image may have no patch, and a run must not be empty.
        has_samples = np.diff(ends, prepend=0) > 0
        nbytes = self._count_bytes(images)[has_samples]
        return SampleRuns(ends[has_samples], nbytes, most_bytes=self.bank.window_bytes)

    @override
    def images_of(self, indices: Ints, epoch: int) -> Ints:
        return self.patches.images_of(indices, epoch)

    def __len__(self) -> int:
        return len(self.patches)

    @override
    def __getitems__(self, indices: Sequence[int]) -> "list[dict[str, torch.Tensor]]":
        samples = super().__getitems__(indices)
        # Single samples have the size of their epoch; rows of a batch have space for all sizes.
        size_px = self._add_margin(self.patches.size_at(self.epoch))
        if size_px == self.read_px:
            return samples
        corner = corner_of(size_px)
        for sample in samples:
            for name in sample.keys() & set(_PLANES):
                sample[name] = sample[name][corner]
        return samples

    @override
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        places = self.patches.locate(indices, epoch)
        self._write_numbers(rows, places, indices, epoch)
        if self.pixels:
            self._write_pixels(self._cut_corner(rows, epoch), places, indices, epoch)

    def _write_numbers(
        self, rows: Mapping[str, Array], places: Places, indices: Ints, epoch: int
    ) -> None:
        rows["index"][:] = places.index
        rows["image_index"][:] = places.image
        rows["position"][:] = places.position
        rows["epoch"][:] = epoch
        if "draw" in rows:
            rows["draw"][:] = indices
        if self.labels is not None:
            rows["label"][:] = self.labels[places.image]
        if self.unmarked is not None:
            rows["unmarked"][:] = self.unmarked[places.image]
        if "mask_index" in rows:
            rows["mask_index"][:] = places.split_image

    def _write_pixels(
        self, rows: Mapping[str, Array], places: Places, indices: Ints, epoch: int
    ) -> None:
        # A margin beyond the image is reflected.
        y, x = (places.position - self.margin_px).T
        self.bank.cut_into(places.image, y, x, rows["image"])
        if self.masks is not None:
            self.masks.cut_into(places.split_image, y, x, rows["mask"])
        elif self.writer is not None:
            self.writer.write_into(rows, places.index, epoch)
        # Last, since it covers written pixels.
        if self.paster is not None:
            self.paster.paste_into(rows, indices, epoch, self._cut_with_masks)

    def cut(self, images: Ints, positions: Ints) -> Array:
        """Cut patches as they are stored, without synthetic defects.

        Args:
            images: [M] numbers of images of the bank.
            positions: [M, 2] (y, x) px.

        Returns:
            [M, C, h, w], dtype of the bank, with their margins.
        """
        patches = np.empty((len(images), self.bank.channels, *self.read_px), self.bank.dtype)
        y, x = (positions - self.margin_px).T
        self.bank.cut_into(images, y, x, patches)
        return patches

    def describe_sample(self, index: int) -> str:
        """Describe one sample of this split for a message, by its file and position."""
        places = self.patches.locate_always(index, self.epoch)
        if places is None:
            return f"sample {index}, whose patch is chosen again in each epoch"
        y, x = places.position[0].tolist()
        return f"{show_path(self.bank.name(int(places.image[0])))}, patch at (y {y}, x {x}) px"

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, _SHARED)

    def _cut_corner(self, rows: Mapping[str, Array], epoch: int) -> Mapping[str, Array]:
        """Return views of the parts of the rows that samples of an epoch fill."""
        size_px = self._add_margin(self.patches.size_at(epoch))
        if size_px == self.read_px:
            return rows
        corner = corner_of(size_px)
        return {name: row[corner] if name in _PLANES else row for name, row in rows.items()}

    def _cut_with_masks(self, places: Places) -> tuple[Array, Array]:
        assert self.masks is not None
        pixels = self.cut(places.image, places.position)
        masks = np.empty((len(pixels), self.masks.channels, *self.read_px), np.uint8)
        y, x = (places.position - self.margin_px).T
        self.masks.cut_into(places.split_image, y, x, masks)
        return pixels, masks

    def _add_margin(self, size_px: Size) -> Size:
        return size_px[0] + 2 * self.margin_px[0], size_px[1] + 2 * self.margin_px[1]

    def _describe(self) -> dict[str, FieldSpec]:
        size_px, number = self.read_px, FieldSpec((), "int64")
        fields: dict[str, FieldSpec] = {}
        if self.pixels:
            fields["image"] = FieldSpec((self.bank.channels, *size_px), str(self.bank.dtype))
            if self.masks is not None:
                fields["mask"] = FieldSpec((self.masks.channels, *size_px), "uint8")
            elif self.writer is not None:
                fields |= self.writer.describe(size_px)
        elif self.masks is not None:
            fields["mask_index"] = number
        fields |= {"index": number, "image_index": number}
        fields |= {"position": FieldSpec((2,), "int64"), "epoch": number}
        fields |= self.patches.fields
        if self.labels is not None:
            fields["label"] = number
        if self.unmarked is not None:
            fields["unmarked"] = FieldSpec((), "bool")
        return fields


def corner_of(size_px: Size) -> tuple[Any, ...]:
    """Return the index that selects the upper left corner of rows [..., H, W]."""
    return ..., slice(size_px[0]), slice(size_px[1])


def _check_masks(masks: ImageBank, bank: ImageBank, images: Ints) -> None:
    if len(masks) != len(images):
        raise DataError(
            f"{counted(len(masks), 'mask')} for {counted(len(images), 'image')}: "
            "give one mask for each image"
        )
    has_other_height = masks.heights_px != bank.heights_px[images]
    has_other_width = masks.widths_px != bank.widths_px[images]
    pairs = []
    for number in np.flatnonzero(has_other_height | has_other_width).tolist():
        image = int(images[number])
        mask_px = int(masks.heights_px[number]), int(masks.widths_px[number])
        image_px = int(bank.heights_px[image]), int(bank.widths_px[image])
        pairs.append((masks.name(number), mask_px, bank.name(image), image_px))
    refuse_mask_sizes(pairs)
