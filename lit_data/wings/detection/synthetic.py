"""Synthetic defects on the samples of a detector, with their boxes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.mosaic import MosaicPlan
from lit_data.core.types import Array, Bools, Floats, Ints
from lit_data.core.value_range import ValueRange
from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan
from lit_data.synthesis.renderer import draw_boxes


@dataclass(frozen=True, slots=True)
class SyntheticObjects:
    """Synthetic defects of samples, a pure function of (seed, epoch, stream of the sample).

    Args:
        spec: Distribution of the defects.
        classes: [families] class of the defects of each family.
        seed: 0 <= seed < 2**64.
        values: Value range of the pixels.
    """

    spec: DefectSpec
    classes: Ints
    seed: int
    values: ValueRange

    @classmethod
    def of(
        cls,
        spec: DefectSpec,
        synthetic_class: str | Mapping[str, str] | None,
        classes: Sequence[str],
        *,
        seed: int,
        values: ValueRange,
    ) -> Self:
        """Assign classes to the families of a specification.

        Args:
            spec: Distribution of the defects.
            synthetic_class: Class of all families, or a mapping from names of families, which
                excludes all others, to their classes; None if there is only one class.
            classes: Names of the classes, in the order of their numbers.
            seed: 0 <= seed < 2**64.
            values: Value range of the pixels.

        Raises:
            ConfigError: A class or family is unknown, or the class cannot be chosen automatically.
        """
        names = [family.name for family in spec.members]
        if synthetic_class is None:
            if len(classes) > 1:
                raise ConfigError(
                    "synthetic_class=null does not set the class of synthetic defects: choose "
                    f"one of {', '.join(classes)}, or give {{family: class}}"
                )
            synthetic_class = classes[0]
        if isinstance(synthetic_class, str):
            synthetic_class = dict.fromkeys(names, synthetic_class)
        for family, name in synthetic_class.items():
            check_choice("synthetic_class: family", family, names)
            check_choice("synthetic_class", name, classes)
        members = [family for family in spec.members if family.name in synthetic_class]
        numbers = [classes.index(synthetic_class[family.name]) for family in members]
        return cls(replace(spec, families=tuple(members)), np.array(numbers), seed, values)

    @property
    def most(self) -> int:
        """Maximum number of defects of a sample."""
        return min(self.spec.count[1], self.spec.true_count[1])

    def draw(self, images: Array, tiles: MosaicPlan, streams: Ints, epoch: int) -> Floats:
        """Draw defects into samples; none has its center on the gray around the tiles.

        Args:
            images: [M, C, H, W] uint8, uint16 or float32; changed in place.
            tiles: Tiles of the samples.
            streams: [M] numbers of the samples' random streams.
            epoch: Epoch of the samples.

        Returns:
            [K, 6] (row, class, cx, cy, w, h), the last four in fractions of H and W: a box around
            the pixels that show each defect; defects that change no pixel have none.
        """
        _, channels, height, width = images.shape
        planned = sample_plan(self.spec, self.seed, epoch, streams, (1, height, width))
        defects = planned.select(_find_centres(planned, tiles))
        if not len(defects):
            return np.zeros((0, 6), np.float32)
        # A defect of a single image is planned for one channel, and then drawn in all of them.
        defects = replace(defects, channels=np.ones((len(defects), channels), np.bool_))
        edges = draw_boxes(torch.from_numpy(images), defects, self.values).numpy()
        is_seen = edges[:, 2] > 0
        fractions = edges[is_seen] / np.array([width, height] * 2)
        low, high = fractions[:, :2], fractions[:, 2:]
        rows = defects.row[is_seen, None]
        numbers = self.classes[defects.family[is_seen], None]
        return np.hstack((rows, numbers, (low + high) / 2, high - low)).astype(np.float32)


def check_synthesis(
    spec: object, synthetic_class: str | Mapping[str, str] | None, *, mosaics_on_device: bool
) -> None:
    """Refuse synthetic defects that cannot be drawn, and options without an effect.

    Raises:
        ConfigError: The options cannot be combined.
    """
    if spec is None:
        if synthetic_class is not None:
            raise ConfigError(
                f"synthetic_class={synthetic_class!r} is for synthetic defects: set "
                "synthesis=library, or remove it"
            )
        return
    if not isinstance(spec, DefectSpec):
        raise ConfigError(
            f"synthesis is a {type(spec).__name__}, which draws no defects: set synthesis=library"
        )
    if mosaics_on_device:
        raise ConfigError(
            "mosaic_on=device makes mosaics after the workers, which draw synthetic defects: "
            "set mosaic_on=worker, or mosaic=null"
        )


def _find_centres(defects: DefectPlan, tiles: MosaicPlan) -> Bools:
    """Mark the defects whose center lies on a tile of their sample: [N]."""
    y, x = defects.y[:, None], defects.x[:, None]
    top, left, bottom, right = tiles.window.T
    is_inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    on_tile: Bools = (is_inside & (tiles.row == defects.row[:, None])).any(1)
    return on_tile
