"""First pass over the sources: read their headers before any pixel is decoded or any byte is written."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Self, get_args

import numpy as np

from lit_data.core.checks import check_choice
from lit_data.core.errors import DataError, Problems, list_problems, show_path
from lit_data.core.progress import count_threads, ordered_map, track
from lit_data.core.types import Array, Ints
from lit_data.images.decoders import STORE_DTYPES, Decoder, ImageSource, hint_masks
from lit_inspect.counts import counted, counted_of

DTYPES = tuple(dict.fromkeys(STORE_DTYPES.values()))
"""Names of the dtypes of a store."""

_MOST_NOTES = 20  # that are logged

log = logging.getLogger(__name__)

OnBad = Literal["error", "skip"]
SKIPPING = "data.on_bad=skip skips bad files"
_CONVERT = "convert one of them, or skip it with data.exclude"


def find_faults(sources: Sequence[ImageSource], decoder: Decoder) -> Problems:
    """Decode every source strictly, discard the pixels, return the faults, and log the notes.

    Args:
        sources: The images.
        decoder: Decodes one source.

    Returns:
        Bad sources by their first path, including those that differ from most others.
    """
    problems = Problems()
    rows = np.zeros((len(sources), 4), np.int64)
    notes: Counter[str] = Counter()
    checked = ordered_map(partial(_check, decoder), sources, count_threads())
    tracked = track(checked, "checking", len(sources))
    for number, (source, result) in enumerate(zip(sources, tracked, strict=True)):
        if isinstance(result, str):
            problems.add(source.paths[0], result)
        else:
            rows[number] = result.row
            notes.update(result.notes)
    if rows.any():
        for path, fault in leave_out_unlike(rows, sources, find_usual(rows)):
            problems.add(path, fault)
    for note, images in notes.most_common(_MOST_NOTES):
        log.info("%s: %s", counted(images, "image"), note)
    return problems


class _Checked(NamedTuple):
    """Header of a decoded image, as `_read_header` returns it, and notes without its path."""

    row: tuple[int, int, int, int]
    notes: list[str]


def _check(decoder: Decoder, source: ImageSource) -> _Checked | str:
    """Decode an image and return its header, or what is wrong with it."""
    try:
        decoded = decoder(source)
    except DataError as error:
        return str(error)
    channels, height_px, width_px = decoded.array.shape
    row = channels, height_px, width_px, DTYPES.index(decoded.array.dtype.name)
    return _Checked(row, [cut_path(note, source.paths) for note in decoded.notes])


def cut_path(note: str, paths: Sequence[str]) -> str:
    """Remove the path from a note, so that equal notes about many files are counted together."""
    for path in paths:
        note = note.removeprefix(f"{show_path(path)}: ")
    return note


@dataclass(frozen=True, slots=True)
class Survey:
    """Good images among some sources.

    Args:
        images: [n] int64, number of each image among all sources.
        heights_px: [n] int64, height of each image.
        widths_px: [n] int64, width of each image.
        channels: Number of channels, which all images share.
        dtype: Name of the dtype, which all images share.
        skipped: (first path, what is wrong) of the other sources.
    """

    images: Ints
    heights_px: Ints
    widths_px: Ints
    channels: int
    dtype: str
    skipped: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, rows: Ints, bad: Sequence[tuple[str, str]]) -> Self:
        """Make a survey from the result of `scan_headers`; it needs a good image, and all must be alike."""
        images = np.flatnonzero(rows[:, 0])
        channels, heights_px, widths_px, dtypes = rows[images].T.copy()
        dtype = DTYPES[dtypes[0]]
        return cls(images, heights_px, widths_px, int(channels[0]), dtype, tuple(bad))

    @property
    def pixels_bytes(self) -> int:
        """Decoded bytes of all images."""
        pixels = int((self.heights_px * self.widths_px).sum())
        return pixels * self.channels * np.dtype(self.dtype).itemsize

    @property
    def most_bytes(self) -> int:
        """Decoded bytes of the largest image."""
        most_pixels = int((self.heights_px * self.widths_px).max())
        return most_pixels * self.channels * np.dtype(self.dtype).itemsize

    def check(self, image: int, pixels: Array, path: str) -> Array:
        """Compare a decoded image with its header.

        Args:
            image: Its position among the good images.
            pixels: Pixels that the decoder returned.
            path: Path that the message names.

        Returns:
            The pixels, contiguous and little-endian.

        Raises:
            DataError: Shape or dtype differ from the header.
        """
        shape = (self.channels, int(self.heights_px[image]), int(self.widths_px[image]))
        if pixels.shape != shape or pixels.dtype.name != self.dtype:
            raise DataError(
                f"{show_path(path)}: decoded to {pixels.dtype.name} {pixels.shape} but its "
                f"header states {self.dtype} {shape}; the file is damaged or changes while it is "
                "read"
            )
        return np.ascontiguousarray(pixels, np.dtype(self.dtype).newbyteorder("<"))


def survey_sources(
    sources: Sequence[ImageSource], decoder: Decoder, *, on_bad: OnBad, progress: bool
) -> Survey:
    """Read the headers of all sources.

    Args:
        sources: The images.
        decoder: Reads the headers.
        on_bad: ``error`` raises one error that lists all bad sources. ``skip`` skips them, and
            those whose dtype or number of channels differs from most.
        progress: Show a progress bar if reading takes long.

    Raises:
        ConfigError: An argument is not allowed.
        DataError: There are no good sources, or there are bad ones under ``error``, or dtype or
            channels differ.
    """
    check_choice("on_bad", on_bad, get_args(OnBad))
    if not sources:
        raise DataError("the list of images is empty; check the data folder and the file patterns")
    rows, bad = scan_headers(sources, decoder, progress=progress)
    if on_bad == "skip" and rows.any():
        bad += leave_out_unlike(rows, sources, find_usual(rows))
    # The other sources are decoded too, so that one list names all faults.
    if bad and on_bad == "error":
        bad = find_all_faults(sources, decoder, bad)
    raise_bad(bad, len(sources), on_bad)
    images = np.flatnonzero(rows[:, 0])
    check_alike(rows[images], [sources[image] for image in images.tolist()])
    return Survey.of(rows, bad)


def scan_headers(
    sources: Sequence[ImageSource], decoder: Decoder, *, progress: bool
) -> tuple[Ints, list[tuple[str, str]]]:
    """Read the headers of some sources in threads.

    Args:
        sources: The images.
        decoder: Reads the headers.
        progress: Show a progress bar if reading takes long.

    Returns:
        [n, 4] channels, height px, width px and number of the dtype of each image, with zeros for
        bad ones; and (first path, what is wrong) of each bad one.
    """
    headers = ordered_map(lambda source: _read_header(decoder, source), sources, count_threads())
    rows = np.zeros((len(sources), 4), np.int64)
    bad: list[tuple[str, str]] = []
    tracked = track(headers, "reading headers", len(sources), enabled=progress)
    for number, header in enumerate(tracked):
        if isinstance(header, str):
            bad.append((sources[number].paths[0], header))
        else:
            rows[number] = header
    return rows, bad


def find_all_faults(
    sources: Sequence[ImageSource], decoder: Decoder, bad: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Decode the sources with good headers, and list all faults in the order of the sources.

    Args:
        sources: The images.
        decoder: Decodes one source.
        bad: (first path, what is wrong) of the sources with bad headers.
    """
    known = {path for path, _ in bad}
    others = [source for source in sources if source.paths[0] not in known]
    row_of = {source.paths[0]: row for row, source in enumerate(sources)}
    faults = [*bad, *find_faults(others, decoder).entries]
    return sorted(faults, key=lambda entry: row_of[entry[0]])


