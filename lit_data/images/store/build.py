"""Build of a decoded store: each source is decoded once, strictly, and all files appear at once.

The stores of a dataset share a folder, and each has a name that depends on everything it is made
from.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
from rich.filesize import decimal

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError, StoreError, StoreStaleError, show_path
from lit_data.core.files import find_crc32
from lit_data.core.heap import keeping_freed_memory
from lit_data.core.progress import count_threads, ordered_map, track
from lit_data.core.temp import build_lock, remove_folder, sweep, temp_folder
from lit_data.core.types import Array, Size
from lit_data.images.decoders import Decoder, ImageSource
from lit_data.images.header_scan import (
    OnBad,
    Survey,
    cut_path,
    raise_bad,
    survey_sources,
)
from lit_data.images.store.arrays import MAX_META_BYTES, ArrayStream, ArrayWriter, publish
from lit_data.images.store.files import explain_errors, is_there, keep_private, no_space
from lit_data.images.store.index import (
    IMAGE_RECORD,
    KIND,
    PIXELS,
    VERSION,
    StoreFacts,
    StoreIndex,
    locate_store,
)
from lit_data.images.store.pixels import WHOLE, BandLayout, StoreOptions
from lit_data.images.store.sources import (
    SourceTable,
    describe_change,
    describe_options,
    list_sources,
)
from lit_inspect.counts import counted

log = logging.getLogger(__name__)


MAX_NOTES = 100
"""Most different notes that are counted separately."""
KEEP = 2
"""Number of stores of the same images to keep, the newest first."""
_MOST_CHANGES = 4  # that a warning names


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Image that is ready to be written.

    Args:
        size_px: (H, W).
        parts: Pixels as they are written, little-endian.
        crc32: CRC-32 of the pixels [C, H, W].
        notes: Notes of the decoder, without the path.
        source_crc32: CRC-32 of each file of the image.
    """

    size_px: Size
    parts: Sequence[Array]
    crc32: int
    notes: tuple[str, ...]
    source_crc32: tuple[int, ...]


class PixelWriter:
    """Writer that appends decoded images to the array of all pixels.

    Args:
        stream: Stream of the array.
        sources: Files of all images that may be written, in order.

    Attributes:
        notes: Number of images with each note.
    """

    def __init__(self, stream: ArrayStream, sources: SourceTable) -> None:
        self.notes: Counter[str] = Counter()
        self._stream = stream
        self._sources = sources
        self._images = np.zeros(len(sources.firsts), IMAGE_RECORD)
        self._crcs = sources.files["crc32"].copy()

    def append(self, number: int, image: DecodedImage) -> None:
        """Write one image; numbers must increase from call to call."""
        for part in image.parts:
            self._stream.append(part)
        self._images[number] = (0, *image.size_px, image.crc32)
        rows = self._sources.rows(number)
        self._crcs[rows.start : rows.stop] = image.source_crc32
        # Notes quote the files, which may have a different text in each of a million files.
        for note in image.notes:
            is_counted = note in self.notes or len(self.notes) < MAX_NOTES
            self.notes[note if is_counted else "other remarks"] += 1

    def finish(self) -> tuple[Array, SourceTable]:
        """Return the records of the written images, and their files."""
        files = self._sources.files.copy()
        files["crc32"] = self._crcs
        written = np.flatnonzero(self._images["height_px"])
        table = SourceTable(self._sources.names, files, self._sources.firsts).take(written)
        images = self._images[written]
        images["first_source"] = table.firsts
        return images, table


