"""Reading all volumes before workers start, and looking at headers where reading waits for the first use."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from rich.filesize import decimal

from lit_data.errors import DataError
from lit_data.io.images.header_scan import OnBad, raise_bad
from lit_data.io.progress import track
from lit_data.io.volumes.indexing import IndexOptions, index_volume
from lit_data.io.volumes.reading import open_labels, open_volume
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse import SparseVolume

log = logging.getLogger(__name__)


_CHUNK_BYTES = 2**22


def index_source(source: VolumeSource, options: IndexOptions) -> SparseVolume:
    """Index a volume in memory.

    Raises:
        DataError: it or its labels are bad.
    """
    with open_volume(source, npz_key=options.npz_key, nan_fill=options.nan_fill) as volume:
        labels = open_labels(source, volume, npz_key=options.npz_key)
        try:
            return index_volume(
                volume,
                options.low_hu,
                options.high_hu,
                resolution=options.resolution,
                labels=labels,
                slab_bytes=options.slab_bytes,
            )
        finally:
            if labels is not None:
                labels.close()


def warm_folders(paths: Sequence[Path], *, progress: bool) -> None:
    """Read the files of folders once, so that they are in the page cache that all processes share."""
    started_s = time.monotonic()
    size_bytes = sum(track(map(_read_through, paths), "preloading", len(paths), enabled=progress))
    _tell(len(paths), size_bytes, "the page cache", started_s, enabled=progress)


def index_all(
    sources: Sequence[VolumeSource], options: IndexOptions, *, progress: bool
) -> list[SparseVolume]:
    """Index volumes in memory.

    Raises:
        DataError: one is bad.
    """
    started_s = time.monotonic()
    indexed = (index_source(source, options) for source in sources)
    volumes = list(track(indexed, "preloading", len(sources), enabled=progress))
    _tell(
        len(volumes),
        sum(volume.nbytes for volume in volumes),
        "memory",
        started_s,
        enabled=progress,
    )
    return volumes


def check_headers(
    sources: Sequence[VolumeSource], options: IndexOptions, on_bad: OnBad, *, progress: bool
) -> tuple[list[VolumeSource], tuple[tuple[str, str], ...]]:
    """Open every volume and its labels without reading voxels.

    Returns:
        The good ones, and (path, what is wrong) of the bad ones.

    Raises:
        DataError: bad ones under ``error``, or no good one.
    """
    faults = [
        _find_fault(source, options)
        for source in track(sources, "reading headers", len(sources), enabled=progress)
    ]
    bad = [
        (source.path, fault)
        for source, fault in zip(sources, faults, strict=True)
        if fault is not None
    ]
    if not sources:
        raise DataError("the list of volumes is empty; check the data folder")
    raise_bad(bad, len(sources), on_bad, what="volumes")
    return [source for source, fault in zip(sources, faults, strict=True) if fault is None], tuple(
        bad
    )


def _find_fault(source: VolumeSource, options: IndexOptions) -> str | None:
    try:
        with open_volume(source, npz_key=options.npz_key, nan_fill=options.nan_fill) as volume:
            labels = open_labels(source, volume, npz_key=options.npz_key)
            if labels is not None:
                labels.close()
    except DataError as error:
        return str(error)
    return None


def _read_through(folder: Path) -> int:
    """Bytes of the files of a folder, all read."""
    size_bytes = 0
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                size_bytes += len(chunk)
    return size_bytes


def _tell(volumes: int, size_bytes: int, where: str, started_s: float, *, enabled: bool) -> None:
    if enabled:
        seconds = time.monotonic() - started_s
        log.info(
            "preloaded %d sparse volumes, %s, into %s in %.1f s",
            volumes,
            decimal(size_bytes),
            where,
            seconds,
        )
