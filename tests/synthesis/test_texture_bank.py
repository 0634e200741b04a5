from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.errors import DataError
from lit_data.synthesis.families.region import TEXTURE_PX, load_textures


@pytest.mark.parametrize("shape", [(300, 280), (256, 256), (40, 400), (1, 7)])
def test_textures_are_the_middles_of_images(tmp_path: Path, shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), image)
    (tile,) = load_textures(str(tmp_path))
    assert tile.shape == (TEXTURE_PX, TEXTURE_PX)
    assert abs(tile.mean()) < 1e-4
    assert tile.std() == pytest.approx(1, abs=1e-4)
    middle = image[tuple(slice(max(0, length - TEXTURE_PX) // 2, None) for length in shape)]
    pads = [(0, max(0, TEXTURE_PX - length)) for length in middle.shape]
    cut = np.pad(middle, pads, mode="reflect")[:TEXTURE_PX, :TEXTURE_PX].astype(np.float64)
    np.testing.assert_allclose(tile, (cut - cut.mean()) / cut.std(), atol=1e-4)


def test_a_flat_image_is_no_texture(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), np.full((20, 20), 9, np.uint8))
    assert not load_textures(str(tmp_path)).any()


def test_without_a_folder_it_is_smooth_noise() -> None:
    (tile,) = load_textures(None)
    assert abs(tile.mean()) < 0.1
    assert 0.9 < tile.std() < 1.1


def test_folders_without_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"textures_from=.*nowhere is not a folder"):
        load_textures(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no image matches"):
        load_textures(str(tmp_path))


@pytest.mark.data
def test_textures_of_real_images(shared_data: Path) -> None:
    assert len(load_textures(str(shared_data / "textures"))) == 3