def decode_images(
    decoder: Decoder,
    sources: Sequence[ImageSource],
    survey: Survey,
    layout: BandLayout,
) -> Iterator[DecodedImage | str]:
    """Decode the good sources of a survey in threads, a few ahead of the consumer.

    Args:
        decoder: Decodes one source.
        sources: All sources.
        survey: Survey of the good ones.
        layout: Layout of the images on the disk.

    Yields:
        Each image in order, or what is wrong with it.
    """

    def decode(image: int) -> DecodedImage | str:
        source = sources[survey.images[image]]
        try:
            decoded = decoder(source)
            pixels = survey.check(image, decoded.array, source.paths[0])
        except (DataError, OSError) as error:
            return str(error)
        notes = tuple(cut_path(note, source.paths) for note in decoded.notes)
        _, height_px, width_px = pixels.shape
        return DecodedImage(
            size_px=(height_px, width_px),
            parts=tuple(layout.split(pixels)),
            crc32=find_crc32(pixels.data),
            notes=notes,
            source_crc32=decoded.source_crc32,
        )

    return ordered_map(decode, range(len(survey.images)), count_threads(survey.most_bytes))


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of a build.

    Args:
        on_bad: ``error`` raises one error that lists all bad sources, ``skip`` skips and lists
            them.
        wait_s: Longest wait for another process that builds in the same folder.
        rebuild: False raises an error instead of a rebuild if sources or options changed.
        progress: Show progress bars for long work.
        store: Layout of images on the disk; by default whole.
        root: Folder to remove from the stored paths of bad sources, so that they are the same on
            every machine; by default none.
        item: What one image is called: ``image`` or ``mask``.
    """

    on_bad: OnBad = "error"
    wait_s: float = 3600
    rebuild: bool = True
    progress: bool = True
    store: StoreOptions = WHOLE
    root: str = ""
    item: str = "image"

    def __post_init__(self) -> None:
        check_choice("on_bad", self.on_bad, get_args(OnBad))
        if not self.wait_s >= 0:
            raise ConfigError(f"wait_s={self.wait_s} is not allowed; give 0 or more seconds")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a store is made from.

    Args:
        sources: Current state of the source files.
        decoder: Fingerprint of the decoder.
        on_bad: Treatment of bad sources.
        store: Layout of images on the disk.
    """

    sources: SourceTable
    decoder: str
    on_bad: str
    store: StoreOptions

    @property
    def key(self) -> str:
        """Name of the store: SHA-256 over the recipe and the version of the layout."""
        band_px = self.store.band_px
        layout = "whole images" if band_px is None else f"bands of {band_px} px"
        return self.sources.make_key(str(VERSION), self.decoder, self.on_bad, layout)

    @property
    def without_bands(self) -> "Recipe":
        """Return the same recipe for images without bands."""
        return replace(self, store=replace(self.store, band_px=None))


def build_store(
    sources: Sequence[ImageSource], folder: Path, decoder: Decoder, options: BuildOptions
) -> Path:
    """Find the store of these sources, or build it.

    Args:
        sources: The images.
        folder: Folder of the stores of one dataset, each under its key.
        decoder: Decodes one source.
        options: Options of the build.

    Returns:
        The folder of the store, which exists and was complete when it was published.

    Raises:
        DataError: Sources are bad.
        StoreError: The store cannot be built or read; see its subclasses in
            ``lit_data.core.errors``.
    """
    table = list_sources(sources, progress=options.progress)
    recipe = Recipe(table, decoder.fingerprint, options.on_bad, options.store)
    existing_store = find_store(folder, recipe)
    if existing_store is not None:
        return existing_store
    _warn_of_stale(folder, recipe, options.rebuild)
    survey = survey_sources(sources, decoder, on_bad=options.on_bad, progress=options.progress)
    # Narrow images have one store, whatever the width of bands is.
    if not _lay_out(recipe, survey).find_banded(survey.widths_px).any():
        recipe = recipe.without_bands
    target = folder / recipe.key
    needed_bytes = _measure_store(survey, recipe.sources)
    with explain_errors(folder, needed_bytes):
        folder.mkdir(parents=True, exist_ok=True)
        with build_lock(folder, wait_s=options.wait_s, is_done=lambda: is_there(target)):
            if not is_there(target):  # another process may have built it in the meantime
                sweep(folder)
                if target.is_symlink():  # to a store that was removed
                    target.unlink()
                _check_space(folder, needed_bytes, counted(len(survey.images), options.item))
                with temp_folder(folder) as temp:
                    write_store(temp, sources, decoder, recipe, survey, options)
                    publish(temp, target)
                prune(folder, target, recipe)
    return target


