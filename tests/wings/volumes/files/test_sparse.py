"""The sparse index is what argwhere gives, and windows of it are windows of the volume."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Array
from lit_data.wings.volumes import IndexOptions, index_volume, wrap_array
from lit_data.wings.volumes.files import volume as volume_module

SHAPE = (7, 9, 13)
BOXES = [
    ((0, 0, 0), SHAPE),
    ((2, 3, 4), (3, 4, 5)),
    ((-2, -3, -4), (5, 6, 7)),
    ((5, 7, 11), (9, 9, 9)),
    ((7, 0, 0), (2, 2, 2)),
]


def _draw(dtype: Any = np.int16, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.random(SHAPE) < 0.1
    volume = (
        rng.integers(0, 200, SHAPE) if dtype == np.uint8 else rng.normal(-500, 400, SHAPE).round(1)
    )
    return volume.astype(dtype)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int16, np.float32])
@pytest.mark.parametrize(
    ("low", "high", "slab_bytes"),
    [(0.5, None, 1), (-700.25, 100.5, 700), (0, 50, 2**20), (-1e6, 1e6, 1), (1e5, None, 700),
     (-1e6, -1e5, 2**20)],
)  # fmt: skip
def test_the_index_is_what_argwhere_gives(
    dtype: Any, low: float, high: float | None, slab_bytes: int
) -> None:
    volume = _draw(dtype)
    occupied = (volume > low) & (volume <= (np.inf if high is None else high))
    with patch.object(volume_module, "SLAB_BYTES", slab_bytes):
        sparse = index_volume(wrap_array(volume), low, high)
    expected = np.argwhere(occupied)
    assert sparse.positions.dtype == np.int32
    assert_array_equal(sparse.coords(), expected)
    assert_array_equal(sparse.values, volume[occupied])
    assert_array_equal(sparse.positions, np.ravel_multi_index(tuple(expected.T), SHAPE))
    assert_array_equal(np.diff(sparse.slices), occupied.sum(axis=(1, 2)))


def test_whole_floats_are_kept_in_two_bytes() -> None:
    volume = _draw(np.float32)
    assert index_volume(wrap_array(volume), 0).values.dtype == np.float32
    assert index_volume(wrap_array(np.rint(volume)), 0).values.dtype == np.int16


@pytest.mark.parametrize("slab_bytes", [1, 500, 2**20])
def test_labels_are_kept_where_voxels_are_occupied_and_where_not(slab_bytes: int) -> None:
    volume, rng = _draw(), np.random.default_rng(2)
    labels = rng.choice([0, 0, 0, 1, 7, 300], SHAPE).astype(np.int32)
    with patch.object(volume_module, "SLAB_BYTES", slab_bytes):
        sparse = index_volume(wrap_array(volume), -400, labels=wrap_array(labels))
    assert sparse.labels.dtype == np.uint16
    assert_array_equal(sparse.labels, labels[volume > -400])
    assert sparse.label_index.classes.tolist() == [1, 7, 300]
    for label in (1, 7, 300, 5):
        assert_array_equal(sparse.label_index.of(label), np.flatnonzero(labels == label))
    around = np.pad(labels, 20)
    for start, size in BOXES:
        expected = around[
            tuple(slice(20 + s, 20 + s + n) for s, n in zip(start, size, strict=True))
        ]
        assert_array_equal(sparse.window_labels(start, size), expected)


def test_labels_that_do_not_fit_are_refused() -> None:
    volume = _draw()
    for labels, message in [
        (np.zeros((9, 7, 13), np.uint8), r"labels of shape \(9, 7, 13\) \(turned\?\), but"),
        (np.full(SHAPE, -1, np.int16), "label -1; labels are whole numbers"),
        (np.full(SHAPE, 0.5, np.float32), "label 0.5; labels are whole numbers"),
    ]:
        with pytest.raises(DataError, match=message):
            index_volume(wrap_array(volume), 0, labels=wrap_array(labels))
    with pytest.raises(DataError, match="no labels; put them next to it"):
        index_volume(wrap_array(volume), 0).window_labels((0, 0, 0), (1, 1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low_hu": np.nan}, "foreground from nan"),
        ({"low_hu": 5, "high_hu": 5}, "the second above the first"),
        ({"low_hu": 0, "nan_fill": np.inf}, "nan_fill=inf"),
    ],
)
def test_options_that_are_not_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IndexOptions(**options)
