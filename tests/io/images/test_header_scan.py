"""Headers of images that do not fit into one store."""

from dataclasses import dataclass

import numpy as np
import pytest

from lit_data.errors import DataError
from lit_data.io.images.decoders import DecodedSource, ImageSource, SourceHeader
from lit_data.io.images.header_scan import survey_sources

GREY, WIDER, COLOUR = (
    SourceHeader(channels, 6, width, np.dtype(np.uint8))
    for channels, width in ((1, 8), (1, 9), (3, 8))
)
DEEP = GREY._replace(dtype=np.dtype(np.uint16))


@dataclass(frozen=True)
class FakeDecoder:
    """Gives headers that no file has."""

    headers: tuple[SourceHeader, ...]
    fingerprint: str = "fake"

    def header(self, source: ImageSource) -> SourceHeader:
        return self.headers["abcd".index(source.paths[0])]

    def __call__(self, source: ImageSource) -> DecodedSource:
        raise NotImplementedError


def survey(*headers: SourceHeader) -> list[int]:
    sources = [ImageSource((name,)) for name in "abcd"[: len(headers)]]
    found = survey_sources(sources, FakeDecoder(headers), workers=1, on_bad="error", progress=False)
    return found.widths_px.tolist()


def test_images_of_different_sizes_are_a_dataset() -> None:
    assert survey(GREY, WIDER, GREY) == [8, 9, 8]


# rows 16, 17
@pytest.mark.parametrize(
    ("headers", "report"),
    [
        (
            (GREY, DEEP, DEEP, GREY),
            "  b: uint16, but a has uint8; one set has one dtype; convert one of them\n"
            "the images do not fit into one store",
        ),
        (
            (COLOUR, GREY, GREY),
            "  b: 1 channel(s), but a has 3 channel(s); one set has one number of channels\n"
            "the images do not fit into one store:\n"
            "  set data.read.gray_to_rgb=true, or choose data.channels",
        ),
    ],
)
def test_one_example_of_each_other_kind_is_named(
    headers: tuple[SourceHeader, ...], report: str
) -> None:
    with pytest.raises(DataError) as error:
        survey(*headers)
    assert str(error.value) == report
