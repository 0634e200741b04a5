"""What happens to a stripe batch between the loader and the model: planned on the host, finished on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lit_data.augment import SingleTexture, StripeAugment
from lit_data.datasets.layouts import ROLES
from lit_data.errors import ConfigError
from lit_data.synthesis import DefectPlan, DefectSpec, render, sample_plan
from lit_data.types import Batch, Stage

_PLAN: Final = "plan_"


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeTransform:
    """Cast to 0..1, spread to three channels, tell them apart, draw defects, augment; in this order.

    Args:
        low: Pixel value that becomes 0.
        high: Pixel value that becomes 1.
        patch_px: (H, W) of a sample.
        expand: For each of target, ref1, ref2 the stored channel that gives it.
        seed: Seed of every draw.
        synthesis: Defects for samples without a mask of their own.
        nuisance: What makes the channels of a single texture differ.
        augment: Augmentation of training samples.
    """

    low: float
    high: float
    patch_px: tuple[int, int]
    expand: tuple[int, ...]
    seed: int
    synthesis: DefectSpec | None
    nuisance: SingleTexture | None
    augment: StripeAugment | None

    def plan(self, batch: Batch, stage: Stage) -> Batch:
        """Add the drawn numbers of each sample, from its own stream.

        Args:
            batch: A batch on the host, as the loader gives it.
            stage: The stage it is for.

        Returns:
            The batch with a few small tensors more.
        """
        index, epoch, channels = batch["index"].numpy(), int(batch["epoch"][0]), len(self.expand)
        if self.synthesis and stage != "predict" and batch.keys().isdisjoint(("mask", "mask_index")):
            plan = sample_plan(self.synthesis, self.seed, epoch, index, (channels, *self.patch_px))
            batch = batch | {_PLAN + name: torch.from_numpy(array) for name, array in plan.arrays().items()}
        if self.nuisance:
            batch = batch | self.nuisance.draw(self.seed, epoch, index, channels)
        if self.augment and stage == "train":
            batch = batch | self.augment.draw(self.seed, epoch, index, channels)
        return batch

    def finish(self, batch: Batch, stage: Stage) -> tuple[Tensor, Tensor | None]:
        """Do the work that was planned, on the device of the batch.

        Args:
            batch: A planned batch with its pixels.
            stage: The stage it was planned for.

        Returns:
            images: [B, 3, H, W] float32 in 0..1.
            masks: [B, 1, H, W] float32 in {0, 1}; none where nothing says what a defect is.
        """
        images = self._to_unit(batch["image"])
        if self.expand != tuple(range(images.shape[1])):
            images = images[:, list(self.expand)]
        if self.nuisance:
            images = self.nuisance.forward(images, batch)
        masks = batch["mask"].to(torch.float32) if "mask" in batch else None
        plan = self._plan_of(batch)
        if plan is not None:
            images, masks = render(images.contiguous(), plan)
        if self.augment and stage == "train":
            images, masks = self.augment.forward(images, masks, batch)
        return images, masks

    def mark_distractors(self, batch: Batch, stage: Stage) -> Tensor | None:
        """Where the distractors of a planned batch end up, for pictures.

        Returns:
            [B, 3, H, W] float32 in {0, 1}, for each image its own; none for a batch without a plan.
        """
        plan = self._plan_of(batch)
        if plan is None:
            return None
        size = (len(batch["index"]), len(self.expand), *self.patch_px)
        marks = torch.cat([_draw_marks(plan, channel, size) for channel in range(size[1])], dim=1)
        if self.augment and stage == "train":
            _, moved = self.augment.forward(torch.zeros(size), marks, batch)
            return moved
        return marks

    def describe_plan(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The defects planned for some samples of a batch, one dict each; places are those before augmentation.

        Args:
            batch: A planned batch on the host.
            rows: The samples in question.
        """
        whole = self._plan_of(batch)
        if whole is None:
            return []
        plan = _select(whole, torch.isin(whole.row, torch.tensor(rows, dtype=torch.int64)))
        index = batch["index"][plan.row]
        columns = {
            "index": index.tolist(),
            "y": plan.y.tolist(),
            "x": plan.x.tolist(),
            "height_px": [plan.spots[spot].height_px for spot in plan.spot.tolist()],
            "width_px": [plan.spots[spot].width_px for spot in plan.spot.tolist()],
            "amplitude": [round(value, 4) for value in plan.amplitude.tolist()],
            "is_true": plan.is_true.tolist(),
            **{name: plan.channels[:, number].tolist() for number, name in enumerate(ROLES)},
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _plan_of(self, batch: Batch) -> DefectPlan | None:
        arrays = {key.removeprefix(_PLAN): value for key, value in batch.items() if key.startswith(_PLAN)}
        return DefectPlan(spots=self.synthesis.spots, **arrays) if arrays and self.synthesis else None

    def _to_unit(self, images: Tensor) -> Tensor:
        images = images.to(torch.float32)
        if (self.low, self.high) == (0.0, 1.0):
            return images
        return images.sub_(self.low).div_(self.high - self.low).clamp_(0, 1)


def find_unit_range(dtype: "np.dtype[np.generic]", value_range: Sequence[float] | None) -> tuple[float, float]:
    """The pixel values that become 0 and 1.

    Args:
        dtype: Dtype of the pixels.
        value_range: (low, high), or none for the whole range of an unsigned dtype, and 0..1 for float32.

    Raises:
        ConfigError: low >= high, or the dtype has no natural range.
    """
    if value_range is not None:
        low, high = (float(value) for value in value_range)
        if not low < high:
            raise ConfigError(f"value_range={list(value_range)} must be [low, high] with low < high")
        return low, high
    if dtype.kind == "u":
        return 0.0, float(np.iinfo(dtype.name).max)
    if dtype.kind == "f":
        return 0.0, 1.0
    raise ConfigError(f"{dtype.name} pixels have no natural range: set data.value_range=[low,high]")


def _select(plan: DefectPlan, chosen: Tensor) -> DefectPlan:
    return replace(plan, **{name: array[chosen] for name, array in plan.arrays().items()})


def _draw_marks(plan: DefectPlan, channel: int, size: tuple[int, ...]) -> Tensor:
    """The windows of the distractors that one channel carries: [B, 1, H, W]."""
    distractors = _select(plan, ~plan.is_true & plan.channels[:, channel])
    return render(torch.zeros(size), replace(distractors, is_true=torch.ones_like(distractors.is_true)))[1]
