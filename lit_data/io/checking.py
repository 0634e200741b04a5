"""Checking files without storing them."""

from collections.abc import Sequence
from functools import partial

from lit_data.errors import DataError, Problems
from lit_data.io.decoders import Decoder, ImageSource
from lit_data.io.ordered import ordered_map
from lit_data.io.progress import track


def find_faults(sources: Sequence[ImageSource], decoder: Decoder, *, workers: int = 2) -> Problems:
    """Decode every source strictly and keep nothing but what is wrong.

    Args:
        sources: The images.
        decoder: Decodes one source.
        workers: Threads that decode.

    Returns:
        The bad sources by their first path.
    """
    problems = Problems()
    faults = ordered_map(partial(_find_fault, decoder), sources, workers)
    for source, fault in zip(sources, track(faults, "checking", len(sources)), strict=True):
        if fault:
            problems.add(source.paths[0], fault)
    return problems


def _find_fault(decoder: Decoder, source: ImageSource) -> str | None:
    try:
        decoder(source)
    except DataError as error:
        return str(error)
    return None
