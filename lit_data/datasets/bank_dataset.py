"""`BankDataset`: interface between a loader and samples that are read from the images of a bank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lit_data.core.types import Array, FieldSpec, Ints, LookAhead, SampleRuns, read_samples
from lit_data.images.bank import ImageBank

if TYPE_CHECKING:
    import torch

_PLACED = 2**16


class BankDataset(ABC):
    """Dataset on a bank, which groups samples by image or shard, and prefetches remote images.

    Attributes:
        bank: Decoded images.
        masks: Decoded masks, if samples have any.
        fields: Shape and dtype of each value of a sample.
        pixels: True if samples have pixels, False if they only have their position.
        epoch: Epoch of samples that are read one by one.
    """

    bank: ImageBank
    masks: ImageBank | None = None
    fields: Mapping[str, FieldSpec]
    pixels: bool = True
    epoch: int = 0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def images_of(self, indices: Ints, epoch: int) -> Ints:
        """Return [M] numbers in the bank of the images that M samples are read from in an epoch."""

    @abstractmethod
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        """Write samples into the rows of a batch, without a copy in between.

        Args:
            rows: An array [M, ...] for each key of `fields`.
            indices: [M] sample numbers in this split.
            epoch: Epoch of the samples.
        """

    def __getitem__(self, index: int) -> "dict[str, torch.Tensor]":
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> "list[dict[str, torch.Tensor]]":
        """Return several samples at once, as the DataLoader of torch prefers."""
        return read_samples(self, indices, self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samples that `__getitem__` reads."""
        self.epoch = epoch

    @property
    def runs(self) -> SampleRuns | Callable[[int], SampleRuns] | None:
        """Samples of each image or shard, for an order by windows; None if patches are cut elsewhere."""
        return self._group_runs(0) if self.pixels else None

    def _group_runs(self, epoch: int) -> SampleRuns:
        """Group the samples of an epoch by their images, or by the shards of these."""
        images = self.images_of(np.arange(len(self)), epoch)
        # Samples are mixed within the unit that is fetched: a shard, or an image.
        groups = self.bank.groups_of(images)
        order = np.argsort(groups, kind="stable")
        firsts = np.unique(groups[order], return_index=True)[1]
        nbytes = self._count_bytes(images[order[firsts]])
        ends = np.append(firsts[1:], len(order))
        return SampleRuns(ends, nbytes, order, self.bank.window_bytes)

    def _count_bytes(self, images: Ints) -> Ints:
        """Return [n] bytes of images with their masks, or of their shards."""
        nbytes = self.bank.count_bytes(images)
        if self.masks is None or self.bank.fetches:
            return nbytes
        # A mask has one byte for each pixel.
        return nbytes + self.bank.heights_px[images] * self.bank.widths_px[images]

    @property
    def fetches(self) -> bool:
        """True if the images are downloaded when they are needed."""
        return self.bank.fetches and self.pixels

    @property
    def needs_windows(self) -> bool:
        """True if the images are downloaded when they are needed, and do not all fit here at once."""
        return self.fetches and not self.bank.fits

    def look_ahead(self, indices: Callable[[], Ints], epoch: int) -> LookAhead | None:
        """Begin to fetch the images of the samples of an epoch; return None if the images are local.

        Args:
            indices: Returns the numbers of the samples, in their order.
            epoch: Epoch of the samples.
        """
        if not self.fetches:
            return None
        samples = indices()
        # In parts, because the places of an epoch may take more memory than its numbers.
        parts = []
        for start in range(0, len(samples), _PLACED):
            parts.append(self.images_of(samples[start : start + _PLACED], epoch))
        return self.bank.look_ahead(np.concatenate(parts)) if parts else None

    def check_sources(self) -> None:
        """Check after a worker was killed that no store was truncated while it was read, which is cheap.

        Raises:
            StoreCorruptError: A store was truncated.
        """
        for bank in (self.bank, self.masks):
            if bank is not None:
                bank.check_size()
