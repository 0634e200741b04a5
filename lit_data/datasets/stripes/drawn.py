"""Defects that a worker draws while it writes samples."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lit_data.synthesis import DefectSpec, sample_plan
from lit_data.synthesis.drawing import draw_spots
from lit_data.synthesis.renderer import draw
from lit_data.synthesis.values import ValueRange
from lit_data.types import Array


@dataclass(frozen=True, slots=True)
class DefectWriter:
    """Draws each sample's defects into its row; the same as drawn on the device, to the byte.

    Args:
        spec: The distribution.
        seed: 0 <= seed < 2**64.
        values: Value range of the pixels, of whole numbers.
    """

    spec: DefectSpec
    seed: int
    values: ValueRange

    def write_into(self, images: Array, masks: Array, index: NDArray[np.int64], epoch: int) -> None:
        """Draw.

        Args:
            images: [M, C, H, W] written samples of an integer dtype, changed in place.
            masks: [M, 1, H, W] uint8, written.
            index: [M] numbers of the samples' random streams.
            epoch: The epoch they are drawn for.
        """
        plan = sample_plan(self.spec, self.seed, epoch, index, images.shape[1:])
        masks[...] = 0
        if self.spec.has_plain_spots_only:
            draw_spots(images, masks, plan, self.values)
        else:
            draw(torch.from_numpy(images), torch.from_numpy(masks), plan, self.values)
