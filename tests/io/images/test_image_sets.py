"""What keeps images from being one set is told from headers."""

from pathlib import Path

import numpy as np

from lit_data.io.images.consistency import check_set, describe_size_mismatch
from lit_data.io.images.decoders import SourceHeader
from lit_data.io.images.header import read_header


def _header(
    height_px: int, width_px: int, *, channels: int = 1, dtype: str = "uint8"
) -> SourceHeader:
    return SourceHeader(channels, height_px, width_px, np.dtype(dtype))


def test_images_of_different_sizes_are_a_set() -> None:
    assert len(check_set([_header(6, 8), _header(7, 8)], ["a.png", "b.png"])) == 0


# row 16
def test_mixed_depths_are_shown_with_one_example_each() -> None:
    headers = [
        _header(6, 8),
        _header(6, 8, dtype="uint16"),
        _header(6, 8, dtype="uint16"),
        _header(6, 8),
    ]
    problems = check_set(headers, ["a", "b", "c", "d"])
    assert (
        problems.report()
        == "b: uint16, but a has uint8; one set has one dtype; convert one of them"
    )


def test_mixed_channel_counts_are_shown_with_one_example_each() -> None:
    headers = [_header(6, 8, channels=3), _header(6, 8), _header(6, 8)]
    assert check_set(headers, ["a", "b", "c"]).skipped == ("b",)
    assert check_set(headers, ["a", "b", "c"]).report() == (
        "b: 1 channel(s), but a has 3 channel(s); one set has one number of channels; "
        "set data.read.gray_to_rgb=true, or choose data.channels"
    )


# row 43
def test_a_size_that_is_only_turned_is_called_so() -> None:
    text = describe_size_mismatch(("b.png", "b_mask\n.png"), ((6, 8), (8, 6)))
    assert text.startswith(
        "b.png is 6 x 8 pixels, b_mask\\n.png is 8 x 6: only turned, perhaps by an EXIF orientation"
    )
    text = describe_size_mismatch(("b.png", "c.png"), ((6, 8), (6, 9)))
    assert text == "b.png is 6 x 8 pixels, c.png is 6 x 9; they must have the same size"


def test_headers_of_files_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((6, 8), np.uint8))
    assert len(check_set([read_header(tmp_path / "a.npy")], [tmp_path / "a.npy"])) == 0


def test_no_images_are_no_problem() -> None:
    assert len(check_set([], [])) == 0
