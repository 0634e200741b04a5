from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.types import Bools, Ints
from lit_data.wings.volumes.datasets.points import choose_points, write_coordinates
from lit_data.wings.volumes.datasets.windows import (
    WindowGrid,
    WindowSpec,
    count_inside,
    draw_start,
    draw_words,
)
from lit_data.wings.volumes.files.sparse import SparseVolume
from tests.helpers.options import assert_refused


def test_sliding_windows_cover_every_voxel_and_stay_inside() -> None:
    shapes = [(20, 17, 33), (8, 8, 8), (5, 30, 9)]
    grid = WindowGrid(shapes, (8, 8, 8), (6, 8, 5))
    volumes, starts = grid.locate(np.arange(len(grid)))
    assert len(grid) == 3 * 3 * 6 + 1 + 4 * 2
    for number, shape in enumerate(shapes):
        seen = np.zeros(shape, np.int64)
        own = grid.windows_of(number)
        assert (volumes[own.start : own.stop] == number).all()
        for z, y, x in starts[volumes == number].tolist():
            assert all(
                0 <= s <= max(0, length - 8) for s, length in zip((z, y, x), shape, strict=True)
            )
            seen[z : z + 8, y : y + 8, x : x + 8] += 1
        assert seen.min() >= 1
    assert len(np.unique(np.column_stack((volumes, starts)), axis=0)) == len(grid)


def _volume(mask: Bools) -> SparseVolume:
    positions = np.flatnonzero(mask).astype(np.int32)
    slices = np.concatenate(([0], np.cumsum(mask.sum((1, 2)))))
    return SparseVolume(positions, positions.astype(np.int16), mask.shape, (1.0, 1.0, 1.0), slices)


@pytest.mark.parametrize(
    ("start", "sides"),
    [
        ((0, 0, 0), (20, 17, 33)),
        ((3, 4, 5), (8, 8, 8)),
        ((12, 9, 25), (8, 8, 8)),
        ((0, 0, 0), (64, 20, 40)),
    ],
)
def test_voxels_of_a_window_are_those_of_the_dense_volume(start: Any, sides: Any) -> None:
    mask = np.random.default_rng(0).random((20, 17, 33)) < 0.3
    volume = _volume(mask)
    numbers, places = volume.find_inside(start, sides)
    found = np.full(sides, -1)
    found.reshape(-1)[places] = volume.positions[numbers]
    part = tuple(slice(s, s + length) for s, length in zip(start, sides, strict=True))
    dense = np.where(mask, np.arange(mask.size).reshape(mask.shape), -1)[part]
    expected = np.full(sides, -1)
    expected[tuple(slice(0, length) for length in dense.shape)] = dense
    assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("sides", "steps"), [((8, 8, 8), (6, 8, 5)), ((4, 30, 33), (4, 1, 1)), ((1, 2, 3), (1, 1, 1))]
)
def test_voxels_of_many_windows_are_counted_at_once(sides: Any, steps: Any) -> None:
    mask = np.random.default_rng(0).random((20, 17, 33)) < 0.3
    volume, grid = _volume(mask), WindowGrid([mask.shape], sides, steps)
    _, starts = grid.locate(np.arange(len(grid)))
    expected = [len(volume.find_inside(start, sides)[0]) for start in starts[::7].tolist()]
    assert count_inside(volume, starts, sides)[::7].tolist() == expected


def test_random_windows_lie_inside_and_depend_on_the_sample_alone() -> None:
    spec = WindowSpec(size=(4, 8, 40))
    words = draw_words(1, np.arange(300), epoch=2)
    starts = np.array([draw_start((6, 20, 30), spec, None, drawn) for drawn in words])
    assert starts.min(0).tolist() == [0, 0, 0]
    assert starts.max(0).tolist() == [2, 12, 0]
    assert draw_words(1, np.array([7]), epoch=2) == [words[7]]
    other_words = draw_words(1, np.arange(300), epoch=3)
    other = [draw_start((6, 20, 30), spec, None, drawn) for drawn in other_words]
    assert other != starts.tolist()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_so_many_windows_have_a_labelled_voxel_in_their_middle(share: float) -> None:
    shape, spec = (100, 100, 100), WindowSpec(size=10, label_bias=share)
    labelled = np.ravel_multi_index(([40, 41], [50, 50], [60, 2]), shape)
    words = draw_words(0, np.arange(400), epoch=0)
    starts = [draw_start(shape, spec, labelled, drawn) for drawn in words]
    hits = [starts.count(place) for place in ([35, 45, 55], [36, 45, 0])]
    assert sum(hits) == pytest.approx(400 * share, abs=40 if 0 < share < 1 else 0)
    assert min(hits) >= 140 * share
    assert max(draw_start(shape, spec, labelled[:0], words[0])) < 91


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": (1, 2)},
        {"stride": -1},
        {"mode": "all"},
        {"label_bias": 1.5},
        {"per_volume": 0},
        {"min_points": -1},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    assert_refused(WindowSpec, options)


def _choose(count: int, most: int, index: int = 0, epoch: int = 0) -> Ints:
    return choose_points(count, most, seed=5, epoch=epoch, index=index)


@pytest.mark.parametrize(
    ("count", "most"), [(10, 4), (10, 9), (11, 1), (1000, 999), (70_001, 3_000), (2**31, 7)]
)
def test_points_are_different_ascending_and_as_many_as_asked(count: int, most: int) -> None:
    for epoch in range(5):
        found = _choose(count, most, epoch=epoch)
        assert len(found) == most
        assert found[0] >= 0
        assert found[-1] < count
        assert (np.diff(found) > 0).all()


def test_all_voxels_are_taken_where_there_are_few() -> None:
    assert choose_points(10, 10, seed=0, epoch=0, index=0) is None
    assert choose_points(0, 10, seed=0, epoch=0, index=0) is None


def test_a_subset_is_a_function_of_sample_and_epoch_and_spreads_over_the_volume() -> None:
    assert_array_equal(_choose(5000, 400, 3, 1), _choose(5000, 400, 3, 1))
    for other in (_choose(5000, 400, 4, 1), _choose(5000, 400, 3, 2)):
        assert len(np.intersect1d(other, _choose(5000, 400, 3, 1))) < 100
    parts = np.histogram(_choose(5000, 400, 3, 1), 10, (0, 5000))[0]
    assert abs(parts - 40).max() <= 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(7, 11, 5), (40, 70, 90), (3, 1, 1)])
def test_coordinates_are_those_of_argwhere(dtype: type, shape: tuple[int, int, int]) -> None:
    mask = np.random.default_rng(0).random(shape) < 0.3
    rows = np.zeros((int(mask.sum()), 4), np.int32)
    write_coordinates(np.flatnonzero(mask).astype(dtype), mask.shape, rows)
    assert_array_equal(rows[:, 1:], np.argwhere(mask))
    assert not rows[:, 0].any()
