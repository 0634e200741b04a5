"""From one source to one folder of the store, in memory that does not grow with the volume."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from lit_data.io.store.arrays import ArrayWriter, publish
from lit_data.io.store.sources import SourceTable
from lit_data.io.store.writer import explain_errors, keep_private, write_all
from lit_data.io.temp import temp_folder
from lit_data.io.volumes.indexing import IndexOptions, bring_to, is_whole, scan_slabs
from lit_data.io.volumes.occupied import LabelCollector, value_dtype
from lit_data.io.volumes.reading import open_labels, open_volume
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import index_dtype
from lit_data.io.volumes.sparse_file import KIND, VERSION, SparseFacts
from lit_data.io.volumes.volume import Volume
from lit_data.types import Array

COPY_BYTES: Final = 2**22
SUFFIX: Final = ".voxels"


def make_key(files: SourceTable, name: str, options: IndexOptions) -> str:
    """SHA-256 over the paths, sizes and modification times of a volume's files, the options and the layout version."""
    return files.digest(str(VERSION), options.fingerprint(), name)


def write_volume(source: VolumeSource, target: Path, options: IndexOptions) -> None:
    """Index a volume and publish its folder; killed at any point, it leaves nothing under that name.

    Args:
        source: The dense volume.
        target: The folder, inside an existing one; its stem is the volume's key.
        options: Which voxels are occupied.

    Raises:
        DataError: the volume or its labels are bad.
        StoreError: or one of its kinds: the folder cannot be written.
    """
    with explain_errors(target.parent, 0), temp_folder(target.parent) as temp, ExitStack() as stack:
        volume = stack.enter_context(open_volume(source, npz_key=options.npz_key, nan_fill=options.nan_fill))
        labels = open_labels(source, volume, npz_key=options.npz_key)
        if labels is not None:
            stack.enter_context(labels)
        volume, labels = bring_to(options.resolution, volume, labels, options.low_hu)
        (temp / "volume").mkdir()
        writer = ArrayWriter(temp / "volume")
        spools = [Spool(stack.enter_context((temp / name).open("x+b"))) for name in ("values", "labels", "classes")]
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

    def read(self, dtype: "np.dtype[Any]", begin: int = 0, end: int | None = None) -> Iterator[Array]:
        """A stretch in pieces of ``COPY_BYTES``."""
        stop = self._nbytes if end is None else end
        for start in range(begin, stop, COPY_BYTES):
            yield np.frombuffer(os.pread(self._stream.fileno(), min(COPY_BYTES, stop - start), start), dtype)


def _write_arrays(
    writer: ArrayWriter, volume: Volume, labels: Volume | None, options: IndexOptions, spools: Sequence[Spool]
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
        volume, options.low_hu, options.high_hu, labels=labels, collector=collector, slab_bytes=options.slab_bytes
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
