"""`ShardCache`: local copies of shards, limited in bytes and shared by all processes of a machine."""

import logging
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from rich.filesize import decimal
from typing_extensions import override

from lit_data.core.bank import Bank
from lit_data.core.errors import ConfigError, DataError, StoreError
from lit_data.core.files import find_sha256
from lit_data.core.recent_cache import HasBytes, LruCache
from lit_data.core.temp import hold_lock, sweep, temp_folder
from lit_data.core.types import Ints
from lit_data.images.store.files import TAR_SUFFIX
from lit_data.wings.remote.shards.index import Packed, Shard
from lit_data.wings.remote.transport import Transport

log = logging.getLogger(__name__)

_LOCKS = 64  # files; shards share them by number, as each lock is a permanent file
_TRIES = 5
_TOUCH_S = 1.0
_DESCRIPTORS = 4  # of a process for each open shard, which takes up to two of them


Opened = TypeVar("Opened", bound=HasBytes)


class ShardCache(Generic[Opened]):
    """Cache of shards: fetches missing ones, removes the least recently used.

    One process fetches a shard while the others that need it wait. A removed shard stays readable
    to processes that have it open: its space on the disk is freed when they close it. Each process
    closes all but the most recently used shards, which take up to half of the limit.

    Args:
        folder: Folder of the copies, created if missing.
        shards: Shards of the dataset.
        transport: Transport to fetch them with.
        max_bytes: Maximum size of all copies together.
        open_file: Opens a local copy.
        unpack: Decodes a packed shard into a temporary folder. It is called with its tar, that
            folder, and the maximum bytes of pixels, and returns the tar of the copy.

    Raises:
        ConfigError: The limit is less than four shards.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        transport: Transport,
        max_bytes: int,
        open_file: Callable[[Path], Opened],
        unpack: Callable[[Path, Path, int], Path] | None = None,
    ) -> None:
        largest = max(shard.nbytes for shard in shards)
        self._largest = largest
        self._unpack = unpack
        self._spare_bytes = max(_count_room(shard) - shard.nbytes for shard in shards)
        needed_bytes = sum(shard.nbytes for shard in shards) + self._spare_bytes
        if max_bytes < min(4 * largest, needed_bytes):
            raise ConfigError(
                f"data.cache_bytes={max_bytes} ({decimal(max_bytes)}) must hold at least four "
                f"shards, the largest of {transport} has {decimal(largest)}: raise it to "
                f"{4 * largest} or more"
            )
        self.folder = folder
        self.shards = shards
        self.max_bytes = max_bytes
        self.transport = transport
        self._open_copy = open_file
        self._sizes = np.array([shard.nbytes for shard in shards], np.int64)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        max_open = None if most == resource.RLIM_INFINITY else most // _DESCRIPTORS
        # At least one shard, even if it takes more than a half.
        self._opened: LruCache[int, Opened] = LruCache(
            max(max_bytes // 2, largest), max_items=max_open
        )
        self._stamped_s: dict[int, float] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self.folder, self.shards, self.transport, self.max_bytes
        return type(self), (*arguments, self._open_copy, self._unpack)

    @property
    def fits(self) -> bool:
        """True if all shards fit here."""
        return int(self._sizes.sum()) + self._spare_bytes <= self.max_bytes

    @property
    def window_bytes(self) -> int:
        """Maximum size of shards that an order may mix: those in use and the next ones take half of the cache."""
        return self.max_bytes // 4

    def count_bytes(self, numbers: Ints) -> Ints:
        """Return the bytes of shards: [n]."""
        return self._sizes[numbers]

    def look_ahead(self, numbers: Ints) -> "Prefetch":
        """Start fetching the shards that an epoch needs.

        Args:
            numbers: [samples] the shard of each sample, in their order.
        """
        shards, firsts = np.unique(numbers, return_index=True)
        lasts = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
        order = np.argsort(firsts)
        return Prefetch(self, shards[order].tolist(), lasts[order].tolist())

    def open(self, number: int) -> Opened:
        """Open a shard, after fetching it if it is not here.

        Raises:
            DataError: It cannot be fetched, or is damaged at its address.
        """
        opened = self._opened.get_or_load(number, lambda: self._open_file(number))
        # Others remove the least recently used shards; updating the time once a second is enough. A
        # shard that was just opened has its time already, and may be released by now.
        if time.monotonic() - self._stamped_s.get(number, math.inf) > _TOUCH_S:
            self._stamp_used(number)
        return opened

    def fetch(self, number: int) -> Path:
        """Return the local copy of a shard, fetching it if it does not exist."""
        path, shard = self._path(number), self.shards[number]
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with hold_lock(self.folder / f"{number % _LOCKS:02}.lock"):
                if not path.exists():
                    with self._taking_turns(number):
                        self._fetch(shard, path)
        return path

    def release(self, number: int) -> None:
        """Mark a shard as not needed any more before others are."""
        self._stamp(number, 0.0)

    def _open_file(self, number: int) -> Opened:
        for left in reversed(range(_TRIES)):
            path = self.fetch(number)
            self._stamp_used(number)
            try:
                return self._open_copy(path)
            except (StoreError, FileNotFoundError) as error:
                if path.exists():
                    raise
                if not left:
                    raise StoreError(
                        f"{path}: other processes removed it {_TRIES} times before it was opened: "
                        "they share a cache that is too small for all of them, raise "
                        "data.cache_bytes"
                    ) from error
        raise AssertionError

    def _fetch(self, shard: Shard, path: Path) -> None:
        room_bytes = _count_room(shard)
        with temp_folder(self.folder) as temp:
            part = temp / f"{room_bytes}.part"
            with hold_lock(self.folder / "room.lock"):
                self._make_room(room_bytes)
                part.touch()  # from here on others count it
            if shard.packed is None:
                self._get(shard.name, part, shard.sha256, shard.nbytes)
            else:
                self._decode(shard, shard.packed, part)
            part.rename(path)
        log.debug("fetched %s", shard.name)

    def _taking_turns(self, number: int) -> AbstractContextManager[None]:
        """Limit how many packed shards are fetched at a time, because each then takes more space."""
        if self.shards[number].packed is None:
            return nullcontext()
        turns = max(1, (self.max_bytes - 2 * self._largest) // (4 * self._largest))
        return hold_lock(self.folder / f"turn-{number % min(turns, _LOCKS):02}.lock")

    def _get(self, name: str, path: Path, sha256: str, nbytes: int) -> None:
        """Copy a file of the dataset and compare its checksum.

        Raises:
            DataError: It cannot be fetched, or is damaged at its address.
        """
        for is_last in (False, True):
            self.transport.get(name, path, nbytes)
            if find_sha256(path) == sha256:
                return
            if is_last:
                raise DataError(
                    f"{self.transport}/{name}: its SHA-256 sum is wrong, twice; prepare it again"
                )

    def _decode(self, shard: Shard, packed: Packed, part: Path) -> None:
        """Fetch the files of a shard and decode them, to the same bytes as when the shard was written.

        Raises:
            DataError: The files cannot be fetched, or decode to other pixels on this machine.
        """
        assert self._unpack is not None, "sets of packed shards are opened with a decoder"
        work = self.folder / "decoding"
        work.mkdir(exist_ok=True)
        sweep(work)
        with temp_folder(work) as temp:
            tar = temp / "packed.tar"
            self._get(shard.name, tar, packed.sha256, packed.nbytes)
            decoded = self._unpack(tar, temp, self.max_bytes // 2)
            if find_sha256(decoded) != shard.sha256:
                raise DataError(
                    f"{self.transport}/{shard.name}: its images decode to different pixels here "
                    "than where it was written: install the same versions of the libraries that "
                    "decode images, or prepare it again, prepare.encoding=decoded"
                )
            decoded.replace(part)

    def _make_room(self, nbytes: int) -> None:
        """Remove copies until `nbytes` fit within the limit, or there are no more."""
        sweep(self.folder)
        # First: a shard that is renamed meanwhile may count twice, but is not missed.
        coming = self._count_coming()
        copies: list[tuple[int, int, Path]] = []
        for path in self.folder.glob(f"*{TAR_SUFFIX}"):
            with suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                copies.append((status.st_mtime_ns, status.st_size, path))
        used_bytes = sum(size_bytes for _, size_bytes, _ in copies) + coming
        for _, size_bytes, path in sorted(copies):  # the least recently used first
            if used_bytes + nbytes <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            used_bytes -= size_bytes

    def _count_coming(self) -> int:
        """Return the bytes of the shards that are being fetched."""
        coming_bytes = 0
        for folder in self.folder.glob(".build-*"):
            with suppress(FileNotFoundError):  # it has just arrived
                for path in folder.iterdir():
                    coming_bytes += int(path.name.partition(".")[0])  # its name is its size
        return coming_bytes

    def _stamp_used(self, number: int) -> None:
        self._stamped_s[number] = time.monotonic()
        self._stamp(number, time.time())

    def _stamp(self, number: int, time_s: float) -> None:
        with suppress(OSError):  # it was removed, and stays readable here
            os.utime(self._path(number), (time_s, time_s))

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.shards[number].sha256}{TAR_SUFFIX}"


def _count_room(shard: Shard) -> int:
    """Return the bytes that a shard takes while it is fetched; a packed one has its files and pixels twice."""
    if shard.packed is None:
        return shard.nbytes
    return 2 * (shard.nbytes + shard.packed.nbytes)


class ShardedBank(Bank, Generic[Opened]):
    """Items from shards, each of which is fetched on demand.

    Shards are complete files whose checksums are compared when they arrive, so `check_size` has
    nothing to do.

    Attributes:
        cache: Cache of the shards.
        shard_of: [n] shard of each item.
    """

    fetches = True
    cache: ShardCache[Opened]
    shard_of: Ints

    @property
    @override
    def fits(self) -> bool:
        return self.cache.fits

    @property
    @override
    def window_bytes(self) -> int:
        return self.cache.window_bytes

    @override
    def groups_of(self, numbers: Ints) -> Ints:
        return self.shard_of[numbers]

    @override
    def count_bytes(self, numbers: Ints) -> Ints:
        return self.cache.count_bytes(self.shard_of[numbers])

    @override
    def look_ahead(self, numbers: Ints) -> "Prefetch":
        return self.cache.look_ahead(self.shard_of[numbers])

    @override
    def stamp(self, index: int) -> list[int]:
        """Return an integer that changes with the shard of an item."""
        return self.cache.shards[self.shard_of.item(index)].stamp


class Prefetch:
    """Prefetching of shards in the order of an epoch, ahead of the samples in use.

    Args:
        cache: Cache of the shards.
        numbers: Shards, in the order of their first use.
        lasts: For each shard, the last sample that needs it.

    Attributes:
        max_bytes: Maximum size of shards that are fetched and still needed; half of the cache.
    """

    def __init__(
        self, cache: ShardCache[Any], numbers: Sequence[int], lasts: Sequence[int], threads: int = 4
    ) -> None:
        self.max_bytes = cache.max_bytes // 2
        self._cache = cache
        self._numbers = numbers
        self._lasts = lasts
        self._next = 0  # of `numbers`, to be fetched
        self._live: dict[int, int] = {}  # last sample that needs each shard that takes room
        self._live_bytes = 0
        self._has_begun = False  # the first shard is here
        self._is_closed = False
        self._changed = threading.Condition()
        for _ in range(min(threads, len(numbers))):
            threading.Thread(target=self._work, name="lit_data shards", daemon=True).start()

    def advance(self, samples: int) -> None:
        """Report how many samples have been read."""
        with self._changed:
            done = [number for number, last in self._live.items() if last < samples]
            for number in done:
                del self._live[number]
                self._live_bytes -= self._cache.shards[number].nbytes
            if done:
                self._changed.notify_all()
        for number in done:
            self._cache.release(number)

    def close(self) -> None:
        """Start no more fetches; those in progress end by themselves."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (number := self._take()) is not None:
            try:
                self._cache.fetch(number)
            except (DataError, StoreError, OSError) as error:
                log.info("%s", error)  # the reader that needs it tries again, and reports it
            with self._changed:
                self._has_begun = True
                self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._next == len(self._numbers) or self._has_room()
            )
            if self._is_closed or self._next == len(self._numbers):
                return None
            number = self._numbers[self._next]
            self._live[number] = self._lasts[self._next]
            self._live_bytes += self._cache.shards[number].nbytes
            self._next += 1
            return number

    def _has_room(self) -> bool:
        nbytes = self._cache.shards[self._numbers[self._next]].nbytes
        if not self._live:
            return True
        # The first shard has the whole bandwidth.
        return self._has_begun and self._live_bytes + nbytes <= self.max_bytes
