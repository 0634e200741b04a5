"""A dataset of shards on this machine: its index and files, and images fetched on demand."""

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from typing_extensions import override

from lit_data.core.addresses import RemoteOptions
from lit_data.core.errors import ConfigError, StoreCorruptError
from lit_data.core.files import find_sha256, replacing, short_digest
from lit_data.core.progress import track
from lit_data.core.recent_cache import HasBytes
from lit_data.core.temp import build_lock, sweep, temp_folder
from lit_data.core.types import Array, Ints
from lit_data.images.bank import cut_some
from lit_data.images.decoders import Decoder, ImageSource
from lit_data.images.scope import find_fault
from lit_data.images.store.arrays import publish
from lit_data.images.store.files import Tar, corrupt
from lit_data.images.store.pixels import BandedImage
from lit_data.images.store.sources import describe_options
from lit_data.images.store.store import DecodedStore, StoredImages
from lit_data.wings.remote.faults import UnreachableError
from lit_data.wings.remote.shards.cache import ShardCache, ShardedBank
from lit_data.wings.remote.shards.index import FORMAT, POINTER, SUM, Shard, ShardIndex, locate_below
from lit_data.wings.remote.shards.packed import unpack
from lit_data.wings.remote.transport import Transport, open_transport

log = logging.getLogger(__name__)

Opened = TypeVar("Opened", bound=HasBytes)

_WAIT_S = 3600.0
_POINTER_BYTES = 2**16
_INDEX_BYTES = 2**30


class ShardedStore(ShardedBank[DecodedStore], StoredImages):
    """Numbered images from shards, each of which is fetched on demand.

    Args:
        index: Local copy of the index.
        root: Local folder that names of images are relative to; the images themselves are not
            there.
        cache: Cache of the shards.

    Attributes:
        similar: [n] number of the group of near-duplicates of each image; None if none were
            searched.
    """

    def __init__(self, index: Path, root: Path, cache: ShardCache[DecodedStore]) -> None:
        shard_index = ShardIndex.open(index)
        self.path = index
        self.cache = cache
        self.key = shard_index.key
        self.similar = shard_index.similar
        self._root = root
        self._sources = shard_index.sources
        self.channels = shard_index.facts["channels"]
        self.dtype: np.dtype[np.generic] = np.dtype(shard_index.facts["dtype"]).newbyteorder("<")
        self.skipped = tuple(
            (locate_below(root, path), str(fault)) for path, fault in shard_index.facts["skipped"]
        )
        places = shard_index.places
        self.shard_of = places["shard"].astype(np.int64)
        self._row_of = places["row"].astype(np.int64)
        self.heights_px = places["height_px"].astype(np.int64)
        self.widths_px = places["width_px"].astype(np.int64)

    def __reduce__(self) -> tuple[type[Self], tuple[Path, Path, ShardCache[DecodedStore]]]:
        return type(self), (self.path, self._root, self.cache)

    def __len__(self) -> int:
        return len(self.heights_px)

    def __getitem__(self, index: int) -> Array:
        store, row = self._open(index)
        return store[row]

    def name(self, index: int) -> str:
        """Return the first source path of one image, in the local folder."""
        first_row = self._sources.rows(range(len(self))[index]).start
        return locate_below(self._root, self._sources.name(first_row))

    @override
    def open_image(self, index: int) -> Array | BandedImage:
        store, row = self._open(index)
        return store.open_image(row)

    @override
    def cut_into(self, images: Ints, tops_px: Ints, lefts_px: Ints, rows: Array) -> None:
        shards = self.shard_of[images]
        # Each shard is opened once, in any mix of its images.
        for shard in np.unique(shards).tolist():
            of_shard = np.flatnonzero(shards == shard)
            store = self._check(self.cache.open(shard), images[of_shard])
            cut_some(store, of_shard, self._row_of[images], tops_px, lefts_px, rows)

    @property
    @override
    def source_states(self) -> Array:
        return self._sources.first_states

    @override
    def verify(self, *, progress: bool = True) -> list[str]:
        """Fetch every shard, and compare every image with its checksum."""
        count = len(self.cache.shards)
        damages: list[str] = []
        for number in track(range(count), "checking shards", count, enabled=progress):
            damages += filter(None, self.cache.open(number).find_bad_images())
        return damages

    def _open(self, index: int) -> tuple[DecodedStore, int]:
        number = range(len(self))[index]
        store = self.cache.open(self.shard_of.item(number))
        return self._check(store, np.array([number])), self._row_of.item(number)

    def _check(self, store: DecodedStore, images: Ints) -> DecodedStore:
        """Return a shard after checking that it has the images of the index.

        Raises:
            StoreCorruptError: It does not.
        """
        rows = self._row_of[images]
        is_right = (
            int(rows.max()) < len(store)
            and store.channels == self.channels
            and store.dtype == self.dtype
            and np.array_equal(self.heights_px[images], store.heights_px[rows])
            and np.array_equal(self.widths_px[images], store.widths_px[rows])
        )
        if not is_right:
            raise corrupt(store.path, "its content differs from the index of the set")
        return store


