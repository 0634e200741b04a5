"""Checking files without storing them."""

from collections.abc import Sequence
from functools import partial

from lit_data.errors import DataError
from lit_data.io.decoders import Decoder, ImageSource
from lit_data.io.ordered import ordered_map
from lit_data.io.problems import Problems
from lit_data.io.progress import track
from lit_data.io.survey import survey_sources


def check_sources(sources: Sequence[ImageSource], decoder: Decoder, *, workers: int = 2) -> None:
    """Decode every source strictly and keep nothing.

    Args:
        sources: The images.
        decoder: Decodes one source.
        workers: Threads that decode.

    Raises:
        DataError: Sources are bad, all of which are listed, or they do not fit together.
    """
    problems = Problems()
    faults = ordered_map(partial(_find_fault, decoder), sources, workers)
    for source, fault in zip(sources, track(faults, "checking", len(sources)), strict=True):
        if fault:
            problems.add(source.paths[0], fault)
    problems.raise_if_any(f"{len(problems)} of {len(sources)} images are bad")
    survey_sources(sources, decoder, workers=workers, on_bad="error", progress=False)


def _find_fault(decoder: Decoder, source: ImageSource) -> str | None:
    try:
        decoder(source)
    except DataError as error:
        return str(error)
    return None
