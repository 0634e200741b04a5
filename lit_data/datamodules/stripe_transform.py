"""What happens to a stripe batch between the loader and the model: planned on the host, finished on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lit_data.augment import SingleTexture, StripeAugment
from lit_data.datasets.drawn import DefectWriter
from lit_data.datasets.layouts import ROLES
from lit_data.errors import ConfigError
from lit_data.synthesis import DefectPlan, DefectSpec, render, sample_plan
from lit_data.synthesis.values import ValueRange
from lit_data.types import Batch, Stage

Backend = Literal["auto", "cpu", "device"]
_PLAN: Final = "plan_"


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeTransform:
    """Cast to 0..1, spread to three channels, tell them apart, draw defects, augment; in this order.

    Args:
        values: Pixel values that become 0 and 1.
        patch_px: (H, W) of a sample.
        expand: For each of target, ref1, ref2 the stored channel that gives it.
        seed: Seed of every draw.
        synthesis: Defects for samples without a mask of their own.
        nuisance: What makes the channels of a single texture differ.
        augment: Augmentation of training samples.
    """

    values: ValueRange
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
            batch = self.add_plan(batch)
        if self.nuisance:
            batch = batch | self.nuisance.draw(self.seed, epoch, index, channels)
        if self.augment and stage == "train":
            batch = batch | self.augment.draw(self.seed, epoch, index, channels)
        return batch

    def add_plan(self, batch: Batch) -> Batch:
        """Add the defects of each sample to a batch, drawn yet or not."""
        if self.synthesis is None:
            return batch
        index, epoch = batch["index"].numpy(), int(batch["epoch"][0])
        plan = sample_plan(self.synthesis, self.seed, epoch, index, (len(self.expand), *self.patch_px))
        return batch | {_PLAN + name: torch.from_numpy(array) for name, array in plan.arrays().items()}

    def finish(self, batch: Batch, stage: Stage) -> tuple[Tensor, Tensor | None]:
        """Do the work that was planned, on the device of the batch.

        Args:
            batch: A planned batch with its pixels.
            stage: The stage it was planned for.

        Returns:
            images: [B, 3, H, W] float32 in 0..1.
            masks: [B, 1, H, W] float32 in {0, 1}; none where nothing says what a defect is.
        """
        images, values = batch["image"], self.values
        if self.expand != tuple(range(images.shape[1])):
            images = images[:, list(self.expand)]
        if self.nuisance:
            images, values = self.nuisance.forward(_to_unit(images, values), batch), ValueRange()
        masks = batch["mask"].to(torch.float32) if "mask" in batch else None
        plan = self._plan_of(batch)
        if plan is not None:
            images, masks = render(images.to(torch.float32).contiguous(), plan, values)
        images = _to_unit(images, values)
        if self.augment and stage == "train":
            images, masks = self.augment.forward(images, masks, batch)
        return images, masks

    def choose_writer(self, backend: Backend, *, pixels: bool) -> DefectWriter | None:
        """Who draws the defects of a dataset: its workers, or nobody before the batch is on the device.

        Args:
            backend: As configured.
            pixels: Whether the dataset holds pixels at all.

        Raises:
            ConfigError: Workers shall draw and cannot.
        """
        stored = self.values.whole and self.nuisance is None and self.expand == tuple(range(len(ROLES)))
        if backend == "cpu" and not (stored and pixels):
            raise ConfigError(
                "backend=cpu draws into stored pixels: it needs an integer dtype, three stored channels (layouts "
                "channels and files) and pixels on the host (not cache=device). Set data.backend=auto"
            )
        chosen = backend == "cpu" or (backend == "auto" and not torch.cuda.is_available())
        if self.synthesis is None or not (chosen and stored and pixels):
            return None
        return DefectWriter(self.synthesis, self.seed, self.values)

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


def check_backend(backend: str) -> None:
    """Refuse an unknown one.

    Raises:
        ConfigError: It is none of `Backend`.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend={backend!r} is unknown: choose one of {', '.join(get_args(Backend))}")


def find_unit_range(dtype: "np.dtype[np.generic]", value_range: Sequence[float] | None) -> ValueRange:
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
        return ValueRange(low, high, whole=dtype.kind != "f")
    if dtype.kind == "u":
        return ValueRange(0.0, float(np.iinfo(dtype.name).max), whole=True)
    if dtype.kind == "f":
        return ValueRange()
    raise ConfigError(f"{dtype.name} pixels have no natural range: set data.value_range=[low,high]")


def _to_unit(images: Tensor, values: ValueRange) -> Tensor:
    """[B, C, H, W] float32 in 0..1, in as few passes as the range allows: one where the dtype keeps within it."""
    if values == ValueRange():
        return images.to(torch.float32)
    if images.dtype == torch.uint8 and (values.low, values.high) == (0.0, 255.0):
        return torch.div(images, values.high)  # casts on the way
    return images.to(torch.float32).sub(values.low).div_(values.scale).clamp_(0, 1)


def _select(plan: DefectPlan, chosen: Tensor) -> DefectPlan:
    return replace(plan, **{name: array[chosen] for name, array in plan.arrays().items()})


def _draw_marks(plan: DefectPlan, channel: int, size: tuple[int, ...]) -> Tensor:
    """The windows of the distractors that one channel carries: [B, 1, H, W]."""
    distractors = _select(plan, ~plan.is_true & plan.channels[:, channel])
    return render(torch.zeros(size), replace(distractors, is_true=torch.ones_like(distractors.is_true)))[1]
