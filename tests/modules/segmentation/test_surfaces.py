"""Scores of surfaces against figures of MONAI 1.6.1.

They are those of ``compute_surface_dice(..., [1.0], include_background=True)`` and of
``compute_hausdorff_distance(..., include_background=True, percentile=95)`` with the same spacing.
"""

import numpy as np
import pytest

from lit_data.datasets.ct.distance import Mask
from lit_data.modules.segmentation.volumes import find_surface, score_surfaces

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
