"""Folders of arrays: a ``NAME.npy`` for each, which readers map without a copy, and ``meta.json``.

The folder may also be a single file, an uncompressed tar, which is mapped as it is. Shards of a
dataset on a server have this form.

The content of a folder is not trusted: `meta.json` has a limited size and one canonical form, and
carries its own CRC-32; each file must begin with the header and have the length that `meta.json`
states, and each array has a CRC-32. The rules are those of safetensors
(https://github.com/huggingface/safetensors#format).
"""

import dataclasses
import errno
import io
import json
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_data.core.errors import StoreError, show_path
from lit_data.core.files import describe_unwritable, find_crc32, sync_folder
from lit_data.core.temp import temp_folder
from lit_data.core.types import Array, PathText
from lit_data.images.store.files import (
    TAR_SUFFIX,
    Mapped,
    Tar,
    check_length,
    corrupt,
    is_there,
    map_file,
    new_file,
    open_part,
    reserve,
    write_all,
)

log = logging.getLogger(__name__)


META_NAME = "meta.json"
MAX_META_BYTES = 16 * 2**20
MAX_LENGTH = 2**62
"""File of the values of an array."""
_CHECKSUM = "crc32"
_SYNC_BYTES = 128 * 2**20
"""Bytes of an array that are written to the disk at once."""
_MOST_FILES = 64  # of a folder in a tar
_NAME = re.compile(r"[a-z][a-z_0-9]{0,40}")
_DTYPE = re.compile(r"[<|][biuf][1248]")


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """Facts of an array in `meta.json`.

    Args:
        descr: Dtype, little-endian, as in a ``.npy`` file; a list of [name, dtype] for records.
        shape: Shape of the array: (n,).
        crc32: CRC-32 of the values; None if they have checksums of their own.

    Raises:
        ValueError: No array can have these facts.
    """

    descr: Any
    shape: tuple[int, ...]
    crc32: int | None = None

    def __post_init__(self) -> None:
        has_one_axis = len(self.shape) == 1 and is_count(self.shape[0])
        has_checksum = self.crc32 is None or (is_count(self.crc32) and self.crc32 < 2**32)
        if not (_is_descr(self.descr) and has_one_axis and has_checksum):
            raise ValueError(f"not an array of {self!r:.80}")

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Dtype of the values."""
        if isinstance(self.descr, str):
            return np.dtype(self.descr)
        return np.dtype([tuple(pair) for pair in self.descr])

    @property
    def nbytes(self) -> int:
        """Number of bytes of all values."""
        return self.shape[0] * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Number of bytes of the file."""
        return len(self.header) + self.nbytes

    @property
    def header(self) -> bytes:
        """First bytes of the file, whose number is the same for any length of the first axis."""
        header = io.BytesIO()
        fields = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(header, fields)
        return header.getvalue()


