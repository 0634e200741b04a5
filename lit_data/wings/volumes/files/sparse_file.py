"""A sparse volume on disk: a folder of arrays, written in bounded memory and mapped."""

import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from lit_data.core.errors import DataError
from lit_data.core.temp import temp_folder
from lit_data.core.types import Array, PathText, Spacing, Triple
from lit_data.images.store.arrays import META_NAME, ArrayFolder, ArrayWriter, is_count, publish
from lit_data.images.store.files import corrupt, explain_errors, keep_private, write_all
from lit_data.images.store.sources import SourceTable
from lit_data.wings.volumes.files.indexing import (
    IndexOptions,
    LabelCollector,
    bring_to,
    check_labels,
    is_whole,
    open_with_labels,
    scan_slabs,
    value_dtype,
)
from lit_data.wings.volumes.files.sources import VolumeSource
from lit_data.wings.volumes.files.sparse import (
    LABEL_DTYPES,
    VALUE_DTYPES,
    LabelIndex,
    SparseVolume,
    index_dtype,
)
from lit_data.wings.volumes.files.volume import Volume

MAX_OPEN = 64
"""Volumes that stay mapped; each takes up to seven of a process's thousand descriptors."""


KIND = "sparse volume"
VERSION = 3
"""Version of the layout; part of every key."""

COPY_BYTES = 2**22
SUFFIX = ".voxels"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseFacts:
    """The facts of one volume.

    Args:
        name: Name of the volume.
        path: Path of its source.
        shape: (z, y, x).
        spacing_mm: (z, y, x).
        affine: 16 numbers, row by row; None if unknown.
        low_hu: See ``SparseVolume``.
        high_hu: See ``SparseVolume``.

    Raises:
        ValueError: A fact is impossible.
        TypeError: A fact has a wrong type.
    """

    name: str
    path: str
    shape: Triple
    spacing_mm: Spacing
    affine: tuple[float, ...] | None
    low_hu: float
    high_hu: float | None

    def __post_init__(self) -> None:
        for name in ("shape", "spacing_mm", "affine"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))  # JSON knows lists only
        numbers = [*self.spacing_mm, *(self.affine or ()), self.low_hu]
        if self.high_hu is not None:
            numbers.append(self.high_hu)
        is_shape = all(is_count(length) and length > 0 for length in self.shape)
        is_shape = is_shape and is_count(math.prod(self.shape))
        checks = {
            "shape": is_shape and len(self.shape) == 3,
            "affine": self.affine is None or len(self.affine) == 16,
            "spacing_mm": len(self.spacing_mm) == 3 and min(self.spacing_mm) > 0,
            "a number": all(_is_finite(number) for number in numbers),
            "a text": isinstance(self.name, str) and isinstance(self.path, str),
        }
        wrong_names = [name for name, is_right in checks.items() if not is_right]
        if wrong_names:
            raise ValueError(f"wrong: {', '.join(wrong_names)}")


