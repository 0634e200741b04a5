from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lit_data.wings.gan.dataset import ViewLayout, read_layout
from lit_data.wings.gan.sample_set import (
    BACKGROUND,
    KINDS,
    Cameras,
    GANSampleSpec,
    cast_rays,
    draw_solid,
    render_views,
)

GROUND = round(BACKGROUND * 255)


def _views(number: int, *poses_deg: tuple[float, float], side: int = 32) -> Any:
    cameras = Cameras.at(np.radians(np.array(poses_deg)).astype(np.float32), (side, side))
    return render_views(draw_solid(0, number), cameras)


def test_cameras_look_at_the_origin_with_z_up() -> None:
    origins, directions = cast_rays(np.radians(np.array([[0, 0], [90, 30]], np.float32)), (5, 5))
    assert origins.dtype == directions.dtype == np.float32
    assert_allclose(np.linalg.norm(directions, axis=0), 1, rtol=1e-5)
    assert_allclose(origins[:, [0, 25]].T, [[4, 0, 0], [0, 4 * 0.75**0.5, 2]], atol=1e-5)
    middle = directions[:, [12, 37]]  # of each view
    assert_allclose(middle, -origins[:, [0, 25]] / 4, atol=1e-6)
    first = directions[:, :25].reshape(3, 5, 5)
    assert (np.diff(first[2], axis=0) < 0).all(), "up is z"
    assert (np.diff(first[1], axis=1) > 0).all(), "the right of a camera on the x axis is y"


@pytest.mark.parametrize("number", range(5), ids=KINDS)
def test_each_kind_is_seen_whole_and_in_two_colours(number: int) -> None:
    views = _views(number, (0, 20), (90, 20), (180, 20), side=48)
    assert views.shape == (3, 48, 48, 3)
    assert views.dtype == np.uint8
    covered = (np.abs(views.astype(int) - GROUND) > 8).any(-1)
    assert (covered.mean((1, 2)) > 0.08).all()
    border = np.concatenate([views[:, [0, -1]].reshape(-1, 3), views[:, :, [0, -1]].reshape(-1, 3)])
    assert (border == GROUND).all()
    solid = draw_solid(0, number)
    assert np.abs(solid.colours[0] - solid.colours[1]).max() > 0.1
    assert len(np.unique(views[covered] // 32, axis=0)) > 4
    assert (views[0] != views[2]).any()


def test_a_set_has_a_sheet_for_each_object(tmp_path: Path) -> None:
    options = {"count": 6, "size_px": (16, 12), "tiles": 3}
    root = GANSampleSpec(**options).ensure(tmp_path)
    files = sorted(root.rglob("*.png"))
    assert [path.relative_to(root).as_posix() for path in files] == [
        "test/ellipsoid/ellipsoid_0005.png",
        "train/box/box_0001.png",
        "train/cone/cone_0003.png",
        "train/cylinder/cylinder_0002.png",
        "train/ellipsoid/ellipsoid_0000.png",
        "val/torus/torus_0004.png",
    ]
    assert read_layout(root) == ViewLayout(views="sheet", tiles=3)
    sheet = cv2.imread(str(files[1]))[..., ::-1]
    assert sheet.shape == (48, 36, 3)
    cameras = Cameras.at(ViewLayout().poses(3), (16, 12))
    assert_array_equal(sheet[16:32, 24:], render_views(draw_solid(0, 1), cameras)[5])