def raise_bad(
    bad: Sequence[tuple[str, str]], total: int, on_bad: OnBad, *, what: str = "image"
) -> None:
    """Raise one error for all bad sources.

    Under ``skip``, raise it only if no good ones are left.

    Args:
        bad: (path, what is wrong) of each bad source.
        total: Number of all sources.
        on_bad: ``error`` or ``skip``.
        what: Singular noun for a source in the message.

    Raises:
        DataError: There are bad sources, which the error lists.
    """
    if on_bad == "skip" and len(bad) < total:
        return
    skip = SKIPPING if on_bad == "error" and len(bad) < total else ""
    headline = counted_of(len(bad), total, what, "is bad", "are bad")
    list_problems(bad).raise_if_any(headline, skip)


def report_bad(problems: Problems, total: int, on_bad: OnBad, *, what: str = "image") -> None:
    """Raise one error for all bad sources, or log a warning if they are skipped; see `raise_bad`."""
    raise_bad(problems.entries, total, on_bad, what=what)
    headline = counted_of(len(problems), total, what, "is", "are")
    problems.warn_if_any(log, f"{headline} bad and skipped")


def _read_header(decoder: Decoder, source: ImageSource) -> tuple[int, int, int, int] | str:
    """Return channels, height, width and the number of the dtype, or what is wrong."""
    try:
        channels, height_px, width_px, dtype = decoder.header(source)
    except (DataError, OSError) as error:
        return str(error)
    name = np.dtype(dtype).name
    path = show_path(source.paths[0])
    if name not in DTYPES:
        return f"{path}: dtype {name} is not allowed; allowed are {', '.join(DTYPES)}"
    if min(channels, height_px, width_px) < 1:
        return f"{path}: shape {(channels, height_px, width_px)} has no pixels"
    return channels, height_px, width_px, DTYPES.index(name)


