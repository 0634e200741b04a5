"""Scores of the surface of a segmented volume: surface Dice and the 95 % Hausdorff distance."""

from typing import Final, NamedTuple

import numpy as np

from lit_data.datasets.ct.distance import Mask, find_box, measure_depth

_PERCENT: Final = 95


class SurfaceScores(NamedTuple):
    """Scores of one class of one volume.

    Attributes:
        dice: Surface Dice, 0..1: the fraction of both surfaces that lies within the tolerance of
            the other one (Nikolov et al., "Deep learning to achieve clinically applicable
            segmentation", 2018).
        hausdorff_95_mm: The larger one of the two directions' 95th percentile of the distances of
            surface voxels to the other surface.
    """

    dice: float
    hausdorff_95_mm: float


def score_surfaces(
    predicted: Mask, true: Mask, spacing_mm: tuple[float, float, float], tolerance_mm: float
) -> SurfaceScores | None:
    """Compare the surfaces of two masks, as ``compute_surface_dice`` and ``compute_hausdorff_distance`` of MONAI do.

    A voxel is of the surface if one of its six neighbours is not of the mask.

    Args:
        predicted: [Z, Y, X].
        true: [Z, Y, X].
        spacing_mm: (z, y, x) between voxel centres.
        tolerance_mm: Distance up to which surfaces agree.

    Returns:
        None where one of the masks is empty, which has no surface.

    Raises:
        ConfigError: The package edt is not installed.
    """
    if not predicted.any() or not true.any():
        return None
    # Nothing outside of both masks changes a distance between them.
    box = find_box(predicted | true)
    surfaces = find_surface(predicted[box]), find_surface(true[box])
    near, total, farthest_mm = 0, 0, 0.0
    # One direction after the other: the distances of a volume take four bytes a voxel.
    for surface, other in (surfaces, reversed(surfaces)):
        distances_mm = measure_depth(~other, spacing_mm, np.inf)[surface]
        near += int((distances_mm <= tolerance_mm).sum())
        total += len(distances_mm)
        farthest_mm = max(farthest_mm, float(np.percentile(distances_mm, _PERCENT)))
    return SurfaceScores(near / total, farthest_mm)


def find_surface(mask: Mask) -> Mask:
    """Return the voxels of a mask that have a neighbour outside of it; beyond the array all is."""
    inside = mask.copy()
    for axis in range(3):
        forward = np.moveaxis(inside, axis, 0)
        source = np.moveaxis(mask, axis, 0)
        forward[1:] &= source[:-1]
        forward[:-1] &= source[1:]
        forward[0] = False
        forward[-1] = False
    return mask & ~inside
