"""An order that a sampler draws."""

import zlib
from collections.abc import Callable, Iterable, Sized
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from lit_data.core.errors import ConfigError
from lit_data.core.rng import Stream, random_words, seed_generators, unchanged_generators
from lit_data.core.types import Array, Ints
from lit_inspect.counts import counted


class SamplerOrder:
    """Order of each epoch as a sampler of torch draws it.

    The global generators of torch, NumPy and `random` are seeded for the draw and restored, so the
    order is a pure function of seed and epoch, the same on all ranks, unless the sampler has a
    generator of its own.

    Args:
        sampler: Yields sample indices and has a length; its ``set_epoch`` is called if it has one.
        dataset: Dataset of the samples.

    Raises:
        ConfigError: The sampler has no length, or no indices.
    """

    def __init__(self, sampler: Iterable[int], dataset: Any) -> None:  # noqa: ANN401 - any dataset
        if not isinstance(sampler, Sized):
            raise ConfigError(
                f"sampler={type(sampler).__name__} has no length: give a list of indices, or a "
                "sampler with __len__"
            )
        self.sampler: Any = sampler
        self.dataset = dataset
        self._drawn: tuple[tuple[int, int], Ints] | None = None
        if not len(self):
            raise ConfigError("the sampler gives no samples: there is nothing to batch")

    def __len__(self) -> int:
        return len(self.sampler)

    def at(self, positions: Ints, seed: int, epoch: int) -> Ints:
        """Return the sample indices at positions of an epoch."""
        return self._indices(seed, epoch)[positions]

    def digest(self, seed: int, epoch: int) -> int:
        """Return a checksum of the order of an epoch; never 0."""
        return zlib.crc32(self._indices(seed, epoch).tobytes()) | 1 << 32

    def draw(self, seed: int, epoch: int) -> Ints:
        """Draw the order of an epoch and keep it until the next draw."""
        with unchanged_generators():
            seed_generators(random_words(seed, Stream.SAMPLER, 0, epoch, 2)[0])
            indices = self._list(epoch)
        self._drawn = (seed, epoch), indices
        return indices

    def _indices(self, seed: int, epoch: int) -> Ints:
        if self._drawn is None or self._drawn[0] != (seed, epoch):
            return self.draw(seed, epoch)
        return self._drawn[1]

    def _list(self, epoch: int) -> Ints:
        set_epoch: Callable[[int], None] | None = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        length, samples = len(self), len(self.dataset)
        drawn = list(islice(self.sampler, length + 1))
        if len(drawn) != length:
            more = "more" if len(drawn) > length else f"{len(drawn)}"
            raise ConfigError(f"the sampler has length {length} and gives {more}: make them equal")
        indices = _as_array(drawn)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ConfigError(
                f"the sampler gives {drawn[0]!r}: give single indices, together with batch_size="
            )
        if indices.min() < 0 or indices.max() >= samples:
            raise ConfigError(
                f"the sampler gives indices from {indices.min()} to {indices.max()}, and the "
                f"dataset has {counted(samples, 'sample')}: give indices from 0 to {samples - 1}"
            )
        return indices.astype(np.int64)


def _as_array(drawn: list[Any]) -> Array:
    try:
        return np.asarray(drawn)
    except ValueError:  # lists of several lengths
        return np.empty(0, object)


def check_sampler(
    sampler: Iterable[int] | None, shuffle: bool | None, world_size: int | None
) -> None:
    """Refuse a sampler if the order, or the part of a rank, is already determined.

    Raises:
        ConfigError: It is combined with `shuffle`, or splits the samples over ranks itself.
    """
    if sampler is None:
        return
    if shuffle:
        raise ConfigError("sampler= and shuffle=True both set the order: remove one of them")
    if isinstance(sampler, DistributedSampler) and world_size != 1:
        raise ConfigError(
            "a DistributedSampler splits the samples over ranks, as this loader already does: "
            "remove it and set shuffle=True, or also give rank=0, world_size=1"
        )
