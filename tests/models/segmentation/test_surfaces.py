"""Scores of surfaces against figures of MONAI 1.6.1.

They are those of ``compute_surface_dice(..., [1.0], include_background=True)`` and of
``compute_hausdorff_distance(..., include_background=True, percentile=95)`` with the same spacing.
"""

import numpy as np
import pytest
import torch

from lit_data.wings.volumes.datasets.distance import Mask
from lit_data.wings.volumes.datasets.windows import WindowGrid
from lit_data.wings.volumes.scores import VolumeScores, find_surface, score_surfaces

SHAPE = (12, 16, 20)
FINE, COARSE = (1.0, 1.0, 1.0), (3.0, 0.8, 0.7)


def _masks(case: str) -> tuple[Mask, Mask]:
    z, y, x = np.indices(SHAPE)
    first, second = np.zeros(SHAPE, bool), np.zeros(SHAPE, bool)
    if case == "balls":
        first = (z - 5) ** 2 + (y - 7) ** 2 + (x - 9) ** 2 < 20
        second = (z - 6) ** 2 + (y - 8) ** 2 + (x - 12) ** 2 < 16
    elif case == "edge":  # of the volume, and a voxel far away
        first[:5, :6, :7] = True
        second[:4, :8, :5] = True
        second[8, 12, 15] = True
    else:
        first[3:9, 4, 5] = True
        second[2:7, 6, 5:9] = True
    return first, second


@pytest.mark.parametrize(
    ("case", "spacing_mm", "dice", "hausdorff_mm"),
    [
        ("balls", FINE, 0.40312498807907104, 3.7416574954986572),
        ("balls", COARSE, 0.3375000059604645, 4.161596298217773),
        ("edge", FINE, 0.7854545712471008, 2.0),
        ("edge", COARSE, 0.6399999856948853, 3.0805842876434326),
        ("line", FINE, 0.0, 3.612356424331665),
        ("line", COARSE, 0.0, 5.5072526931762695),
    ],
)
def test_scores_are_those_of_monai(
    case: str, spacing_mm: tuple[float, float, float], dice: float, hausdorff_mm: float
) -> None:
    pytest.importorskip("edt")
    scores = score_surfaces(*_masks(case), spacing_mm, 1.0)
    assert scores is not None
    assert scores.dice == pytest.approx(dice, abs=1e-6)
    assert scores.hausdorff_95_mm == pytest.approx(hausdorff_mm, abs=1e-5)


def test_a_mask_without_voxels_has_no_surface() -> None:
    mask, empty = np.ones((2, 3, 4), bool), np.zeros((2, 3, 4), bool)
    assert score_surfaces(mask, empty, FINE, 1.0) is None
    assert score_surfaces(empty, mask, FINE, 1.0) is None
    assert find_surface(np.ones((3, 3, 3), bool)).sum() == 26


def _cut(mask: Mask, start: list[int], sides: tuple[int, int, int]) -> Mask:
    """Cut a window, which is true where it reaches past the mask."""
    padded = np.pad(mask, 16, constant_values=True)
    z, y, x = (position + 16 for position in start)
    depth, height, width = sides
    return padded[z : z + depth, y : y + height, x : x + width]


def test_windows_are_joined_to_volumes_that_are_scored_class_by_class() -> None:
    pytest.importorskip("edt")
    cases, sides = ("balls", "edge"), (4, 24, 8)
    grid = WindowGrid([SHAPE] * 2, sides, (4, 24, 6))
    volumes, starts = grid.locate(np.arange(len(grid)))
    scores = VolumeScores(("organ", "never"), 1.0)
    for begin in range(0, len(grid), 4):  # the windows of both volumes lie in one of the batches
        rows = slice(begin, begin + 4)
        predicted, true = [], []
        for volume, start in zip(volumes[rows].tolist(), starts[rows].tolist(), strict=True):
            first, second = _masks(cases[volume])
            predicted.append(_cut(first, start, sides))
            true.append(_cut(second, start, sides))
        count = len(true)
        batch = {
            "mask": torch.from_numpy(np.stack(true)[:, None]).long(),
            "position": torch.from_numpy(starts[rows]),
            "volume_index": torch.from_numpy(volumes[rows]) + 3,
            "shape": torch.tensor([SHAPE] * count),
            "spacing": torch.tensor([COARSE] * count),
        }
        is_organ = np.stack(predicted)
        parts = np.stack((~is_organ, is_organ, np.zeros_like(is_organ)), axis=1)
        scores.add(torch.from_numpy(parts).float(), batch)
    means = scores.take()
    # Means of the figures of MONAI above.
    assert means["surface_dice_organ"] == pytest.approx((0.3375 + 0.64) / 2, abs=1e-6)
    assert means["hausdorff_95_mm_organ"] == pytest.approx((4.1615963 + 3.0805843) / 2, abs=1e-5)
    assert means["mean_surface_dice"] == means["surface_dice_organ"]
    assert "surface_dice_never" not in means
    voxel_ml = 3.0 * 0.8 * 0.7 / 1000
    for name, number in (("volume_ml", 0), ("true_ml", 1)):
        voxels = sum(int(_masks(case)[number].sum()) for case in cases)
        assert means[f"{name}_organ"] == pytest.approx(voxels / 2 * voxel_ml, rel=1e-6)
        assert means[f"{name}_never"] == 0
        assert means[f"mean_{name}"] == pytest.approx(voxels / 4 * voxel_ml, rel=1e-6)
    assert scores.take() == {}