def _warn_of_stale(folder: Path, recipe: Recipe, rebuild: bool) -> None:
    change = describe_stale(folder, recipe)
    if change is None:
        return
    if not rebuild:
        raise StoreStaleError(
            f"{show_path(folder)}: the decoded store there is out of date: {change}; allow "
            "rebuilding, run `lit-data prepare`, or restore the old files and options"
        )
    log.warning(
        "%s: rebuilding the decoded store, which has changed: %s", show_path(folder), change
    )


def _measure_store(survey: Survey, sources: SourceTable) -> int:
    images_bytes = len(survey.images) * IMAGE_RECORD.itemsize
    index_bytes = images_bytes + sources.files.nbytes + sources.names.nbytes
    # 1 MiB for `meta.json`, which takes less unless thousands of images are skipped.
    return survey.pixels_bytes + index_bytes + MAX_META_BYTES // 16


def _lay_out(recipe: Recipe, survey: Survey) -> BandLayout:
    return BandLayout(recipe.store.band_px, np.dtype(survey.dtype).itemsize)


def _check_space(folder: Path, needed_bytes: int, images: str) -> None:
    """Refuse a store that does not fit on the disk, before anything is written."""
    free_bytes = shutil.disk_usage(folder).free
    needed = decimal(needed_bytes)
    free = decimal(free_bytes)
    log.info("store: %s, %s (%s free) in %s", images, needed, free, show_path(folder))
    if needed_bytes > free_bytes:
        raise no_space(folder, needed_bytes, free_bytes, "checked before writing")


def write_store(
    temp: Path,
    sources: Sequence[ImageSource],
    decoder: Decoder,
    recipe: Recipe,
    survey: Survey,
    options: BuildOptions,
) -> None:
    """Decode the good sources of a survey into the arrays of a store in an empty folder.

    Raises:
        DataError: Sources are bad.
    """
    folder = ArrayWriter(temp)
    dtype = np.dtype(survey.dtype)
    value_count = survey.pixels_bytes // dtype.itemsize
    # No checksum of all pixels, since each image has one of its own.
    with folder.stream(PIXELS, dtype, value_count, checksum=False) as stream:
        # Some images of the survey may still turn out bad: their rows are removed at the end.
        writer = PixelWriter(stream, recipe.sources.take(survey.images))
        layout = _lay_out(recipe, survey)
        decoded = decode_images(decoder, sources, survey, layout)
        with keeping_freed_memory():
            bad = _write_images(writer, decoded, sources, survey, options)
    records, table = writer.finish()
    folder.add("images", records)
    folder.add("files", table.files)
    folder.add("names", table.names)
    facts = StoreFacts(
        dtype=survey.dtype,
        channels=survey.channels,
        decoder=recipe.decoder,
        on_bad=recipe.on_bad,
        notes=dict(writer.notes),
        skipped=tuple(name_below_root(bad, options.root)),
        band_px=recipe.store.band_px,
    )
    try:
        folder.finish(KIND, VERSION, recipe.key, facts.as_meta())
    except ValueError as error:
        raise DataError(
            f"{counted(len(bad), 'bad image is', 'bad images are')} too many to skip; the first: "
            f"{bad[0][1]}"
        ) from error
    source_paths = (path for number in survey.images for path in sources[number].paths)
    keep_private(temp, source_paths)