class StoredVolume:
    """A volume of a store; only its `meta.json` is read until it is mapped.

    Arrays are those of ``SparseVolume``: ``positions``, ``values`` and ``slices``, and with labels
    also ``labels``, ``classes``, ``class_starts`` and ``class_positions``.

    Args:
        path: Folder of the volume.

    Attributes:
        folder: Arrays of the volume.
        facts: Facts of the volume.

    Raises:
        StoreError: The folder cannot be opened.
        StoreCorruptError: The folder is damaged, or has another version.
    """

    def __init__(self, path: PathText) -> None:
        self.folder = ArrayFolder(path, KIND, VERSION)
        try:
            self.facts = SparseFacts(**self.folder.facts)
            self._descrs = self._expect()
            self.points = self.folder.arrays["positions"].shape[0]
        except (ValueError, TypeError, KeyError) as error:
            raise corrupt(
                self.folder.path / META_NAME, f"not the facts of a volume ({error!s:.200})"
            ) from error
        self.folder.check_size()

    @property
    def array_bytes(self) -> int:
        """Size of the arrays in bytes, without the headers of their files."""
        return sum(facts.nbytes for facts in self.folder.arrays.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the volume as a dense array of the values' dtype."""
        return math.prod(self.facts.shape) * self._descrs["values"].itemsize

    def map(self) -> SparseVolume:
        """Map the arrays as read-only views, which are read on demand.

        Raises:
            StoreCorruptError: They are damaged.
        """
        arrays = {name: self.folder.map(name, dtype) for name, dtype in self._descrs.items()}
        facts = self.facts
        # JSON has it row by row.
        affine = None if facts.affine is None else np.array(facts.affine).reshape(4, 4)
        label_index: LabelIndex | None = None
        try:
            if "labels" in arrays:
                label_index = LabelIndex(
                    shape=facts.shape,
                    classes=arrays["classes"],
                    starts=arrays["class_starts"],
                    positions=arrays["class_positions"],
                )
            return SparseVolume(
                positions=arrays["positions"],
                values=arrays["values"],
                shape=facts.shape,
                spacing_mm=facts.spacing_mm,
                slices=arrays["slices"],
                affine=affine,
                low_hu=facts.low_hu,
                high_hu=facts.high_hu,
                labels=arrays.get("labels"),
                label_index=label_index,
            )
        except DataError as error:
            raise corrupt(self.folder.path / META_NAME, str(error)) from error

    def _expect(self) -> dict[str, "np.dtype[Any]"]:
        """Return the dtype of each expected array.

        Raises:
            ValueError: There are other arrays, or they are of another kind.
        """
        arrays = self.folder.arrays
        positions_dtype = index_dtype(self.facts.shape)
        dtypes = {
            "slices": np.dtype(np.int64),
            "positions": positions_dtype,
            "values": arrays["values"].dtype,
        }
        is_right = dtypes["values"].name in VALUE_DTYPES
        if "labels" in arrays:
            dtypes["labels"] = arrays["labels"].dtype
            dtypes["classes"] = np.dtype(np.int32)
            dtypes["class_starts"] = np.dtype(np.int64)
            dtypes["class_positions"] = positions_dtype
            is_right = is_right and dtypes["labels"].name in LABEL_DTYPES
        has_one_axis = all(len(facts.shape) == 1 for facts in arrays.values())
        if not is_right or arrays.keys() != dtypes.keys() or not has_one_axis:
            raise ValueError(f"other arrays: {sorted(arrays)}")
        return dtypes


def make_key(files: SourceTable, name: str, options: IndexOptions) -> str:
    """Return the SHA-256 of the state of a volume's files, the options and the layout version."""
    return files.make_key(str(VERSION), options.fingerprint(), name)


def write_volume(source: VolumeSource, target: Path, options: IndexOptions) -> None:
    """Index a volume and publish its folder; if killed earlier, it leaves nothing under that name.

    Args:
        source: The dense volume.
        target: The folder, inside an existing one; its stem is the volume's key.
        options: Options that determine which voxels are occupied.

    Raises:
        DataError: The volume or its labels are bad.
        StoreError: The folder cannot be written; may be one of its subclasses.
    """
    with explain_errors(target.parent, 0), temp_folder(target.parent) as temp, ExitStack() as stack:
        dense, dense_labels = stack.enter_context(open_with_labels(source, options))
        volume, labels = bring_to(options, dense, dense_labels)
        # The spools are beside it and are not published.
        (temp / "volume").mkdir()
        writer = ArrayWriter(temp / "volume")
        spools = []
        for name in ("values", "labels", "classes"):
            spools.append(Spool(stack.enter_context((temp / name).open("x+b"))))
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
        writer.finish(KIND, VERSION, target.stem, dataclasses.asdict(facts))
        keep_private(temp / "volume", source.all_files)
        publish(temp / "volume", target)


class Spool:
    """Consecutive arrays in a file, kept there until their dtype or order is known.

    They need no memory, however many voxels are occupied.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._nbytes = 0

    def append(self, array: Array) -> tuple[int, int]:
        """Write an array; return the bytes at which it begins and ends."""
        write_all(self._stream.fileno(), np.ascontiguousarray(array).data.cast("B"))
        self._nbytes += array.nbytes
        return self._nbytes - array.nbytes, self._nbytes

    def read(
        self, dtype: "np.dtype[Any]", begin: int = 0, end: int | None = None
    ) -> Iterator[Array]:
        """Yield the values of a byte range in chunks of ``COPY_BYTES``."""
        stop = self._nbytes if end is None else end
        for start in range(begin, stop, COPY_BYTES):
            # Without moving the end, where `append` writes.
            raw = os.pread(self._stream.fileno(), min(COPY_BYTES, stop - start), start)
            yield np.frombuffer(raw, dtype)


def _write_arrays(
    writer: ArrayWriter,
    volume: Volume,
    labels: Volume | None,
    options: IndexOptions,
    spools: Sequence[Spool],
) -> None:
    """Read the volume once and write the arrays of its occupied voxels.

    Args:
        writer: Receives the arrays.
        volume: Volume at the resolution of the options.
        labels: Labels of the volume; None without.
        options: Options that determine which voxels are occupied.
        spools: Three empty spools.
    """
    values, voxel_labels, classes = spools
    collector = None if labels is None else LabelCollector(volume.shape, classes.append)
    slabs = scan_slabs(volume, options, labels=labels, collector=collector)
    positions_dtype, slab_dtype = index_dtype(volume.shape), value_dtype(volume)
    is_int16 = True
    counts: list[Array] = []
    with writer.stream("positions", positions_dtype) as stream:
        for slab in slabs:
            is_int16 = is_int16 and is_whole(slab.values)
            counts.append(slab.counts)
            stream.append(slab.positions)
            values.append(slab.values)
            # The labels are empty arrays if there are none.
            voxel_labels.append(slab.labels)
    # The values wait for the last slab, because only then it is known whether all are whole
    # numbers.
    writer.add("slices", np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64))
    values_dtype = np.dtype(np.int16) if is_int16 else slab_dtype
    writer.join("values", values_dtype, values.read(slab_dtype))
    if collector is not None:
        check_labels(collector.classes, options.classes)
        writer.join("labels", collector.dtype, voxel_labels.read(np.dtype(np.int32)))
        writer.add("classes", collector.classes)
        writer.add("class_starts", collector.starts)
        with writer.stream("class_positions", positions_dtype) as stream:
            for begin, end in collector.parts():
                for part in classes.read(positions_dtype, begin, end):
                    stream.append(part)


def _is_finite(number: object) -> bool:
    """Return True if a value of a JSON text is a finite number."""
    # Compared, because a whole number of JSON may be too large for a float.
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max
