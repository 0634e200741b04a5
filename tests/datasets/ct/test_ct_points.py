import numpy as np
import pytest
from numpy.typing import NDArray

from lit_data.datasets.ct.points import choose_points, write_coordinates


def _choose(count: int, most: int, index: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    found = choose_points(count, most, seed=5, epoch=epoch, index=index)
    assert found is not None
    return found


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


@pytest.mark.parametrize("most", [3, 7, 12])
def test_every_voxel_is_equally_likely(most: int) -> None:
    draws = 1500
    counts = sum(
        np.bincount(_choose(13, most, epoch=epoch), minlength=13) for epoch in range(draws)
    )
    expected = draws * most / 13
    deviation = (draws * most / 13 * (1 - most / 13)) ** 0.5
    assert abs(counts - expected).max() < 4.5 * deviation


def test_a_subset_is_a_function_of_sample_and_epoch_and_spreads_over_the_volume() -> None:
    np.testing.assert_array_equal(_choose(5000, 400, 3, 1), _choose(5000, 400, 3, 1))
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
    np.testing.assert_array_equal(rows[:, 1:], np.argwhere(mask))
    assert not rows[:, 0].any()
