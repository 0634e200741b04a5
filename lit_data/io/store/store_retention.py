"""Stores side by side in one folder, one per key: what sets them apart, and which may go."""

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
class Recipe:
    """All that a store is to be made from.

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
        band_px = self.store.band_px
        layout = "whole images" if band_px is None else f"bands of {band_px} px"
        return self.sources.digest(str(VERSION), self.decoder, self.on_bad, layout)

    @property
    def without_bands(self) -> "Recipe":
        """The same where no image is in bands."""
        return replace(self, store=replace(self.store, band_px=None))


def find_store(folder: Path, recipe: Recipe) -> Path | None:
    """Return the store that fits: one with these bands, or one of images too narrow for any.

    Raises:
        StoreError: One of whole images cannot be read.
    """
    target, unbanded = folder / recipe.key, folder / recipe.without_bands.key
    if is_there(target):
        return target
    if not is_there(unbanded):
        return None
    index = StoreIndex.open(unbanded)
    layout = BandLayout(recipe.store.band_px, index.facts.layout.itemsize)
    has_wide_images = layout.find_banded(index.images["width_px"]).any()
    return None if has_wide_images else unbanded


def describe_stale(folder: Path, recipe: Recipe) -> str | None:
    """Say why no store in the folder fits.

    Returns:
        What changed since the newest store of some of the same files was built; None if there is no
        such store.
    """
    for path in _list_stores(folder):
        change = _describe_difference(path, recipe)
        if change:
            return change
    return None


def prune(folder: Path, published: Path, recipe: Recipe) -> None:
    """Remove stores of some of the same files, and unreadable ones, until ``KEEP`` are left.

    Processes that have them open keep reading: the disk space is freed when the last of them ends.

    Args:
        folder: The folder of all stores.
        published: The store that was just built; it stays.
        recipe: That it was built by.
    """
    related_stores = []
    for path in _list_stores(folder):
        if path != published and _describe_difference(path, recipe) != "":
            related_stores.append(path)
    for path in related_stores[KEEP - 1 :]:
        try:
            remove_folder(path)
        except OSError as error:
            log.warning("%s: an old store cannot be removed (%s)", show_path(path), error.strerror)


def _list_stores(folder: Path) -> list[Path]:
    """Return the folders that are named like a key, newest first."""
    if not is_there(folder):
        return []
    stores = [path for path in folder.glob("[0-9a-f]" * 64) if is_there(path)]
    return sorted(stores, key=_read_age, reverse=True)


def _describe_difference(path: Path, recipe: Recipe) -> str:
    """Return what changed since a store was built; "" if it holds other files altogether."""
    try:
        index = StoreIndex.open(path)
    except StoreError:
        return "the store there cannot be read by this version"
    facts = index.facts
    skipped_names = [name for name, _ in facts.skipped]
    file_changes = describe_change(index.sources, recipe.sources, skipped_names)
    if file_changes is None:
        return ""
    changes = [file_changes] if file_changes else []
    if facts.on_bad != recipe.on_bad:
        changes.append(f"on_bad {facts.on_bad!r} -> {recipe.on_bad!r}")
    changes += describe_options(facts.decoder, recipe.decoder)
    if changes:
        return "; ".join(changes)
    # Only where nothing else changed: stores of narrow images have no bands whatever is asked for.
    if facts.band_px != recipe.store.band_px:
        return f"store.band_px {facts.band_px} -> {recipe.store.band_px}"
    return "a file that was skipped"


def describe_options(old: str, new: str) -> list[str]:
    """Return the decode options that differ, each by its own name if the fingerprints are JSON."""
    try:
        before, after = _flatten("decoder", json.loads(old)), _flatten("decoder", json.loads(new))
    except (ValueError, RecursionError):
        before, after = {"decoder": old}, {"decoder": new}
    changes = []
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            changes.append(f"{name} {before.get(name)!r} -> {after.get(name)!r}")
    return changes


def _flatten(name: str, value: object) -> dict[str, object]:
    """Return the leaves of nested dicts by their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    leaves: dict[str, object] = {}
    for key, inner in value.items():
        leaves |= _flatten(f"{name}.{key}", inner)
    return leaves


def _read_age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # another process has just removed it
