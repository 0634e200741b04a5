"""One sparse volume on disk: a folder of arrays, how it is written in bounded memory, and how it is mapped."""

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from lit_data.errors import DataError
from lit_data.io.store.arrays import META_NAME, ArrayFolder, ArrayWriter, is_count, publish
from lit_data.io.store.files import corrupt, explain_errors, keep_private, write_all
from lit_data.io.store.sources import SourceTable
from lit_data.io.temp import temp_folder
from lit_data.io.volumes.indexing import IndexOptions, bring_to, is_whole, scan_slabs
from lit_data.io.volumes.occupied import LabelCollector, value_dtype
from lit_data.io.volumes.reading import open_labels, open_volume
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import (
    LABEL_DTYPES,
    VALUE_DTYPES,
    LabelIndex,
    SparseVolume,
    index_dtype,
)
from lit_data.io.volumes.volume import Triple, Volume
from lit_data.types import Array

MAX_OPEN: Final = 64
"""Volumes that stay mapped; each holds up to seven descriptors, of which a process has about a thousand."""


KIND: Final = "sparse volume"
VERSION: Final = 2
"""Version of the layout; part of every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseFacts:
    """The facts of one volume.

    Args:
        name: Of the volume.
        path: Of its source.
        shape: (z, y, x).
        spacing_mm: (z, y, x).
        affine: 16 numbers, row by row; None if unknown.
        low_hu: See ``SparseVolume``.
        high_hu: See ``SparseVolume``.

    Raises:
        ValueError: or TypeError: one of them cannot be.
    """

    name: str
    path: str
    shape: Triple
    spacing_mm: tuple[float, float, float]
    affine: tuple[float, ...] | None
    low_hu: float
    high_hu: float | None

    def __post_init__(self) -> None:
        for name in ("shape", "spacing_mm", "affine"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        numbers = [
            *self.spacing_mm,
            *(self.affine or ()),
            self.low_hu,
            0 if self.high_hu is None else self.high_hu,
        ]
        checks = {
            "shape": len(self.shape) == 3
            and all(is_count(length) and length > 0 for length in self.shape),
            "affine": self.affine is None or len(self.affine) == 16,
            "spacing_mm": len(self.spacing_mm) == 3,
            "a number": all(
                isinstance(number, int | float) and math.isfinite(number) for number in numbers
            ),
            "a text": all(isinstance(text, str) for text in (self.name, self.path)),
        }
        if wrong := [name for name, is_right in checks.items() if not is_right]:
            raise ValueError(f"wrong: {', '.join(wrong)}")

    def as_meta(self) -> dict[str, Any]:
        """For `meta.json`."""
        return dataclasses.asdict(self)


class StoredVolume:
    """A volume of a store, of which nothing but its `meta.json` is read before it is mapped.

    Arrays are those of ``SparseVolume``: ``positions``, ``values`` and ``slices``, with labels also
    ``labels``, ``classes``, ``class_starts`` and ``class_positions``.

    Args:
        path: Its folder.

    Attributes:
        folder: Its arrays.
        facts: What is known of it.

    Raises:
        StoreError: It cannot be opened.
        StoreCorruptError: It is damaged, or not of this version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = ArrayFolder(path, KIND, VERSION)
        try:
            self.facts = SparseFacts(**self.folder.facts)
            self._descrs = self._expect()
            self.points = self.folder.arrays["positions"].shape[0]
        except (ValueError, TypeError, KeyError) as error:
            raise corrupt(
                self.folder.path / META_NAME, f"no facts of a volume ({error!s:.200})"
            ) from error
        self.folder.check_size()

    @property
    def nbytes(self) -> int:
        """Bytes of the files of its arrays."""
        return self.folder.nbytes

    @property
    def array_bytes(self) -> int:
        """Bytes of its arrays, without the headers of their files."""
        return sum(facts.nbytes for facts in self.folder.arrays.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the volume as a dense array of the values' dtype."""
        return math.prod(self.facts.shape) * self._descrs["values"].itemsize

    def map(self) -> SparseVolume:
        """Its arrays as read-only views, which are read when they are used.

        Raises:
            StoreCorruptError: They are damaged.
        """
        arrays = {name: self.folder.map(name, dtype) for name, dtype in self._descrs.items()}
        facts, index = self.facts, None
        try:
            if "labels" in arrays:
                index = LabelIndex(
                    facts.shape,
                    arrays["classes"],
                    arrays["class_starts"],
                    arrays["class_positions"],
                )
            return SparseVolume(
                positions=arrays["positions"],
                values=arrays["values"],
                shape=facts.shape,
                spacing_mm=facts.spacing_mm,
                slices=arrays["slices"],
                affine=None if facts.affine is None else np.array(facts.affine).reshape(4, 4),
                low_hu=facts.low_hu,
                high_hu=facts.high_hu,
                labels=arrays.get("labels"),
                label_index=index,
            )
        except DataError as error:
            raise corrupt(self.folder.path / META_NAME, str(error)) from error

    def _expect(self) -> dict[str, "np.dtype[Any]"]:
        """The arrays that there must be; values and labels may have several dtypes."""
        found, positions = self.folder.arrays, index_dtype(self.facts.shape)
        dtypes = {
            "slices": np.dtype(np.int64),
            "positions": positions,
            "values": found["values"].dtype,
        }
        if "labels" in found:
            dtypes |= {"labels": found["labels"].dtype, "classes": np.dtype(np.int32)}
            dtypes |= {"class_starts": np.dtype(np.int64), "class_positions": positions}
        allowed = (
            dtypes["values"].name in VALUE_DTYPES
            and dtypes.get("labels", np.dtype("u1")).name in LABEL_DTYPES
        )
        if (
            not allowed
            or found.keys() != dtypes.keys()
            or any(len(facts.shape) != 1 for facts in found.values())
        ):
            raise ValueError(f"other arrays: {sorted(found)}")
        return dtypes


COPY_BYTES: Final = 2**22
SUFFIX: Final = ".voxels"


def make_key(files: SourceTable, name: str, options: IndexOptions) -> str:
    """SHA-256 over the paths, sizes and modification times of a volume's files, the options and the layout version."""
    return files.digest(str(VERSION), options.fingerprint(), name)


def write_volume(source: VolumeSource, target: Path, options: IndexOptions) -> None:
    """Index a volume and publish its folder; killed at any point, it leaves nothing under that
    name.

    Args:
        source: The dense volume.
        target: The folder, inside an existing one; its stem is the volume's key.
        options: Which voxels are occupied.

    Raises:
        DataError: the volume or its labels are bad.
        StoreError: or one of its kinds: the folder cannot be written.
    """
    with explain_errors(target.parent, 0), temp_folder(target.parent) as temp, ExitStack() as stack:
        volume = stack.enter_context(
            open_volume(source, npz_key=options.npz_key, nan_fill=options.nan_fill)
        )
        labels = open_labels(source, volume, npz_key=options.npz_key)
        if labels is not None:
            stack.enter_context(labels)
        volume, labels = bring_to(options.resolution, volume, labels, options.low_hu)
        (temp / "volume").mkdir()
        writer = ArrayWriter(temp / "volume")
        spools = [
            Spool(stack.enter_context((temp / name).open("x+b")))
            for name in ("values", "labels", "classes")
        ]
        _write_arrays(writer, volume, labels, options, spools)
        facts = SparseFacts(
            name=source.name,
            path=source.path,
            shape=volume.shape,
            spacing_mm=volume.spacing_mm,
            affine=None if volume.affine is None else tuple(volume.affine.ravel().tolist()),
            low_hu=float(options.low_hu),
            high_hu=None if options.high_hu is None else float(options.high_hu),
        )
        writer.finish(KIND, VERSION, target.stem, facts.as_meta())
        keep_private(temp / "volume", source.all_files)
        publish(temp / "volume", target)


class Spool:
    """Arrays one behind the other in a file, so that they need no memory, until their dtype or order is known."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._nbytes = 0

    def append(self, array: Array) -> tuple[int, int]:
        """Write an array; returns where it begins, and where it ends, in bytes."""
        write_all(self._stream.fileno(), np.ascontiguousarray(array).data.cast("B"))
        self._nbytes += array.nbytes
        return self._nbytes - array.nbytes, self._nbytes

    def read(
        self, dtype: "np.dtype[Any]", begin: int = 0, end: int | None = None
    ) -> Iterator[Array]:
        """A stretch in pieces of ``COPY_BYTES``."""
        stop = self._nbytes if end is None else end
        for start in range(begin, stop, COPY_BYTES):
            yield np.frombuffer(
                os.pread(self._stream.fileno(), min(COPY_BYTES, stop - start), start), dtype
            )


def _write_arrays(
    writer: ArrayWriter,
    volume: Volume,
    labels: Volume | None,
    options: IndexOptions,
    spools: Sequence[Spool],
) -> None:
    """Read the volume once and write the arrays of its occupied voxels.

    Args:
        writer: Takes the arrays.
        volume: At the resolution that is wanted.
        labels: Of it; None without.
        options: Which voxels are occupied.
        spools: Three of them, empty.
    """
    values, voxel_labels, classes = spools
    collector = None if labels is None else LabelCollector(volume.shape, classes.append)
    stored, whole, counts = value_dtype(volume), True, []
    slabs = scan_slabs(
        volume,
        options.low_hu,
        options.high_hu,
        labels=labels,
        collector=collector,
        slab_bytes=options.slab_bytes,
    )
    positions = index_dtype(volume.shape)
    with writer.stream("positions", positions) as stream:
        for slab in slabs:
            whole = whole and is_whole(slab.values)
            counts.append(slab.counts)
            stream.append(slab.positions)
            values.append(slab.values)
            voxel_labels.append(slab.labels)
    writer.add("slices", np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64))
    writer.join("values", np.dtype(np.int16) if whole else stored, values.read(stored))
    if collector is not None:
        parts = chain.from_iterable(classes.read(positions, *part) for part in collector.parts())
        writer.join("labels", collector.dtype, voxel_labels.read(np.dtype(np.int32)))
        writer.add("classes", collector.classes)
        writer.add("class_starts", collector.starts)
        writer.join("class_positions", positions, parts)