def find_usual(rows: Ints) -> Ints:
    """Return the first row of `scan_headers` with the most frequent dtype and number of channels."""
    good = rows[rows[:, 0] > 0]
    kinds = Counter(map(tuple, good[:, [0, 3]].tolist()))
    ((kind, _),) = kinds.most_common(1)
    usual: Ints = good[(good[:, [0, 3]] == kind).all(axis=1).argmax()]
    return usual


def leave_out_unlike(
    rows: Ints, sources: Sequence[ImageSource], usual: Ints
) -> list[tuple[str, str]]:
    """Set rows to 0 whose dtype or number of channels differs from the usual ones.

    Args:
        rows: [n, 4] as `scan_headers` returns them.
        sources: Sources of these images.
        usual: [4], a row with the usual dtype and number of channels.

    Returns:
        (first path, what is wrong) of the images that differ.
    """
    is_other = (rows[:, [0, 3]] != usual[[0, 3]]).any(axis=1)
    example = show_path(sources[int(np.argmin(is_other))].paths[0])
    is_other &= rows[:, 0] > 0
    bad = []
    for number in np.flatnonzero(is_other).tolist():
        path = sources[number].paths[0]
        stored, expected = _describe_difference(rows[number], usual)
        is_depth = rows[number, 3] != usual[3]
        cure = _CONVERT if is_depth else _cure_channels({int(rows[number, 0]), int(usual[0])})
        text = f"{stored}, but most images have {expected}, such as {example}; {cure}"
        bad.append((path, f"{show_path(path)}: {text}"))
    rows[is_other] = 0
    return bad


def _cure_channels(counts: set[int]) -> str:
    return "set data.read.gray_to_rgb=true" if counts == {1, 3} else _CONVERT


def _describe_difference(row: Ints, usual: Ints) -> tuple[str, str]:
    """Return the form of an image, and the usual one, as far as they differ."""
    parts: list[tuple[str, str]] = []
    if row[0] != usual[0]:
        parts.append((counted(int(row[0]), "channel"), counted(int(usual[0]), "channel")))
    if row[3] != usual[3]:
        parts.append((DTYPES[row[3]], DTYPES[usual[3]]))
    one, other = (" of ".join(texts) for texts in zip(*parts, strict=True))
    return one, other


def check_alike(rows: Ints, sources: Sequence[ImageSource]) -> None:
    """Refuse images that differ in dtype or number of channels, with an example of each.

    Args:
        rows: [n, 4] as `_read_header` returns them.
        sources: Sources of these images.

    Raises:
        DataError: The images differ.
    """
    problems = Problems()
    dtypes = [DTYPES[number] for number in rows[:, 3].tolist()]
    _add_others(problems, dtypes, sources, "dtype", _CONVERT)
    counts = rows[:, 0].tolist()
    hint = _cure_channels(set(counts))
    channels = [counted(count, "channel") for count in counts]
    _add_others(problems, channels, sources, "number of channels", hint)
    problems.raise_if_any(
        "the images do not fit into one store", "data.on_bad=skip skips those that differ from most"
    )


def _add_others(
    problems: Problems,
    values: Sequence[str],
    sources: Sequence[ImageSource],
    quantity: str,
    hint: str,
) -> None:
    """Add the first source of each value that differs from the value of the first source."""
    first_sources: dict[str, ImageSource] = {}
    for value, source in zip(values, sources, strict=True):
        first_sources.setdefault(value, source)
    first_name = show_path(sources[0].paths[0])
    for value, source in first_sources.items():
        if value != values[0]:
            problems.add(
                source.paths[0],
                f"{value}, but {first_name} has {values[0]}; a dataset has one {quantity}; "
                f"{hint}{hint_masks(source)}",
            )
