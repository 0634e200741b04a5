"""From one source to one file of the store, in memory that does not grow with the volume."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from lit_data.files import sync_folder
from lit_data.io.images.decoders import ImageSource
from lit_data.io.store.sources import list_sources
from lit_data.io.store.writer import explain_errors, keep_private, new_file, reserve, write_all
from lit_data.io.temp import temp_folder
from lit_data.io.volumes.indexing import IndexOptions, bring_to, is_whole, scan_slabs
from lit_data.io.volumes.occupied import LabelCollector, value_dtype
from lit_data.io.volumes.reading import open_labels, open_volume
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse_file import VERSION, SparseHeader, pad
from lit_data.io.volumes.volume import Volume
from lit_data.types import Array

COPY_BYTES: Final = 2**22
SUFFIX: Final = ".voxels"


def make_key(source: VolumeSource, options: IndexOptions) -> str:
    """SHA-256 over the paths, sizes and modification times of a volume's files, the options and the layout version."""
    table = list_sources([ImageSource(source.all_files)], progress=False)
    return table.digest(str(VERSION), options.fingerprint(), source.name)


def write_volume(source: VolumeSource, target: Path, options: IndexOptions) -> None:
    """Index a volume and publish its file; killed at any point, it leaves nothing under that name.

    Args:
        source: The dense volume.
        target: Of the file, in an existing folder; its stem is the volume's key.
        options: Which voxels are occupied.

    Raises:
        DataError: the volume or its labels are bad.
        StoreError: or one of its kinds: the file cannot be written.
    """
    with explain_errors(target.parent, 0), temp_folder(target.parent) as temp, ExitStack() as stack:
        volume = stack.enter_context(open_volume(source, npz_key=options.npz_key, nan_fill=options.nan_fill))
        labels = open_labels(source, volume, npz_key=options.npz_key)
        if labels is not None:
            stack.enter_context(labels)
        volume, labels = bring_to(options.resolution, volume, labels, options.low_hu)
        parts = _Parts(volume, labels, options, lambda name: Spool(stack.enter_context((temp / name).open("x+b"))))
        header = parts.make_header(source, target.stem, volume, options)
        with explain_errors(target.parent, parts.nbytes):
            with new_file(temp / "volume") as fd:
                reserve(fd, header.nbytes)
                for chunk in parts.assemble(header):
                    write_all(fd, memoryview(chunk))
            keep_private(temp / "volume", source.all_files)
            (temp / "volume").replace(target)
            sync_folder(target.parent)


class Spool:
    """Arrays one behind the other in a file, so that they need no memory."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.nbytes = 0

    def append(self, array: Array) -> tuple[int, int]:
        """Write an array; returns where it begins, and where it ends, in bytes."""
        write_all(self._stream.fileno(), np.ascontiguousarray(array).data.cast("B"))
        self.nbytes += array.nbytes
        return self.nbytes - array.nbytes, self.nbytes

    def read(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """A stretch in pieces of ``COPY_BYTES``."""
        stop = self.nbytes if end is None else end
        for start in range(begin, stop, COPY_BYTES):
            yield os.pread(self._stream.fileno(), min(COPY_BYTES, stop - start), start)


class _Parts:
    """The arrays of one volume on their way into its file: the volume is read once, its occupied voxels put away.

    Args:
        volume: At the resolution that is wanted.
        labels: Of it; None without.
        options: Which voxels are occupied.
        make: Makes a spool of a name.
    """

    def __init__(
        self, volume: Volume, labels: Volume | None, options: IndexOptions, make: Callable[[str], Spool]
    ) -> None:
        self.positions, self.values, self.labels, self.classes = map(make, ("positions", "values", "labels", "classes"))
        self.collector = None if labels is None else LabelCollector(volume.shape, self.classes.append)
        self.stored, self.is_whole = value_dtype(volume), True
        counts = []
        for slab in scan_slabs(
            volume,
            options.low_hu,
            options.high_hu,
            labels=labels,
            collector=self.collector,
            slab_bytes=options.slab_bytes,
        ):
            self.is_whole = self.is_whole and is_whole(slab.values)
            counts.append(slab.counts)
            for spool, array in (
                (self.positions, slab.positions),
                (self.values, slab.values),
                (self.labels, slab.labels),
            ):
                spool.append(array)
        self.slices = np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes put away."""
        return self.positions.nbytes + self.values.nbytes + self.labels.nbytes + self.classes.nbytes

    def make_header(self, source: VolumeSource, key: str, volume: Volume, options: IndexOptions) -> SparseHeader:
        """Say what the file will hold."""
        collector = self.collector
        return SparseHeader(
            key=key,
            name=source.name,
            path=source.path,
            shape=volume.shape,
            spacing_mm=volume.spacing_mm,
            affine=None if volume.affine is None else tuple(volume.affine.ravel().tolist()),
            low_hu=float(options.low_hu),
            high_hu=None if options.high_hu is None else float(options.high_hu),
            values_dtype="int16" if self.is_whole else self.stored.name,
            labels_dtype=None if collector is None else collector.dtype.name,
            points=int(self.slices[-1]),
            classes=0 if collector is None else len(collector.classes),
            labelled=0 if collector is None else int(collector.starts[-1]),
        )

    def assemble(self, header: SparseHeader) -> Iterator[bytes]:
        """The bytes of the file."""
        yield header.encode()
        for name in header.sections():
            size_bytes = 0
            for chunk in self._read(name, header):
                size_bytes += len(chunk)
                yield chunk
            yield bytes(pad(size_bytes))

    def _read(self, name: str, header: SparseHeader) -> Iterator[bytes]:
        if name == "slices":
            yield self.slices.tobytes()
        elif name == "positions":
            yield from self.positions.read()
        elif name == "values":
            yield from _convert(self.values.read(), self.stored, header.values_dtype)
        elif self.collector is None:
            return
        elif name == "labels":
            yield from _convert(self.labels.read(), np.dtype(np.int32), self.collector.dtype.name)
        elif name == "class_positions":
            for begin, end in self.collector.parts():
                yield from self.classes.read(begin, end)
        else:
            yield (self.collector.classes if name == "classes" else self.collector.starts).tobytes()


def _convert(chunks: Iterator[bytes], stored: "np.dtype[Any]", dtype: str) -> Iterator[bytes]:
    for chunk in chunks:
        yield np.frombuffer(chunk, stored).astype(dtype).tobytes()
