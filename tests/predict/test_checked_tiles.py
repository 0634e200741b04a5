"""Tiles of some images, with which an exported net is checked."""

from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import DataError
from lit_data.predict.maps import WholeImages
from lit_data.predict.nets import read_tiles

SIZES = [(40, 50), (8, 100), (64, 64), (1, 1), (30, 8), (90, 70)]


class Bank:
    """Images in memory; one of them is bad."""

    channels = 3

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if SIZES[number] == (1, 1):
            raise DataError("3.png: it is bad")
        return np.full((3, *SIZES[number]), 20 * number, np.uint8)


def make_images(value_range: tuple[float, float] | None = None) -> WholeImages:
    names = [f"{number}.png" for number in range(len(SIZES))]
    return WholeImages(bank=Bank(), names=names, channels=(0, 1, 2), value_range=value_range)  # type: ignore[arg-type]


def test_tiles_are_cut_from_the_middle_and_bad_images_left_out() -> None:
    tiles = read_tiles(make_images(), (32, 48), 100)
    assert {tuple(tile.shape) for tile in tiles} == {(3, 32, 48)}
    assert sorted(round(255 * float(tile.mean())) for tile in tiles) == [0, 20, 40, 80, 100]
    stretched = read_tiles(make_images((0.0, 100.0)), (32, 48), 100)
    assert max(float(tile.max()) for tile in stretched) == 1
    assert 1 <= len(read_tiles(make_images(), (32, 48), 2)) <= 2


def test_sets_of_bad_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bank, "__getitem__", _fail)
    with pytest.raises(DataError, match=r"^none of the images that a net would be checked"):
        read_tiles(make_images(), (32, 32), 4)


def _fail(bank: Bank, number: int) -> None:
    raise DataError("it is bad")