class ShardedRoot:
    """The local side of a dataset of shards.

    Args:
        root: An address or a folder whose name ends with ``.shards``.
        shelf: Folder of the local copies of all datasets.
        options: Options for reading from a server.
        max_bytes: Maximum size of the copies of shards.
    """

    def __init__(self, root: str, shelf: Path, options: RemoteOptions, max_bytes: int) -> None:
        self.transport: Transport = open_transport(root, options)
        self._options = options
        self._max_bytes = max_bytes
        # Two servers may have datasets with the same address.
        identity = f"{root} {options.endpoint_url or ''}"
        name = re.sub(r"[^A-Za-z0-9._-]", "_", root.rstrip("/").rpartition("/")[2])[:64]
        self._shelf = shelf / f"{name}-{short_digest(identity)}"

    def refresh(self) -> None:
        """Ask for a newer version of the dataset, and fetch its index and files.

        Raises:
            DataError: The dataset cannot be reached, or does not exist.
            StoreCorruptError: It is damaged.
        """
        self._shelf.mkdir(parents=True, exist_ok=True)
        with build_lock(self._shelf, wait_s=_WAIT_S, is_done=lambda: False):
            sweep(self._shelf)
            try:
                content = self.transport.read(POINTER, _POINTER_BYTES)
            except UnreachableError as error:
                if self._options.offline == "error" or not (self._shelf / POINTER).exists():
                    raise
                if self._options.offline != "always":
                    log.warning("%s; continuing with the shards that are known here", error)
                return
            pointer = _read_pointer(content, str(self.transport))
            for part, sha256 in pointer.items():
                self._bring(part, sha256)
            # Last, so that the files that it names are already here.
            with replacing(self._shelf / POINTER) as file:
                file.write(content)

    @property
    def folder(self) -> Path:
        """Files beside the images, with paths as in the root that the dataset was made from."""
        return self._shelf / f"files-{self._pointer['files']}"

    @property
    def index_path(self) -> Path:
        """Path of the local copy of the index."""
        return self._shelf / f"index-{self._pointer['index']}.tar"

    def cache_shards(
        self,
        shards: Sequence[Shard],
        open_file: Callable[[Path], Opened],
        unpack: Callable[[Path, Path, int], Path] | None = None,
    ) -> ShardCache[Opened]:
        """Return the cache of local copies of shards, which are fetched on demand; see `ShardCache` for arguments."""
        folder = self._shelf / "shards"
        return ShardCache(folder, shards, self.transport, self._max_bytes, open_file, unpack)

    def check_options(self, made: str, asked: str, what: str) -> None:
        """Compare the options of a dataset with the requested ones.

        Args:
            made: Fingerprint of the options of the dataset.
            asked: Fingerprint of the requested options.
            what: Subject and verb of the message, such as ``images were decoded``.

        Raises:
            ConfigError: The options differ.
        """
        if changes := describe_options(made, asked):
            raise ConfigError(
                f"{self.transport}: its {what} with other options: {', '.join(changes)}: set them as "
                "they were, or run `lit-data prepare` with prepare.shards again"
            )

    @property
    def _pointer(self) -> Mapping[str, str]:
        # Read each time: a refresh, even by another process, may fetch a newer set.
        path = self._shelf / POINTER
        if not path.exists():
            self.refresh()
        return _read_pointer(path.read_bytes(), str(path))

    def _most_bytes(self, part: str) -> int:
        if part == "index":
            return _INDEX_BYTES
        most_bytes = self._options.max_bytes
        return sys.maxsize - 1 if most_bytes is None else most_bytes

    def _bring(self, part: str, sha256: str) -> None:
        """Fetch the index or the files, if that version is not here."""
        name = f"{part}-{sha256}.tar"
        target = self._shelf / (name.removesuffix(".tar") if part == "files" else name)
        if target.exists():
            return
        with temp_folder(self._shelf) as temp:
            tar = temp / f"{part}.tar"
            self.transport.get(name, tar, self._most_bytes(part))
            if find_sha256(tar) != sha256:
                raise StoreCorruptError(
                    f"{self.transport}/{name}: its SHA-256 sum is wrong; prepare it again"
                )
            if part == "index":
                tar.rename(target)  # it is mapped as it is
            else:
                _unpack(tar, temp / "files", str(self.transport))
                publish(temp / "files", target)


