"""An image unlike the others is left out and named where bad ones are, and is an error elsewhere."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from lit_data.core.errors import DataError
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.header_scan import find_faults, report_bad, survey_sources

GRAY = np.zeros((6, 8), np.uint8)
KINDS = {
    "rgb": np.zeros((6, 8, 3), np.uint8),
    "gray": GRAY,
    "wide": GRAY.astype(np.uint16),
    "two": np.zeros((6, 8, 2), np.uint8),
    "eight": np.zeros((6, 8, 8), np.uint8),
}


def _write(folder: Path, *kinds: str) -> list[ImageSource]:
    sources = []
    for number, kind in enumerate(kinds):
        path = folder / f"{number}.png"
        if kind in ("two", "eight"):
            path = path.with_suffix(".npy")
            np.save(path, KINDS[kind])
        elif kind == "damaged":
            path.write_bytes(b"no picture")
        else:
            Image.fromarray(KINDS[kind]).save(path)
        sources.append(ImageSource((str(path),)))
    return sources


@pytest.mark.parametrize("odd", ["gray", "wide", "two", "damaged"])
def test_images_unlike_most_are_left_out_and_named(tmp_path: Path, odd: str) -> None:
    sources = _write(tmp_path, odd, "rgb", "rgb", odd, "rgb")
    survey = survey_sources(sources, ImageDecoder(), on_bad="skip", progress=False)
    assert survey.images.tolist() == [1, 2, 4]
    assert (survey.channels, survey.dtype) == (3, "uint8")
    assert [Path(path).stem for path, _ in survey.skipped] == ["0", "3"]
    faults = {
        "damaged": "",
        "gray": "1 channel, but most images have 3 channels, such as {}; set data.read.gray_to_rgb=true",
        "two": "2 channels, but most images have 3 channels, such as {}; convert one of them, or skip",
        "wide": "1 channel of uint16, but most images have 3 channels of uint8, such as {}; convert one",
    }
    assert faults[odd].format(sources[1].paths[0]) in survey.skipped[0][1]


def test_all_bad_images_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 of 2 images are bad"):
        survey_sources(
            _write(tmp_path, "damaged", "damaged"), ImageDecoder(), on_bad="skip", progress=False
        )


@pytest.mark.parametrize(
    ("kinds", "cure"),
    [
        (("rgb", "gray"), "set data.read.gray_to_rgb=true"),
        (("rgb", "eight"), "convert one of them, or skip it with data.exclude"),
        (("gray", "wide"), "convert one of them, or skip it with data.exclude"),
    ],
)
def test_the_error_names_a_key_that_helps(
    tmp_path: Path, kinds: tuple[str, ...], cure: str
) -> None:
    with pytest.raises(DataError) as caught:
        survey_sources(_write(tmp_path, *kinds), ImageDecoder(), on_bad="error", progress=False)
    assert cure in str(caught.value)
    assert "data.on_bad=skip skips those that differ from most" in str(caught.value)
    assert "data.channels" not in str(caught.value)


def test_masks_among_images_are_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "gt").mkdir()
    sources = [*_write(tmp_path, "rgb"), *_write(tmp_path / "gt", "gray")]
    with pytest.raises(DataError, match=r"if these are masks, set data\.masks=gt"):
        survey_sources(sources, ImageDecoder(), on_bad="error", progress=False)


def test_a_check_tells_what_was_noticed_and_lists_all_that_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = _write(tmp_path, "rgb", "rgb", "wide", "damaged")
    for number in range(2):
        path = tmp_path / f"{number}.tif"
        tifffile.imwrite(path, KINDS["rgb"], photometric="rgb", extratags=[(274, 3, 1, 6, True)])
        sources.append(ImageSource((str(path),)))
    with caplog.at_level("INFO"):
        problems = find_faults(sources, ImageDecoder())
    assert [Path(path).name for path, _ in problems.entries] == ["3.png", "2.png"]
    assert "2 images: orientation 6 not applied; data.read.exif=apply turns" in caplog.text
    with pytest.raises(DataError, match=r"(?s)2 of 6 images are bad.*data\.on_bad=skip skips"):
        report_bad(problems, 6, "error")
    report_bad(problems, 6, "skip")
    assert "2 of 6 images are bad and skipped" in caplog.text