class ArrayFolder:
    """Arrays of a published folder, whose files never change.

    Args:
        path: The folder, or a tar of it.
        kind: Kind of content that it must have, in one word.
        version: Version of the layout of that kind.

    Attributes:
        key: SHA-256 of everything that the arrays were made from.
        arrays: Facts of each array, by its name.
        facts: All other facts, unchecked.

    Raises:
        StoreError: The folder does not exist, or cannot be read.
        StoreCorruptError: Its `meta.json` was not written by this version.
    """

    def __init__(self, path: PathText, kind: str, version: int) -> None:
        self.path = Path(path)
        self._tar: Tar | None = None
        # Read one byte more of `meta.json` than allowed, to detect a longer one.
        if self.path.suffix == TAR_SUFFIX and self.path.is_file():
            self._tar = Tar.open(self.path, _MOST_FILES)
            fields = _decode_meta(self._tar.read(META_NAME, MAX_META_BYTES + 1), self.path)
        elif is_there(self.path):
            fields = read_meta(self.path / META_NAME)
        else:
            raise StoreError(
                f"no store of {kind} at {show_path(self.path)}; run `lit-data prepare` to make it"
            )
        try:
            if (fields["kind"], fields["version"]) != (kind, version):
                raise ValueError(
                    f"it holds {fields['kind']!r:.40} of version {fields['version']!r:.40}"
                )
            self.key: str = fields["key"]
            self.facts: dict[str, Any] = dict(fields["facts"])
            self.arrays: dict[str, ArrayFacts] = {}
            for name, array_fields in fields["arrays"].items():
                self.arrays[name] = _read_facts(name, array_fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise corrupt(
                self.path / META_NAME, f"no {kind} of version {version} ({error!s:.200})"
            ) from error
        self._maps: dict[str, Mapped] = {}
        self._tar_map: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes of the files of all arrays."""
        return sum(facts.file_bytes for facts in self.arrays.values())

    def map_again(self, name: str) -> tuple["Mapped", Array]:
        """Map an array a second time, for another pattern of reads.

        Returns:
            The map with the offset of the values in it, and the array in it.
        """
        facts = self.arrays[name]
        data, header_begin = self._map_file(name, again=True)
        begin = header_begin + len(facts.header)
        return Mapped(data, begin), np.ndarray(facts.shape, facts.dtype, data, begin)

    def map(self, name: str, descr: Any = None, *, check: bool = False) -> Array:  # noqa: ANN401 - see `ArrayFacts`
        """Map an array as a read-only view of its file.

        Args:
            name: Name of the array.
            descr: Dtype that it must have; None accepts any.
            check: Read all of it now and compare it with its CRC-32.

        Raises:
            StoreError: The file cannot be opened.
            StoreCorruptError: The array is missing, or does not match `meta.json`.
        """
        path = self.path / f"{name}.npy"
        facts = self.arrays.get(name)
        if facts is None or (descr is not None and facts.dtype != np.dtype(descr)):
            raise corrupt(path, f"expected an array of {descr}, found {facts}")
        self._maps[name] = data, begin = self._map_file(name)
        values_begin = begin + len(facts.header)
        if data[begin:values_begin] != facts.header:
            raise corrupt(path, "its header is not the one that was written")
        if check:
            damage = self._describe_damage(name)
            if damage:
                raise corrupt(path, damage)
        array: Array = np.ndarray(facts.shape, facts.dtype, data, values_begin)
        return array

    def check_size(self) -> None:
        """Compare the length of every file with `meta.json`, which is cheap.

        A read past the end of a truncated file kills a process (SIGBUS) and cannot be caught, so
        this is the first check after a worker was killed that way.

        Raises:
            StoreCorruptError: A file has another length than it should.
        """
        if self._tar is not None:  # its length was compared when it was mapped
            return
        for name, facts in self.arrays.items():
            path = self.path / f"{name}.npy"
            if name in self._maps:
                # The file that is mapped, even if another one has its name now.
                nbytes = self._maps[name].data.size()
            else:
                nbytes = path.stat().st_size if path.is_file() else 0
            check_length(path, facts.file_bytes, nbytes)

    def find_damages(self) -> Iterator[str]:
        """Read every byte of the arrays that have a CRC-32.

        Yields:
            For each array, a line about what is wrong, or "".
        """
        for name, facts in self.arrays.items():
            if facts.crc32 is None:
                continue
            if name not in self._maps:
                self.map(name)
            damage = self._describe_damage(name)
            yield f"{show_path(self.path / name)}.npy: {damage}" if damage else ""

    def _map_file(self, name: str, *, again: bool = False) -> "Mapped":
        """Return the map that contains an array, with the offset of its header."""
        path = self.path / f"{name}.npy"
        expected_bytes = self.arrays[name].file_bytes
        if self._tar is None:
            return Mapped(map_file(path, expected_bytes), 0)
        begin, nbytes = self._tar.members.get(path.name, (0, 0))
        check_length(path, expected_bytes, nbytes)
        if again:
            return Mapped(map_file(self.path, self._tar.nbytes), begin)
        # The arrays of a tar share one map: an open file for each would be too many.
        if self._tar_map is None:
            self._tar_map = map_file(self.path, self._tar.nbytes)
        return Mapped(self._tar_map, begin)

    def _describe_damage(self, name: str) -> str:
        """Compare a mapped array with its CRC-32, and return what is wrong, or ""."""
        facts, (data, begin) = self.arrays[name], self._maps[name]
        first = begin + len(facts.header)
        crc32 = find_crc32(memoryview(data)[first : first + facts.nbytes])
        if facts.crc32 is None or crc32 == facts.crc32:
            return ""
        return f"expected CRC-32 {facts.crc32:08x}, found {crc32:08x}"


class ArrayWriter:
    """Writer of the arrays of a new folder, and of `meta.json` at the end.

    Args:
        folder: An empty folder, which is published when everything is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays: dict[str, ArrayFacts] = {}

    def add(self, name: str, array: Array) -> None:
        """Write an array [n] at once."""
        self.join(name, array.dtype, [array])

    def join(self, name: str, dtype: "np.dtype[Any]", parts: Iterable[Array]) -> None:
        """Write an array [n] that consists of parts, cast to a dtype."""
        with self.stream(name, dtype) as stream:
            for part in parts:
                stream.append(part)

    @contextmanager
    def stream(
        self,
        name: str,
        dtype: "np.dtype[Any]",
        most: int = 0,
        *,
        checksum: bool = True,
    ) -> Iterator["ArrayStream"]:
        """Write an array [n] part by part.

        Args:
            name: Name of the array.
            dtype: Dtype of its values.
            most: Length of the array or more, for which space is reserved.
            checksum: Compute its CRC-32; False if its values have checksums of their own.
        """
        little = np.dtype(dtype).newbyteorder("<")
        descr: Any = np.lib.format.dtype_to_descr(little)
        if not isinstance(descr, str):
            descr = [list(pair) for pair in descr]  # JSON knows no tuples
        with new_file(self.folder / f"{name}.npy") as fd:
            facts = ArrayFacts(descr, (most,))
            if most:
                reserve(fd, facts.file_bytes)
            write_all(fd, memoryview(facts.header))
            with ThreadPoolExecutor(1, thread_name_prefix="lit_data_sync") as syncing:
                stream = ArrayStream(fd, little, syncing, checksum=checksum)
                yield stream
                stream.wait()
            # The header has the same size for any length, so it can be written at the end.
            facts = ArrayFacts(descr, (stream.nbytes // little.itemsize,), stream.crc32)
            os.pwrite(fd, facts.header, 0)
            os.ftruncate(fd, len(facts.header) + stream.nbytes)
        self._arrays[name] = facts

    def finish(self, kind: str, version: int, key: str, facts: Mapping[str, Any]) -> None:
        """Write `meta.json`; see `ArrayFolder`.

        Raises:
            ValueError: The text is longer than `MAX_META_BYTES`.
        """
        arrays = {name: dataclasses.asdict(array) for name, array in self._arrays.items()}
        text = encode_meta(
            {"kind": kind, "version": version, "key": key, "arrays": arrays, "facts": dict(facts)}
        )
        if len(text) > MAX_META_BYTES:
            raise ValueError(f"{len(text)} bytes of {META_NAME} are too many")
        with new_file(self.folder / META_NAME) as fd:
            write_all(fd, memoryview(text))


class ArrayStream:
    """Stream that appends values to a file, and flushes them to the disk in the background.

    Args:
        fd: Descriptor of the file, open for writing.
        dtype: Dtype of the values.
        syncing: One thread, which waits for the disk while the next values are computed.
        checksum: Compute the CRC-32.

    Attributes:
        nbytes: Bytes written so far.
        crc32: CRC-32 of these bytes; None without a checksum.
    """

    def __init__(
        self, fd: int, dtype: "np.dtype[Any]", syncing: ThreadPoolExecutor, *, checksum: bool
    ) -> None:
        self._fd = fd
        self._dtype = dtype
        self._syncing = syncing
        self._sync: Future[None] | None = None
        self._synced_bytes = 0
        self.nbytes = 0
        self.crc32 = 0 if checksum else None

    def append(self, values: Array) -> None:
        """Append values."""
        if values.size == 0:  # which have no view as bytes
            return
        data = np.ascontiguousarray(values, self._dtype).view(np.uint8).data
        write_all(self._fd, data)
        self.nbytes += data.nbytes
        if self.crc32 is not None:
            self.crc32 = find_crc32(data, self.crc32)
        is_idle = self._sync is None or self._sync.done()
        if is_idle and self.nbytes - self._synced_bytes >= _SYNC_BYTES:
            self.wait()
            self._synced_bytes = self.nbytes
            self._sync = self._syncing.submit(os.fsync, self._fd)

    def wait(self) -> None:
        """Wait for all writes in the background.

        Raises:
            OSError: The disk failed.
        """
        if self._sync is not None:
            self._sync.result()


def encode_meta(fields: Mapping[str, Any]) -> bytes:
    """Return the canonical text of these fields, including its own CRC-32."""
    return _dump({**fields, _CHECKSUM: find_crc32(_dump(fields))})


def read_meta(path: Path) -> dict[str, Any]:
    """Return the fields of a `meta.json`, without its CRC-32.

    Raises:
        StoreError: The file cannot be opened.
        StoreCorruptError: Its text is not one that `encode_meta` returns.
    """
    with open_part(path) as file:
        return _decode_meta(file.read(MAX_META_BYTES + 1), path)


def _decode_meta(raw: bytes, path: Path) -> dict[str, Any]:
    if len(raw) > MAX_META_BYTES:
        raise corrupt(path, f"expected at most {MAX_META_BYTES} bytes, found more")
    try:
        fields: dict[str, Any] = json.loads(raw, object_pairs_hook=refuse_twice)
        # Encoded again, the fields must give the same bytes, so that all parsers agree on the text.
        del fields[_CHECKSUM]
        is_canonical = encode_meta(fields) == raw
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise corrupt(path, f"not a text that was written ({error!s:.200})") from error
    if not is_canonical:
        raise corrupt(path, "its bytes are not those that were written")
    return fields


def keep_arrays(
    folder: Path, key: str, kind: str, version: int, make: Callable[[], Mapping[str, Array]]
) -> ArrayFolder:
    """Open the arrays [n] of a key, and make and publish them first if they do not exist.

    Args:
        folder: Folder of all such arrays, which is created.
        key: Key of everything that the arrays depend on, so that they are never out of date.
        kind: Kind of content, in one word.
        version: Version of the layout of that kind.
        make: Makes the arrays.

    Raises:
        StoreError: The folder cannot be written.
    """
    path = folder / key
    if not is_there(path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with temp_folder(folder) as temp:
                writer = ArrayWriter(temp)
                for name, array in make().items():
                    writer.add(name, array)
                writer.finish(kind, version, key, {})
                publish(temp, path)
        except OSError as error:
            raise StoreError(describe_unwritable(folder, f"a file of {kind}", error)) from error
    return ArrayFolder(path, kind, version)


def publish(temp: Path, target: Path) -> None:
    """Rename a written folder to its final name."""
    sync_folder(temp)
    try:
        temp.rename(target)
    except OSError as error:  # another process was first, and its folder is as good
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        log.info("%s: another process published this store first; it is used", show_path(target))
    sync_folder(target.parent)


def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from the pairs of a JSON object, and refuse repeated names; for `json.loads`."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice")
    return fields


def is_count(value: object) -> bool:
    """Return True if a value from JSON is an integer of 0 or more that fits into 62 bits."""
    return type(value) is int and 0 <= value <= MAX_LENGTH


def _read_facts(name: str, fields: Mapping[str, Any]) -> ArrayFacts:
    if not _NAME.fullmatch(name):
        raise ValueError(f"no array is called {name!r:.80}")
    return ArrayFacts(**{**fields, "shape": tuple(fields["shape"])})


def _is_descr(descr: Any) -> bool:  # noqa: ANN401 - of a JSON text
    """Return True for a little-endian dtype of numbers, or of records of numbers."""
    pairs = [["value", descr]] if isinstance(descr, str) else descr
    if not isinstance(pairs, list) or not 0 < len(pairs) < 32:
        return False
    return all(_is_field(pair) for pair in pairs)


def _is_field(pair: Any) -> bool:  # noqa: ANN401 - of a JSON text
    return len(pair) == 2 and bool(_NAME.fullmatch(pair[0]) and _DTYPE.fullmatch(pair[1]))


def _dump(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
