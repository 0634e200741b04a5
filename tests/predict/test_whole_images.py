"""What is written part by part reads back as if it had been written at once."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.core.errors import StoreError
from lit_data.core.types import Array
from lit_data.images.writing import write_png_parts
from lit_data.predict.maps import ProbabilityMap
from lit_inspect import regions
from lit_inspect.cells import plain_cell, restore_cell


@pytest.mark.parametrize(
    ("dtype", "shape", "step"),
    [
        (np.uint8, (7, 5), 1),
        (np.uint16, (7, 5), 4),
        (np.uint8, (7, 5, 3), 4),
        (np.uint16, (7, 5, 3), 100),
        (np.uint8, (1, 1), 100),
        (np.uint16, (9, 1), 1),
    ],
)
def test_a_png_of_parts_holds_the_whole(
    dtype: type, shape: tuple[int, ...], step: int, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape).astype(dtype)
    path = tmp_path / "a" / "image.png"
    write_png_parts(path, shape[:2], (pixels[top : top + step] for top in range(0, shape[0], step)))
    read = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert_array_equal(read[..., ::-1] if read.ndim == 3 else read, pixels)


def test_a_file_that_could_not_be_finished_is_not_there(tmp_path: Path) -> None:
    def parts() -> Array:
        yield np.zeros((1, 4), np.uint8)
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match=r"image\.png: No space left on device; free some space"):
        write_png_parts(tmp_path / "image.png", (2, 4), parts())
    assert not list(tmp_path.iterdir())


def test_parts_cover_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "SLAB_PX", 30)
    assert [(part.start, part.stop) for part in regions.slabs(7, 10)] == [(0, 3), (3, 6), (6, 7)]
    assert [(part.start, part.stop) for part in regions.slabs(2, 100)] == [(0, 1), (1, 2)]


def test_a_map_from_a_file_has_the_values_of_one_in_memory() -> None:
    values = np.array([[0, 0.25], [0.5, 1]], np.float32)
    stored = ProbabilityMap(np.rint(values * 65535).astype(np.uint16))
    assert_allclose(stored.rows(slice(None)), values, atol=1 / 65535)
    for dtype in (np.uint8, np.uint16):
        expected = ProbabilityMap(values).encode(slice(0, 2), dtype)
        assert_array_equal(stored.encode(slice(0, 2), dtype), expected)


def test_no_text_is_a_formula() -> None:
    for formula in ("=1+1", "@x", "-a.png", "+"):
        assert plain_cell(formula) == f"'{formula}"
    for value in (-3.5, "a=b", None, "'a'"):
        assert plain_cell(value) == value
    for value in ("=1+1", "-a.png", "'-a.png", "''@", "'a'", "'", "a", -3.5, None):
        assert restore_cell(plain_cell(value)) == value


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a\nb\t\x1b[2J.png", "'a\\x0ab\\x09\\x1b[2J.png"),
        ("Sp\udce4ne.png", "'Sp\\xe4ne.png"),
        ("\x85\x9b", "'\\u0085\\u009b"),
        ("=a\r", "'=a\\x0d"),
        ("Sp\u00e4ne\u00a0.png", "Sp\u00e4ne\u00a0.png"),
        ("images\\new\\x1b.png", "images\\new\\x1b.png"),
    ],
)
def test_no_text_controls_a_terminal(text: str, cell: str) -> None:
    assert plain_cell(text) == cell
    assert restore_cell(cell) == text