def _write_images(
    writer: PixelWriter,
    decoded: Iterator[DecodedImage | str],
    sources: Sequence[ImageSource],
    survey: Survey,
    options: BuildOptions,
) -> list[tuple[str, str]]:
    """Write images as they arrive, and return (path, what is wrong) of all bad ones.

    Raises:
        DataError: Sources are bad, and the options do not skip them.
    """
    bad = list(survey.skipped)
    tracked = track(decoded, "decoding", len(survey.images), enabled=options.progress)
    with closing(tracked) as images:
        for number, image in enumerate(images):
            if isinstance(image, str):
                bad.append((sources[survey.images[number]].paths[0], image))
            # Once the build has failed, the rest is decoded only to find all bad images.
            elif not bad or options.on_bad == "skip":
                writer.append(number, image)
    raise_bad(bad, len(sources), options.on_bad)
    return bad


def name_below_root(bad: Sequence[tuple[str, str]], root: str) -> list[tuple[str, str]]:
    """Return (path, what is wrong) of bad sources without the root of their paths.

    Args:
        bad: (path, what is wrong) of each bad source, with whole paths.
        root: The root; "" changes nothing.
    """
    if not root:
        return list(bad)
    named = []
    for path, fault in bad:
        # Messages show control characters of a path as escapes.
        text = fault.replace(f"{root}/", "").replace(f"{show_path(root)}/", "")
        named.append((path.removeprefix(f"{root}/"), text))
    return named


def find_store(folder: Path, recipe: Recipe) -> Path | None:
    """Return the store that fits a recipe; a store without bad sources fits both values of `on_bad`.

    Raises:
        StoreError: A store of whole images cannot be read.
    """
    fitting_store = _find_laid_out(folder, recipe)
    if fitting_store is not None:
        return fitting_store
    other_rule = "error" if recipe.on_bad == "skip" else "skip"
    with suppress(StoreError):
        other_store = _find_laid_out(folder, replace(recipe, on_bad=other_rule))
        if other_store is not None and not StoreIndex.open(other_store).facts.skipped:
            return other_store
    return None


def _find_laid_out(folder: Path, recipe: Recipe) -> Path | None:
    """Return the store with these bands, or one of images that are too narrow for any."""
    target = locate_store(folder, recipe.key)
    if target is not None:
        return target
    if recipe.store.band_px is None:
        return None
    unbanded = locate_store(folder, recipe.without_bands.key)
    if unbanded is None:
        return None
    index = StoreIndex.open(unbanded)
    layout = BandLayout(recipe.store.band_px, index.facts.layout.itemsize)
    has_wide_images = layout.find_banded(index.extents.widths_px).any()
    return None if has_wide_images else unbanded


def describe_stale(folder: Path, recipe: Recipe) -> str | None:
    """Describe why no store in the folder fits.

    Returns:
        The changes since the newest store of some of the same files was built; None if there is no
        such store.
    """
    for path in _list_stores(folder):
        change = _describe_difference(path, recipe)
        if change:
            return change
    return None


def prune(folder: Path, published: Path, recipe: Recipe) -> None:
    """Remove stores of some of the same files, and unreadable ones, until ``KEEP`` are left.

    Processes that have them open can still read them; the disk space is freed when the last of
    these ends.

    Args:
        folder: The folder of all stores.
        published: The store that was just built, which stays.
        recipe: Recipe of that store.
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
    """Return the folders with the name of a key, newest first."""
    if not is_there(folder):
        return []
    paths = folder.glob("[0-9a-f]" * 64)
    stores = [path for path in paths if is_there(path) and not path.is_symlink()]
    return sorted(stores, key=_read_age, reverse=True)


def _describe_difference(path: Path, recipe: Recipe) -> str:
    """Return what changed since a store was built; "" if it has no files in common."""
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
    hidden_count = len(changes) - _MOST_CHANGES
    if hidden_count > 0:
        changes = [*changes[:_MOST_CHANGES], f"{hidden_count} more"]
    if changes:
        return "; ".join(changes)
    # Only if nothing else changed: stores of narrow images never have bands.
    if facts.band_px != recipe.store.band_px:
        return f"store.band_px {facts.band_px} -> {recipe.store.band_px}"
    return "a file that was skipped" if facts.skipped else "the content of files"


def _read_age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # another process has just removed it