class ShardedImages(ShardedRoot):
    """A sharded dataset of images."""

    @cached_property
    def index(self) -> ShardIndex:
        """Index of the dataset."""
        return ShardIndex.open(self.index_path)

    def list_images(self) -> list[ImageSource]:
        """Return the files that each image was made from; they are not local."""
        table, folder = self.index.sources, self.folder
        sources = []
        for number in range(len(self.index.places)):
            paths = [locate_below(folder, name) for name in table.paths(number)]
            sources.append(ImageSource(tuple(paths)))
        return sources

    def open_images(self, decoder: Decoder) -> ShardedStore:
        """Return the images.

        Args:
            decoder: The requested decoder, which also decodes packed shards.

        Raises:
            ConfigError: The images were decoded with other options.
        """
        fingerprint = self.index.facts["decoder"]
        self.check_options(fingerprint, decoder.fingerprint, "images were decoded")
        shards = self.index.shards
        unpack_shard = None
        if shards[0].packed is not None:
            unpack_shard = partial(unpack, decoder=decoder)
        cache = self.cache_shards(shards, DecodedStore.open, unpack_shard)
        return ShardedStore(self.index.path, self.folder, cache)


def _read_pointer(content: bytes, what: str) -> Mapping[str, str]:
    """Return the SHA-256 sums of the index and of the files."""
    try:
        pointer: dict[str, Any] = json.loads(content)
        is_known = pointer["format"] == FORMAT and all(
            SUM.fullmatch(pointer[part]) for part in ("index", "files")
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreCorruptError(
            f"{what}: {POINTER} is none of a set of shards ({error!s:.80})"
        ) from error
    if not is_known:
        raise StoreCorruptError(
            f"{what}: the set has format {pointer['format']!r:.20}, this version reads {FORMAT}"
        )
    return {part: str(pointer[part]) for part in ("index", "files")}


def _unpack(tar: Path, folder: Path, what: str) -> None:
    """Write the files of a tar into a new folder, none of them outside."""
    folder.mkdir()
    with tar.open("rb") as file:
        for name, (begin, nbytes) in Tar.open(tar).members.items():
            # Names of a tar are not trusted.
            if fault := find_fault(name):
                raise StoreCorruptError(f"{what}: the name of a file {fault}: {name!a:.80}")
            file.seek(begin)
            try:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(file.read(nbytes))
            # If one of two names is a file and a folder of the other, the second cannot be written.
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise StoreCorruptError(
                    f"{what}: a file has the name of a folder: {name!a:.80}"
                ) from error
