"""Scores of whole volumes: size and surface of each class, from labels joined from windows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_data.core.types import Array, Batch, Bytes, Spacing
from lit_data.wings.volumes.datasets.distance import Mask, find_box, measure_depth
from lit_data.wings.volumes.joined_windows import WindowBlend

VOLUME_SCORES = ("surface_dice", "hausdorff_95_mm", "volume_ml", "true_ml")
_MM3_PER_ML = 1000.0
_PERCENT = 95  # of the Hausdorff distance, whose maximum depends on a single voxel


class VolumeScores:
    """Means of the scores of `score_class` over volumes, computed from windows.

    The windows of a volume must be consecutive, in ascending order of z. Memory holds the predicted
    and true labels of one volume, and the probabilities of the slices of one window. Voxels in no
    window count as background in both.

    Args:
        classes: Names of the labels 1, 2, ...
        surface_mm: Distance up to which surfaces agree.
    """

    def __init__(self, classes: Sequence[str], surface_mm: float) -> None:
        self._classes = classes
        self._surface_mm = surface_mm
        self._rows: list[dict[str, Any]] = []
        self._volume: _OpenVolume | None = None

    def add(self, probabilities: Tensor, batch: Batch) -> None:
        """Add the windows of a batch.

        Args:
            probabilities: [B, K, D, H, W] of the background and of each class.
            batch: Batch with ``mask``, ``position``, ``volume_index``, ``shape`` and ``spacing``.
        """
        masks = batch["mask"][:, 0].to("cpu", torch.uint8).numpy()
        starts = batch["position"].tolist()
        for row, number in enumerate(batch["volume_index"].tolist()):
            if self._volume is None or self._volume.number != number:
                self._finish_volume()
                shape, spacing_mm = batch["shape"][row].tolist(), batch["spacing"][row].tolist()
                blend = WindowBlend(shape, masks.shape[1:], probabilities.shape[1])
                self._volume = _OpenVolume(
                    number, blend, np.zeros(shape, np.uint8), tuple(spacing_mm)
                )
            self._volume.add(probabilities[row].cpu().numpy(), masks[row], starts[row])

    def take(self) -> dict[str, float]:
        """Return `VOLUME_SCORES` by class and their means, and start over."""
        self._finish_volume()
        rows, self._rows = self._rows, []
        return average_scores(rows, self._classes, VOLUME_SCORES)

    def _finish_volume(self) -> None:
        if self._volume is None:
            return
        labels, true = self._volume.blend.finish(), self._volume.true
        for label, name in enumerate(self._classes, 1):
            scores = score_class(
                labels == label, true == label, self._volume.spacing_mm, self._surface_mm
            )
            self._rows.append({"class": name, **scores})
        self._volume = None


class _OpenVolume(NamedTuple):
    """A volume with windows still to come."""

    number: int
    blend: WindowBlend
    true: Bytes
    spacing_mm: Spacing

    def add(self, probability: Array, mask: Bytes, start: Sequence[int]) -> None:
        """Add a window, [K, D, H, W] and [D, H, W], at (z, y, x); it may reach past the volume."""
        self.blend.add(probability, start)
        z, y, x = start
        depth, height, width = mask.shape
        inside = self.true[z : z + depth, y : y + height, x : x + width]
        inside[...] = mask[tuple(map(slice, inside.shape))]


def score_class(
    predicted: Mask,
    true: Mask | None,
    spacing_mm: Spacing,
    tolerance_mm: float,
) -> dict[str, float]:
    """Return size and scores of one class of one volume.

    Args:
        predicted: [Z, Y, X].
        true: [Z, Y, X]; None without labels.
        spacing_mm: (z, y, x) between voxel centers.
        tolerance_mm: Distance up to which surfaces agree.

    Returns:
        ``voxels`` and ``volume_ml``; with labels also ``true_ml``, ``dice``, and ``surface_dice``
        and ``hausdorff_95_mm`` of `score_surfaces`. Dice needs a voxel in at least one mask, and
        surfaces need one in both; otherwise these scores are missing.

    Raises:
        ConfigError: The package edt is not installed.
    """
    voxel_ml = math.prod(spacing_mm) / _MM3_PER_ML
    count = int(predicted.sum())
    scores: dict[str, float] = {"voxels": count, "volume_ml": count * voxel_ml}
    if true is None:
        return scores
    true_count = int(true.sum())
    scores["true_ml"] = true_count * voxel_ml
    if count + true_count:
        scores["dice"] = 2 * int((predicted & true).sum()) / (count + true_count)
    surfaces = score_surfaces(predicted, true, spacing_mm, tolerance_mm)
    if surfaces is not None:
        scores["surface_dice"] = surfaces.dice
        scores["hausdorff_95_mm"] = surfaces.hausdorff_95_mm
    return scores


def average_scores(
    rows: Sequence[Mapping[str, Any]], classes: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """Return the mean of each score over volumes, ``NAME_CLASS``, and the mean over classes, ``mean_NAME``.

    Args:
        rows: One row for each class of each volume, with the name of the class as ``class``, and
            its scores.
        classes: Names of the classes.
        names: Names of the scores.
    """
    means: dict[str, float] = {}
    for name in names:
        means_of_classes = []
        for class_name in classes:
            values = [row[name] for row in rows if row["class"] == class_name and name in row]
            if values:
                means_of_classes.append(float(np.mean(values)))
                means[f"{name}_{class_name}"] = means_of_classes[-1]
        if means_of_classes:
            means[f"mean_{name}"] = float(np.mean(means_of_classes))
    return means


class SurfaceScores(NamedTuple):
    """Scores of one class of one volume.

    Attributes:
        dice: Surface Dice, 0..1: the fraction of both surfaces within the tolerance of the other
            one (Nikolov et al., "Deep learning to achieve clinically applicable segmentation",
            2018).
        hausdorff_95_mm: 95th percentile of the distances of surface voxels to the other surface;
            the larger of the two directions.
    """

    dice: float
    hausdorff_95_mm: float


def score_surfaces(
    predicted: Mask, true: Mask, spacing_mm: Spacing, tolerance_mm: float
) -> SurfaceScores | None:
    """Compare the surfaces of two masks, like ``compute_surface_dice`` and ``compute_hausdorff_distance`` of MONAI.

    A voxel is on the surface if one of its six neighbors is not in the mask.

    Args:
        predicted: [Z, Y, X].
        true: [Z, Y, X].
        spacing_mm: (z, y, x) between voxel centers.
        tolerance_mm: Distance up to which surfaces agree.

    Returns:
        Scores; None if one of the masks is empty, because it has no surface.

    Raises:
        ConfigError: The package edt is not installed.
    """
    if not predicted.any() or not true.any():
        return None
    # Nothing outside of both masks changes a distance between them.
    box = find_box(predicted | true)
    surfaces = find_surface(predicted[box]), find_surface(true[box])
    near, total, farthest_mm = 0, 0, 0.0
    # One direction after the other, because the distances of a volume take four bytes a voxel.
    for surface, other in (surfaces, reversed(surfaces)):
        distances_mm = measure_depth(~other, spacing_mm, np.inf)[surface]
        near += int((distances_mm <= tolerance_mm).sum())
        total += len(distances_mm)
        farthest_mm = max(farthest_mm, float(np.percentile(distances_mm, _PERCENT)))
    return SurfaceScores(near / total, farthest_mm)


def find_surface(mask: Mask) -> Mask:
    """Return the voxels of a mask with a neighbor outside of it; everything beyond the array is outside."""
    inside = mask.copy()
    for axis in range(3):
        forward = np.moveaxis(inside, axis, 0)
        source = np.moveaxis(mask, axis, 0)
        forward[1:] &= source[:-1]
        forward[:-1] &= source[1:]
        forward[0] = False
        forward[-1] = False
    return mask & ~inside
