"""`BankDataset`: what a loader may ask of any samples that are read from the images of a bank."""

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
    """Says which of its samples lie together, and fetches ahead what lies elsewhere.

    Attributes:
        bank: Decoded images.
        masks: Decoded masks, if samples have any.
        fields: Shape and dtype of each value of a sample.
        pixels: Whether samples hold pixels, or only say where they are.
        epoch: What samples read one by one are read for.
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
        """[M] number in the bank of the image that each of M samples is read from in an epoch."""

    @abstractmethod
    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        """Write samples into the rows of a batch, without a copy in between.

        Args:
            rows: For each key of `fields` an array [M, ...].
            indices: [M] sample numbers in this split.
            epoch: The epoch they are read for.
        """

    def __getitem__(self, index: int) -> "dict[str, torch.Tensor]":
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> "list[dict[str, torch.Tensor]]":
        """Several samples at once, which torch's DataLoader asks for where it can."""
        return read_samples(self, indices, self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Samples read by `__getitem__` are those of this epoch from now on."""
        self.epoch = epoch

    @property
    def runs(self) -> SampleRuns | Callable[[int], SampleRuns] | None:
        """The samples of each image or shard, for an order by windows; none where they are cut elsewhere."""
        return self._group_runs(0) if self.pixels else None

    def _group_runs(self, epoch: int) -> SampleRuns:
        """Samples of an epoch by what they are read from: images, or the shards that hold them."""
        images = self.images_of(np.arange(len(self)), epoch)
        # Samples are mixed within what is fetched as one: a shard, or an image.
        groups = self.bank.groups_of(images)
        order = np.argsort(groups, kind="stable")
        firsts = np.unique(groups[order], return_index=True)[1]
        nbytes = self._count_bytes(images[order[firsts]])
        ends = np.append(firsts[1:], len(order))
        return SampleRuns(ends, nbytes, order, self.bank.window_bytes)

    def _count_bytes(self, images: Ints) -> Ints:
        """[n] bytes of images with their masks, or of the shards that hold them."""
        nbytes = self.bank.count_bytes(images)
        if self.masks is None or self.bank.fetches:
            return nbytes
        # A mask has one byte for each pixel.
        return nbytes + self.bank.heights_px[images] * self.bank.widths_px[images]

    @property
    def fetches(self) -> bool:
        """True if the images come from elsewhere when they are needed."""
        return self.bank.fetches and self.pixels

    @property
    def needs_windows(self) -> bool:
        """True if the images come from elsewhere, and have no room here all at once."""
        return self.fetches and not self.bank.fits

    def look_ahead(self, indices: Callable[[], Ints], epoch: int) -> LookAhead | None:
        """Begin to fetch what samples of an epoch need; None where the images are here.

        Args:
            indices: Gives the samples, in their order.
            epoch: The epoch they are read for.
        """
        if not self.fetches:
            return None
        samples = indices()
        # In parts, as the places of an epoch may take more memory than its numbers.
        parts = []
        for start in range(0, len(samples), _PLACED):
            parts.append(self.images_of(samples[start : start + _PLACED], epoch))
        return self.bank.look_ahead(np.concatenate(parts)) if parts else None

    def check_sources(self) -> None:
        """Check, after a worker was killed, that no store was cut short while it was read; cheap.

        Raises:
            StoreCorruptError: It was.
        """
        for bank in (self.bank, self.masks):
            if bank is not None:
                bank.check_size()
