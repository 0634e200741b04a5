"""`ShardedStore`: images by number out of shards that come when they are needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from typing_extensions import override

from lit_data.grid import Ints
from lit_data.io.progress import track
from lit_data.io.shards.cache import ShardCache
from lit_data.io.shards.index import ShardIndex, locate_below
from lit_data.io.store.bands import BandedImage
from lit_data.io.store.files import corrupt
from lit_data.io.store.store import DecodedStore, StoredImages
from lit_data.types import Array


class ShardedStore(StoredImages):
    """See the module; an `lit_data.io.images.image_source.ImageBank`.

    Args:
        index: Local copy of the index.
        root: Local folder that names of images lie in; the images themselves are not there.
        cache: Of the shards.

    Attributes:
        similar: [n] number of the group of images that show the same; none where nobody looked.
        shard_of: [n] shard of each image.
    """

    def __init__(self, index: Path, root: Path, cache: ShardCache[DecodedStore]) -> None:
        self.path, self._root, self.cache = index, root, cache
        shard_index = ShardIndex.open(index)
        self.key, self.similar, self._sources = (
            shard_index.key,
            shard_index.similar,
            shard_index.sources,
        )
        self.channels: int = shard_index.facts["channels"]
        self.dtype: np.dtype[np.generic] = np.dtype(shard_index.facts["dtype"]).newbyteorder("<")
        self.skipped = tuple(
            (locate_below(root, path), str(fault)) for path, fault in shard_index.facts["skipped"]
        )
        self.shard_of, self._row_of = (
            shard_index.places[name].astype(np.int64) for name in ("shard", "row")
        )
        self.heights_px, self.widths_px = (
            shard_index.places[name].astype(np.int64) for name in ("height_px", "width_px")
        )

    def __reduce__(self) -> tuple[type[Self], tuple[Path, Path, ShardCache[DecodedStore]]]:
        return type(self), (self.path, self._root, self.cache)

    def __len__(self) -> int:
        return len(self.heights_px)

    def __getitem__(self, index: int) -> Array:
        store, row = self._open(index)
        return store[row]

    def name(self, index: int) -> str:
        """First source path of one image, below the local folder."""
        return locate_below(
            self._root, self._sources.name(self._sources.rows(range(len(self))[index]).start)
        )

    def stamp(self, index: int) -> list[int]:
        """A whole number that changes with the shard of an image."""
        return self.cache.shards[self.shard_of.item(index)].stamp

    @override
    def open_image(self, index: int) -> Array | BandedImage:
        store, row = self._open(index)
        return store.open_image(row)

    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        """See `lit_data.io.images.image_source.cut_patches`."""
        shards = self.shard_of[images]
        for shard in np.unique(shards).tolist():
            of_shard = np.flatnonzero(shards == shard)
            store = self._check(self.cache.open(shard), images[of_shard])
            patches = np.empty((len(of_shard), *rows.shape[1:]), rows.dtype)
            store.cut_into(
                self._row_of[images[of_shard]], tops_px[of_shard], lefts_px[of_shard], patches
            )
            rows[of_shard] = patches

    @property
    @override
    def source_states(self) -> Array:
        return self._sources.first_states

    @override
    def check_size(self) -> None:
        """Shards are whole files, and compared with their sums when they come."""

    @override
    def verify(self, *, progress: bool = True) -> list[str]:
        """Fetch every shard, and compare every image with its checksum."""
        numbers = range(len(self.cache.shards))
        return [
            line
            for number in track(numbers, "checking shards", len(numbers))
            for line in self._verify(number)
        ]

    def _verify(self, number: int) -> Iterator[str]:
        yield from filter(None, self.cache.open(number).find_bad_images())

    def _open(self, index: int) -> tuple[DecodedStore, int]:
        number = range(len(self))[index]
        store = self.cache.open(self.shard_of.item(number))
        return self._check(store, np.array([number])), self._row_of.item(number)

    def _check(self, store: DecodedStore, images: Ints) -> DecodedStore:
        """Hold a shard against the index."""
        rows = self._row_of[images]
        fits = int(rows.max()) < len(store) and (store.channels, store.dtype) == (
            self.channels,
            self.dtype,
        )
        if not fits or any(
            (mine[images] != theirs[rows]).any()
            for mine, theirs in (
                (self.heights_px, store.heights_px),
                (self.widths_px, store.widths_px),
            )
        ):
            raise corrupt(store.path, "it does not hold what the index of the set says")
        return store
