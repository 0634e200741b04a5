"""A set of shards, as a data source sees it: a local folder without what is in them, and what is in them."""

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lit_data.errors import ConfigError, DataError
from lit_data.files import find_sha256, replacing
from lit_data.io.cache import HasBytes
from lit_data.io.images.decoders import ImageSource
from lit_data.io.remote import RemoteOptions
from lit_data.io.remote.faults import UnreachableError
from lit_data.io.remote.objects import Objects, open_objects
from lit_data.io.remote.scope import find_fault
from lit_data.io.shards.cache import ShardCache
from lit_data.io.shards.index import FORMAT, POINTER, Shard, ShardIndex, locate_below
from lit_data.io.shards.store import ShardedStore
from lit_data.io.store.arrays import publish
from lit_data.io.store.build import describe_options
from lit_data.io.store.files import Tar, is_there
from lit_data.io.store.store import DecodedStore
from lit_data.io.temp import build_lock, sweep, temp_folder

log = logging.getLogger(__name__)

Opened = TypeVar("Opened", bound=HasBytes)

_WAIT_S = 3600.0
_POINTER_BYTES = 2**16
_INDEX_BYTES = 2**30
_SUM = re.compile(r"[0-9a-f]{64}")


class ShardedRoot:
    """The local side of a set of shards.

    Args:
        root: An address or a folder whose name ends with ``.shards``.
        shelf: Where local copies of all sets lie.
        options: How a server is read.
        max_bytes: Of the copies of shards.
    """

    def __init__(self, root: str, shelf: Path, options: RemoteOptions, max_bytes: int) -> None:
        self.objects: Objects = open_objects(root, options)
        self._options, self._max_bytes = options, max_bytes
        identity = f"{root} {options.endpoint_url or ''}"
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", root.rstrip("/").rpartition("/")[2])[:64]
        self._shelf = shelf / f"{name}-{digest}"

    def refresh(self) -> None:
        """Ask for a newer version of the set, and bring its index and files here.

        Raises:
            DataError: The set cannot be reached, is not there, or is damaged.
        """
        self._shelf.mkdir(parents=True, exist_ok=True)
        with build_lock(self._shelf, wait_s=_WAIT_S, is_done=lambda: False):
            sweep(self._shelf)
            try:
                content = self.objects.read(POINTER, _POINTER_BYTES)
            except UnreachableError as error:
                if self._options.offline == "error" or not (self._shelf / POINTER).exists():
                    raise
                if self._options.offline != "always":
                    log.warning("%s; going on with the set as it was known here", error)
                return
            pointer = _read_pointer(content, str(self.objects))
            for part, sum_ in pointer.items():
                self._bring(part, sum_)
            with replacing(self._shelf / POINTER) as file:
                file.write(content)

    @property
    def folder(self) -> Path:
        """The files beside the images, at their places below the root that the set was made from."""
        return self._shelf / f"files-{self._pointer['files']}"

    @property
    def index_path(self) -> Path:
        """The local copy of the index."""
        return self._shelf / f"index-{self._pointer['index']}.tar"

    def cache_shards(
        self, shards: Sequence[Shard], open_file: Callable[[Path], Opened]
    ) -> ShardCache[Opened]:
        """The local copies of shards, which come when they are needed."""
        return ShardCache(self._shelf / "shards", shards, self.objects, self._max_bytes, open_file)

    def check_options(self, made: str, asked: str, what: str) -> None:
        """Compare how a set was made with what is asked for.

        Args:
            made: Fingerprint of the options.
            asked: That of those that are asked for.
            what: What was done with what, in words.

        Raises:
            ConfigError: They differ.
        """
        if changes := describe_options(made, asked):
            raise ConfigError(
                f"{self.objects}: its {what} with other options: {', '.join(changes)}: set them as "
                "they were, or run `python -m lit_data prepare` with prepare.shards again"
            )

    @property
    def _pointer(self) -> Mapping[str, str]:
        path = self._shelf / POINTER
        if not path.exists():
            self.refresh()
        return _read_pointer(path.read_bytes(), str(path))

    def _most_bytes(self, part: str) -> int:
        most_bytes = self._options.max_bytes
        return (
            _INDEX_BYTES
            if part == "index"
            else sys.maxsize - 1
            if most_bytes is None
            else most_bytes
        )

    def _bring(self, part: str, sum_: str) -> None:
        """Fetch the index, or the files, if that version is not here."""
        target = self._shelf / (f"{part}-{sum_}" if part == "files" else f"{part}-{sum_}.tar")
        if target.exists():
            return
        with temp_folder(self._shelf) as temp:
            tar = temp / f"{part}.tar"
            self.objects.get(f"{part}-{sum_}.tar", tar, self._most_bytes(part))
            if find_sha256(tar) != sum_:
                raise DataError(
                    f"{self.objects}/{part}-{sum_}.tar: its SHA-256 sum is wrong; prepare it again"
                )
            if part != "files":
                tar.rename(target)
            elif not is_there(target):
                _unpack(tar, temp / "files", str(self.objects))
                publish(temp / "files", target)


class ShardedImages(ShardedRoot):
    """A set of images."""

    @cached_property
    def index(self) -> ShardIndex:
        """Index of the dataset."""
        return ShardIndex.open(self.index_path)

    def list_images(self) -> list[ImageSource]:
        """The files that each image was made from; they are not here."""
        table, folder = self.index.sources, self.folder
        return [
            ImageSource(tuple(locate_below(folder, name) for name in table.paths(number)))
            for number in range(len(self.index.places))
        ]

    def open_images(self, decoder: str) -> ShardedStore:
        """The images.

        Args:
            decoder: Fingerprint of the decoder that is asked for.

        Raises:
            ConfigError: They were decoded otherwise.
        """
        self.check_options(self.index.facts["decoder"], decoder, "images were decoded")
        return ShardedStore(
            self.index.path, self.folder, self.cache_shards(self.index.shards, DecodedStore.open)
        )


def _read_pointer(content: bytes, what: str) -> Mapping[str, str]:
    """SHA-256 sums of the index and of the files."""
    try:
        pointer: dict[str, Any] = json.loads(content)
        is_known = pointer["format"] == FORMAT and all(
            _SUM.fullmatch(pointer[part]) for part in ("index", "files")
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{what}: {POINTER} is none of a set of shards ({error!s:.80})") from error
    if not is_known:
        raise DataError(
            f"{what}: the set has format {pointer['format']!r:.20}, this version reads {FORMAT}"
        )
    return {part: str(pointer[part]) for part in ("index", "files")}


def _unpack(tar: Path, folder: Path, what: str) -> None:
    """Write the files of a tar into a new folder, none of them elsewhere."""
    folder.mkdir()
    with tar.open("rb") as file:
        for name, (begin, nbytes) in Tar.open(tar).members.items():
            if fault := find_fault(name):
                raise DataError(f"{what}: the name of a file {fault}: {name!a:.80}")
            file.seek(begin)
            try:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(file.read(nbytes))
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise DataError(f"{what}: a file has the name of a folder: {name!a:.80}") from error
