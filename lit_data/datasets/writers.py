"""Synthetic defects that workers draw into patches, see `lit_data.datasets.patches.PatchWriter`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lit_data.core.types import Array, FieldSpec, Ints, Size
from lit_data.core.value_range import ValueRange
from lit_data.synthesis import DefectSpec, sample_plan
from lit_data.synthesis.renderer import draw, draw_spots


@dataclass(frozen=True, slots=True)
class DefectWriter:
    """Defects of patches of an integer dtype; the same as drawn on the device, to the byte.

    Samples hold ``mask`` [1, h, w] uint8.

    Args:
        spec: The distribution.
        seed: 0 <= seed < 2**64.
        values: Value range of the pixels, of whole numbers.
    """

    spec: DefectSpec
    seed: int
    values: ValueRange

    def describe(self, size_px: Size) -> Mapping[str, FieldSpec]:
        """Return the fields that samples of (height, width) hold beside ``image``."""
        return {"mask": FieldSpec((1, *size_px), "uint8")}

    def write_into(self, rows: Mapping[str, Array], index: Ints, epoch: int) -> None:
        """Draw into ``image`` and ``mask`` of samples, by the numbers of their random streams."""
        images, masks = rows["image"], rows["mask"]
        plan = sample_plan(self.spec, self.seed, epoch, index, images.shape[1:])
        masks[...] = 0  # rows are used again from batch to batch
        if self.spec.has_plain_spots_only:
            draw_spots(images, masks, plan, self.values)
        else:
            draw(torch.from_numpy(images), torch.from_numpy(masks), plan, self.values)
