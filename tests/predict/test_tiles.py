"""Where tiles lie, what counts of them, how far nets see, and the defects of a map."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.core.errors import ConfigError
from lit_data.predict import find_defects, measure_reach_px
from lit_data.predict.tiles import Tiling
from lit_inspect.tiles import Blend, TileAxis
from tests.predict.nets import REACH_PX, HalvingNet, make_net

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


def _sum_weights(axis: TileAxis) -> tuple[np.ndarray, np.ndarray]:
    """For each pixel the sum of its weights, and the least distance of a tile that counts from a seam-side border."""
    total = np.zeros(axis.length_px)
    distance = np.full(axis.length_px, 1000)
    last = len(axis.starts) - 1
    tiles = zip(axis.starts, axis.counted, axis.weights, strict=True)
    for tile, (start, kept, weights) in enumerate(tiles):
        places = np.arange(kept.start, kept.stop)
        total[start + places] += 1 if weights is None else weights
        left = places if tile else np.full_like(places, 1000)
        right = axis.tile_px - 1 - places if tile < last else np.full_like(places, 1000)
        distance[start + places] = np.minimum(distance[start + places], np.minimum(left, right))
    return total, distance


@pytest.mark.parametrize("blend", ["constant", "gaussian"])
@pytest.mark.parametrize(
    ("overlap", "margin", "multiple"), [(0, None, 1), (5, None, 1), (12, 3, 1), (8, 4, 4)]
)
def test_every_pixel_is_covered_once_in_sum(
    blend: Blend, overlap: int, margin: int | None, multiple: int
) -> None:
    tiling = Tiling(16, overlap, margin, blend, multiple)
    least = margin if margin is not None else overlap // (2 if blend == "constant" else 4)
    for length in (1, 15, 16, 17, 31, 100, 101, 257):
        axis, _ = tiling.plan(length, length)
        total, distance = _sum_weights(axis)
        np.testing.assert_allclose(total, 1, rtol=0, atol=1e-6)
        assert distance.min() >= least
        assert all(start % multiple == 0 for start in (*axis.starts, axis.tile_px))
        assert all(start + 16 - after >= overlap for start, after in pairwise(axis.starts))


def test_constant_takes_each_pixel_from_one_tile_as_far_from_seams_as_can_be() -> None:
    axis, _ = Tiling(10, 3).plan(24, 24)
    assert axis.starts == (0, 7, 14)
    assert axis.counted == (slice(0, 9), slice(2, 9), slice(2, 10))
    assert axis.weights == (None, None, None)


def test_a_short_side_has_a_short_tile_that_is_filled_as_far_as_is_asked_for() -> None:
    sides = [Tiling(32, 8).plan(length, 64)[0].tile_px for length in (1, 4, 9, 31, 32, 33)]
    assert sides == [4, 4, 12, 32, 32, 32]
    assert Tiling(32, 8, multiple_px=8).plan(9, 17)[0].tile_px == 16
    assert Tiling(32, 8, multiple_px=8, round_px=1).plan(9, 17)[0].tile_px == 9
    assert [axis.tile_px for axis in Tiling(32, 8, round_px=1).plan(9, 17)] == [9, 17]


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (lambda: Tiling(16, 16), "overlap_px=16 must be from 0 to 15"),
        (lambda: Tiling((16, 8), -1), "overlap_px=-1 must be from 0 to 7"),
        (lambda: Tiling(16, 10, multiple_px=8), "overlap_px=10 must be from 0 to 8"),
        (lambda: Tiling(16, 8, 5), "margin_px=5 must be from 0 to 4"),
        (lambda: Tiling(20, 8, multiple_px=8), "tile_px=20 is not a multiple of multiple_px=8"),
        (lambda: Tiling(16, 8, blend="mean"), "blend='mean' is unknown"),  # type: ignore[arg-type]
        (lambda: Tiling(16, 8, multiple_px=0), "need at least 1"),
        (lambda: Tiling(0, 0), "tile_px=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiling: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiling()  # type: ignore[operator]


class Mean(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images - images.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("net", "channels", "multiple", "reach"),
    [
        (make_net(), 1, 1, REACH_PX),
        (make_net(3), 3, 1, REACH_PX),
        (nn.Identity(), 2, 1, 0),
        (nn.Conv2d(1, 1, (1, 7), padding=(0, 3)), 1, 1, 3),
        (nn.Conv2d(1, 1, (7, 1), padding=(3, 0)), 1, 1, 3),
        (nn.MaxPool2d(5, 1, 2), 1, 1, 2),
        (HalvingNet(), 1, 2, 4),  # to the end of the next pair, and one
        (nn.Conv2d(1, 1, 17, padding=8), 1, 1, None),
        (Mean(), 1, 1, None),
    ],
)
def test_how_far_nets_see(net: nn.Module, channels: int, multiple: int, reach: int | None) -> None:
    with torch.inference_mode():
        assert measure_reach_px(net, channels, (16, 20), multiple_px=multiple) == reach


def test_regions_are_measured_and_sorted() -> None:
    probability = np.zeros((10, 12), np.float32)
    probability[1:3, 1:4] = 0.6
    probability[5, 5] = probability[6, 6] = 0.9
    probability[9, 11] = 0.7
    probability[0, 11] = 0.4
    defects = find_defects(probability, threshold=0.5)
    assert [(d.y, d.x, d.height_px, d.width_px, d.area_px) for d in defects] == [
        (5.5, 5.5, 2, 2, 2),
        (9.0, 11.0, 1, 1, 1),
        (1.5, 2.0, 2, 3, 6),
    ]
    assert [round(d.score, 3) for d in defects] == [0.9, 0.7, 0.6]
    assert len(find_defects(probability, threshold=0.5, min_area_px=2)) == 2
    assert find_defects(np.zeros((4, 4), np.float32)) == []
