"""Other sizes and spacings, made slab by slab."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.core.errors import ConfigError
from lit_data.core.types import Array
from lit_data.wings.volumes import Resolution, index_volume, wrap_array
from lit_data.wings.volumes.files import volume as volume_module
from lit_data.wings.volumes.files.hounsfield import StoredScale
from lit_data.wings.volumes.files.volume import FileVolume, Volume

SHAPE = (10, 8, 12)


class _ForwardOnly:
    """Slices that can be read once, as those of a packed file should be."""

    def __init__(self, array: Array) -> None:
        self.shape = array.shape
        self._array, self.at = array, 0

    def read(self, begin: int, end: int) -> Array:
        assert begin >= self.at, "read backwards"
        self.at = end
        return self._array[begin:end]

    def close(self) -> None:
        self.at = -1


def _read(volume: Volume, step: int) -> Array:
    ends = range(0, volume.shape[0], step)
    return np.concatenate([volume.read(z, min(z + step, volume.shape[0])) for z in ends])


def _ramp(dtype: Any = np.float32) -> Array:
    z, y, x = np.meshgrid(*(np.arange(n) for n in SHAPE), indexing="ij")
    return (100 * z + 10 * y + x).astype(dtype)


@pytest.mark.parametrize(
    "resolution",
    [
        Resolution(6),
        Resolution((25, 8, 5)),
        Resolution(spacing_mm=1.7),
        Resolution((14, 6, 12), 0.8, "pad_crop"),
    ],
)
@pytest.mark.parametrize("nearest", [False, True])
def test_the_result_does_not_depend_on_the_slabs(resolution: Resolution, nearest: bool) -> None:
    volume = np.random.default_rng(0).integers(-1000, 1000, SHAPE, dtype=np.int16)
    slices = _ForwardOnly(volume)
    whole = resolution.apply(wrap_array(volume), fill=-1024, nearest=nearest)
    expected = whole.read(0, whole.shape[0])
    assert expected.shape == whole.shape
    assert expected.dtype == np.int16
    for step in (1, 3):
        slices.at = 0
        dense = FileVolume("slices", slices, StoredScale(volume.dtype))
        again = resolution.apply(dense, fill=-1024, nearest=nearest)
        assert_array_equal(_read(again, step), expected)


@pytest.mark.parametrize("steps", [(2, 2, 2), (0.5, 1, 2), (1.25, 0.8, 1.5)])
def test_linear_volumes_stay_linear(steps: tuple[float, float, float]) -> None:
    spacing_mm = tuple(3.0 * step for step in steps)
    moved = Resolution(spacing_mm=spacing_mm).apply(
        wrap_array(_ramp(), spacing_mm=(3.0, 3.0, 3.0)), fill=0
    )
    assert moved.spacing_mm == pytest.approx(spacing_mm)
    grid = [
        np.clip((np.arange(n) + 0.5) * step - 0.5, 0, old - 1)
        for n, step, old in zip(moved.shape, steps, SHAPE, strict=True)
    ]
    z, y, x = np.meshgrid(*grid, indexing="ij")
    assert_allclose(moved.read(0, moved.shape[0]), 100 * z + 10 * y + x, rtol=1e-5)


def test_shape_and_spacing_and_affine_follow_each_other() -> None:
    affine = np.diag([0.5, 0.6, 2.0, 1.0])
    affine[:3, 3] = 7, 8, 9
    dense = wrap_array(_ramp(), spacing_mm=(2.0, 0.6, 0.5), affine=affine)
    half = Resolution((5, 4, 6)).apply(dense, fill=0)
    assert (half.shape, half.spacing_mm) == ((5, 4, 6), (4.0, 1.2, 1.0))
    # The centre of the first new voxel lies between the first two old ones along each axis.
    assert_allclose(half.affine @ [0, 0, 0, 1], affine @ [0.5, 0.5, 0.5, 1])
    assert_allclose(half.affine @ [5, 3, 4, 1], affine @ [10.5, 6.5, 8.5, 1])
    padded = Resolution((12, 4, 12), fit="pad_crop").apply(dense, fill=0)
    assert_allclose(padded.affine @ [0, 0, 0, 1], affine @ [0, 2, -1, 1])


def test_labels_are_never_blended_and_keep_to_their_voxels(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.zeros(SHAPE, np.uint8)
    labels[:, :, 6:] = 9
    volume = np.where(labels > 0, np.int16(500), np.int16(-1000))
    monkeypatch.setattr(volume_module, "SLAB_BYTES", 1)
    sparse = index_volume(
        wrap_array(volume), 0, resolution=Resolution((5, 16, 24)), labels=wrap_array(labels)
    )
    assert sparse.shape == (5, 16, 24)
    assert sparse.label_index.classes.tolist() == [9]
    assert set(sparse.labels.tolist() if sparse.labels is not None else []) == {9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": 0}, "three whole numbers above 0"),
        ({"shape": 2.5}, "three whole numbers above 0"),
        ({"spacing_mm": (1, 2)}, "spacing_mm"),
        ({"spacing_mm": "1mm"}, "spacing_mm"),
        ({"fit": "stretch", "shape": 3}, "fit='stretch'"),
        ({"fit": "pad_crop"}, "needs a shape="),
        ({"shape": 3, "spacing_mm": 1.0}, "contradict each other"),
    ],
)
def test_resolutions_that_are_not_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Resolution(**options)
