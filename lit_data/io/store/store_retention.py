"""The stores that stand side by side in one folder, one per key: what sets them apart, and which may go."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from lit_data.errors import StoreError, show_path
from lit_data.io.store.bands import BandLayout, StoreOptions
from lit_data.io.store.files import is_there
from lit_data.io.store.index import VERSION, StoreIndex
from lit_data.io.store.sources import SourceTable, describe_change
from lit_data.io.temp import remove_folder

log = logging.getLogger(__name__)


KEEP = 2
"""Stores of the same images that are kept, the newest first."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a store is to be made from.

    Args:
        sources: The source files as they are now.
        decoder: Fingerprint of the decoder.
        on_bad: What to do with bad sources.
        store: How images lie on the disk.
    """

    sources: SourceTable
    decoder: str
    on_bad: str
    store: StoreOptions

    @property
    def key(self) -> str:
        """Name of the store: SHA-256 over all of this and the version of the layout."""
        band_px, compression = self.store.band_px, self.store.compression
        layout = [] if band_px is None else [f"bands of {band_px} px"]
        layout += [] if compression == "none" else [f"blocks of {compression}"]
        return self.sources.digest(str(VERSION), self.decoder, self.on_bad, *layout)

    @property
    def without_bands(self) -> "Wanted":
        """The same where no image is in bands."""
        return replace(self, store=replace(self.store, band_px=None))


def find_store(folder: Path, wanted: Wanted) -> Path | None:
    """The store that fits: one with the wanted bands, or one of whole images that are too narrow
    for bands.

    Raises:
        StoreError: One of whole images cannot be read.
    """
    target, whole = folder / wanted.key, folder / wanted.without_bands.key
    if is_there(target):
        return target
    if not is_there(whole):
        return None
    index = StoreIndex.open(whole)
    layout = BandLayout(wanted.store.band_px, index.layout.itemsize)
    return None if layout.find_banded(index.images["width_px"]).any() else whole


def describe_stale(folder: Path, wanted: Wanted) -> str | None:
    """Say why no store in the folder fits.

    Returns:
        What changed since the newest store of some of the same files was built; None if there is no
        such store.
    """
    changes = (_describe_difference(path, wanted) for path in _list_stores(folder))
    return next((change for change in changes if change), None)


def prune(folder: Path, published: Path, wanted: Wanted) -> None:
    """Remove stores of some of the same files, and unreadable ones, until ``KEEP`` are left.

    Processes that have them open keep reading: the disk space is freed when the last of them ends.

    Args:
        folder: The folder of all stores.
        published: The store that was just built; it stays.
        wanted: What it was built from.
    """
    others = [path for path in _list_stores(folder) if path != published]
    related = [path for path in others if _describe_difference(path, wanted) != ""]
    for path in related[KEEP - 1 :]:
        try:
            remove_folder(path)
        except OSError as error:
            log.warning("%s: an old store cannot be removed (%s)", show_path(path), error.strerror)


def _list_stores(folder: Path) -> list[Path]:
    """Folders that are named like a key, newest first."""
    if not is_there(folder):
        return []
    named = [path for path in folder.glob("[0-9a-f]" * 64) if is_there(path)]
    return sorted(named, key=lambda path: _read_age(path), reverse=True)


def _describe_difference(path: Path, wanted: Wanted) -> str:
    """What changed since a store was built; "" if it holds other files altogether."""
    try:
        index = StoreIndex.open(path)
    except StoreError:
        return "the store there cannot be read by this version"
    facts, layout, store = index.facts, index.layout, wanted.store
    files = describe_change(index.sources, wanted.sources, [name for name, _ in facts.skipped])
    if files is None:
        return ""
    on_bad = (
        f"on_bad {facts.on_bad!r} -> {wanted.on_bad!r}" if facts.on_bad != wanted.on_bad else ""
    )
    options = describe_options(facts.decoder, wanted.decoder)
    if layout.compression != store.compression:
        options.append(f"store.compression {layout.compression} -> {store.compression}")
    bands = (
        f"store.band_px {layout.band_px} -> {store.band_px}"
        if layout.band_px != store.band_px
        else ""
    )
    return "; ".join(filter(None, [files, on_bad, *options])) or bands or "a file that was skipped"


def describe_options(old: str, new: str) -> list[str]:
    """Decode options that differ, each by its own name if the fingerprints are JSON."""
    try:
        before, after = _flatten("decoder", json.loads(old)), _flatten("decoder", json.loads(new))
    except (ValueError, RecursionError):
        before, after = {"decoder": old}, {"decoder": new}
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} {before.get(name)!r} -> {after.get(name)!r}" for name in names]


def _flatten(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        return {name: value}
    return {
        path: leaf
        for key, inner in value.items()
        for path, leaf in _flatten(f"{name}.{key}", inner).items()
    }


def _read_age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # another process has just removed it
