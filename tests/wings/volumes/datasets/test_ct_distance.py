import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose

from lit_data.core.errors import ConfigError
from lit_data.core.types import Bools, Doubles
from lit_data.wings.volumes.datasets import distance as ct_distance
from lit_data.wings.volumes.datasets.distance import measure_points, measure_signed

pytest.importorskip("edt")

SPACING_MM = (2.0, 0.7, 1.1)


def _brute_force(occupied: Bools, most_mm: float) -> Doubles:
    places = np.argwhere(np.ones_like(occupied)) * SPACING_MM
    kind = occupied.ravel()
    distances = np.sqrt(((places[:, None] - places) ** 2).sum(-1))
    distances[kind[:, None] == kind] = np.inf
    nearest = np.minimum(distances.min(1), most_mm).reshape(occupied.shape)
    return np.asarray(np.where(occupied, -nearest, nearest))


@pytest.fixture
def occupied() -> Bools:
    mask = np.random.default_rng(0).random((9, 7, 8)) < 0.8
    mask[:4], mask[6:, :, :3] = True, False
    return mask


@pytest.mark.parametrize("most_mm", [1.5, 4.0, 100.0])
def test_distances_are_those_of_brute_force(occupied: Bools, most_mm: float) -> None:
    found = measure_signed(occupied, SPACING_MM, most_mm)
    assert found.dtype == np.float32
    assert_allclose(found, _brute_force(occupied, most_mm), rtol=1e-5)


@pytest.mark.parametrize("most_mm", [1.5, 4.0, None])
@pytest.mark.parametrize("voxels", [1, 56 * 7, 2**20])
def test_points_are_measured_slab_by_slab(
    occupied: Bools, most_mm: float | None, voxels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ct_distance, "SLAB_VOXELS", voxels)
    positions = np.flatnonzero(occupied).astype(np.int32)
    found = measure_points(positions, occupied.shape, SPACING_MM, most_mm)
    assert_allclose(found, _brute_force(occupied, most_mm or 1e9)[occupied], rtol=1e-5)


def test_a_set_without_a_surface_has_the_largest_distance() -> None:
    everywhere = np.ones((2, 3, 4), np.bool_)
    assert (measure_signed(everywhere, SPACING_MM, 3.0) == -3).all()
    assert (measure_signed(~everywhere, SPACING_MM, 3.0) == 3).all()
    diagonal_mm = np.linalg.norm(np.multiply(everywhere.shape, SPACING_MM))
    assert_allclose(
        measure_points(np.arange(24), (2, 3, 4), SPACING_MM, None), -diagonal_mm, rtol=1e-6
    )


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "edt", None)
    with pytest.raises(ConfigError, match=r"need edt: pip install edt"):
        measure_points(np.arange(3), (1, 1, 4), SPACING_MM, 2.0)
