"""What happens to a stripe batch between the loader and the model: planned on the host, finished on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lit_data.augment import Augmentation, Layers, SingleTexture
from lit_data.datamodules.visuals import FamilyPreview, Visuals
from lit_data.datasets import StripeDataset
from lit_data.datasets.stripes.dataset import DefectWriter
from lit_data.datasets.stripes.device_bank import DevicePatches
from lit_data.datasets.stripes.layouts import ROLES
from lit_data.devices import divided
from lit_data.errors import ConfigError
from lit_data.synthesis import DefectPlan, DefectSpec, render, sample_plan
from lit_data.synthesis.families.base import Family
from lit_data.synthesis.touches import Annotations, annotate
from lit_data.synthesis.values import ValueRange
from lit_data.types import PlannedBatch, Stage

PLAN_KEY: Final = "plan"
"""Where a planned batch holds its `DefectPlan`, which moves to a device as tensors do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeTransform:
    """Cast to 0..1, spread to three channels, tell them apart, draw defects, augment; in this
    order.

    Args:
        values: Pixel values that become 0 and 1.
        read_px: (H, W) of a sample of each stage, with the margin that its augmentation needs.
        expand: For each of target, ref1, ref2 the stored channel that gives it.
        seed: Seed of every draw.
        synthesis: Defects for samples without a mask of their own.
        nuisance: What makes the channels of a single texture differ.
        augment: Augmentation of the samples of each stage that has one.
        is_single: The channels are those of one image, so every defect is true and in all of them.
    """

    values: ValueRange
    read_px: Mapping[Stage, tuple[int, int]]
    expand: tuple[int, ...]
    seed: int
    synthesis: DefectSpec | None
    nuisance: SingleTexture | None
    augment: Mapping[Stage, Augmentation]
    is_single: bool = False

    def plan(self, batch: PlannedBatch, stage: Stage) -> PlannedBatch:
        """Add the drawn numbers of each sample, from its own stream.

        Args:
            batch: A batch on the host, as the loader gives it.
            stage: The stage it is for.

        Returns:
            The batch with a few small tensors more.
        """
        index, epoch, channels = batch["index"].numpy(), int(batch["epoch"][0]), len(self.expand)
        if (
            self.synthesis
            and stage != "predict"
            and batch.keys().isdisjoint(("mask", "mask_index"))
        ):
            batch = self.add_plan(batch, stage)
        if self.nuisance:
            batch = batch | self.nuisance.draw(self.seed, epoch, index, channels)
        if stage in self.augment:
            batch = batch | self.augment[stage].draw(self.seed, epoch, index, channels)
        return batch

    def add_plan(self, batch: PlannedBatch, stage: Stage) -> PlannedBatch:
        """Add the defects of each sample to a batch, drawn yet or not."""
        if self.synthesis is None:
            return batch
        index, epoch, channels = batch["index"].numpy(), int(batch["epoch"][0]), len(self.expand)
        shape = (1 if self.is_single else channels, *self.read_px[stage])
        plan = sample_plan(self.synthesis, self.seed, epoch, index, shape)
        if self.is_single:
            plan = replace(plan, channels=np.ones((len(plan), channels), np.bool_))
        return batch | {PLAN_KEY: plan.to("cpu")}

    def finish(self, batch: PlannedBatch, stage: Stage) -> tuple[Tensor, Tensor | None]:
        """Do the work that was planned, on the device of the batch.

        Args:
            batch: A planned batch with its pixels.
            stage: The stage it was planned for.

        Returns:
            images: [B, 3, H, W] float32 in 0..1.
            masks: [B, 1, H, W] float32 in {0, 1}; none where nothing says what a defect is.
        """
        images, masks = self.draw(batch)
        if stage not in self.augment:
            return images, masks
        augmented = self.augment[stage].forward(Layers(images, masks), batch)
        return augmented.images, augmented.masks

    def draw(self, batch: PlannedBatch) -> tuple[Tensor, Tensor | None]:
        """What `finish` does before augmentation."""
        images, values = self.spread(batch["image"], batch)
        masks = batch["mask"].to(torch.float32) if "mask" in batch else None
        plan = self._plan_of(batch)
        if plan is not None:
            # Drawing is in place, and the pixels of the loader may be needed again.
            own = images.to(torch.float32, copy=images is batch["image"])
            images, drawn = render(own.contiguous(), plan, values)
            masks = drawn if masks is None else torch.where(masks > 0, masks, drawn)
        return to_unit(images, values), masks

    def spread(self, images: Tensor, batch: PlannedBatch) -> tuple[Tensor, ValueRange]:
        """Stored pixels as target and references, [B, 3, H, W], with their value range; told apart if need be."""
        if self.expand != tuple(range(images.shape[1])):
            if images.dtype is torch.uint16 and images.is_cuda:
                images = images.to(torch.float32)  # CUDA has few kernels for uint16
            images = torch.stack([images[:, channel] for channel in self.expand], dim=1)
        if self.nuisance:
            return self.nuisance.forward(to_unit(images, self.values), batch), ValueRange()
        return images, self.values

    def keeps_whole_values(self, stage: Stage) -> bool:
        """Whether finished samples are whole pixel values, only scaled."""
        return self.values.whole and self.nuisance is None and stage not in self.augment

    def build_writer(self) -> DefectWriter | None:
        """What workers draw defects with; none where they cannot, or nothing is drawn.

        They draw into stored pixels, so these must be whole numbers, and target and references as
        they are.
        """
        stored = (
            self.values.whole and self.nuisance is None and self.expand == tuple(range(len(ROLES)))
        )
        return (
            DefectWriter(self.synthesis, self.seed, self.values)
            if self.synthesis and stored
            else None
        )

    def annotate(
        self, clean: Tensor, batch: PlannedBatch, stage: Stage
    ) -> tuple[DefectPlan, Annotations] | None:
        """Where the defects of a planned batch end up, and how strong they are.

        Args:
            clean: [B, C, H, W], the stored pixels of the batch before anything was drawn.
            batch: The planned batch.
            stage: The stage it was planned for.

        Returns:
            The plan and its annotations, with labels as the model sees them; none for a batch
            without a plan.
        """
        plan = self._plan_of(batch)
        if plan is None:
            return None
        images, values = self.spread(clean, batch)
        found = annotate(images.contiguous(), plan, values)
        if stage in self.augment:
            layers = Layers(torch.zeros(found.labels.shape), found.labels)
            found = replace(
                found, labels=cast(Tensor, self.augment[stage].forward(layers, batch).masks)
            )
        return plan, found

    def describe_plan(self, batch: PlannedBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The defects planned for some samples of a batch, one dict each; places are those before
        augmentation.

        Args:
            batch: A planned batch on the host.
            rows: The samples in question.
        """
        whole = self._plan_of(batch)
        if whole is None:
            return []
        plan = whole.select(torch.isin(whole.row, torch.tensor(rows, dtype=torch.int64)))
        columns = {
            "index": batch["index"][plan.row].tolist(),
            "family": [plan.spec.members[number].name for number in plan.family.tolist()],
            "y": plan.y.tolist(),
            "x": plan.x.tolist(),
            "amplitude": [round(value, 4) for value in plan.amplitude.tolist()],
            "is_true": plan.is_true.tolist(),
            **{name: plan.channels[:, number].tolist() for number, name in enumerate(ROLES)},
            "parameters": [_describe_shape(plan, number) for number in range(len(plan))],
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _plan_of(self, batch: PlannedBatch) -> DefectPlan | None:
        plan: DefectPlan | None = batch.get(PLAN_KEY)
        return plan


def find_margins(
    augment: Mapping[Stage, Augmentation], patch_px: tuple[int, int]
) -> dict[Stage, tuple[int, int]]:
    """Pixels that patches of each stage are read larger by: what their augmentation needs if it crops to a patch."""
    margins: dict[Stage, tuple[int, int]] = dict.fromkeys(get_args(Stage), (0, 0))
    crops = {stage: step for stage, step in augment.items() if step.crop_px == patch_px}
    return margins | {stage: step.margin_px(patch_px) for stage, step in crops.items()}


def find_unit_range(
    dtype: "np.dtype[np.generic]", value_range: Sequence[float] | None
) -> ValueRange:
    """The pixel values that become 0 and 1.

    Args:
        dtype: Dtype of the pixels.
        value_range: (low, high), or none for the whole range of an unsigned dtype, and 0..1 for
            float32.

    Raises:
        ConfigError: low >= high, or the dtype has no natural range.
    """
    if value_range is not None:
        low, high = (float(value) for value in value_range)
        if not low < high:
            raise ConfigError(
                f"value_range={list(value_range)} must be [low, high] with low < high"
            )
        return ValueRange(low, high, whole=dtype.kind != "f")
    if dtype.kind == "u":
        return ValueRange(0.0, float(np.iinfo(dtype.name).max), whole=True)
    if dtype.kind == "f":
        return ValueRange()
    raise ConfigError(f"{dtype.name} pixels have no natural range: set data.value_range=[low,high]")


def to_unit(images: Tensor, values: ValueRange) -> Tensor:
    """[B, C, H, W] float32 in 0..1, in as few passes as the range allows: one where the dtype keeps within it."""
    if values == ValueRange():
        return images.to(torch.float32)
    if images.dtype == torch.uint8 and (values.low, values.high) == (0.0, 255.0):
        return divided(images, values.high)
    return images.to(torch.float32).sub(values.low).div_(values.scale).clamp_(0, 1)


def _describe_shape(plan: DefectPlan, number: int) -> str:
    """The parameters of one defect, ``name=value`` each."""
    names = plan.spec.members[int(plan.family[number])].parameters
    return " ".join(
        f"{name}={value:.4g}"
        for name, value in zip(names, plan.values[number].tolist(), strict=False)
    )


class PatchVisuals(Visuals):
    """See `Visuals`.

    Args:
        transformation: What is done with batches.
        stage: Whose samples.
    """

    def __init__(self, transformation: StripeTransform, stage: Stage) -> None:
        self._transformation, self._stage = transformation, stage

    @override
    def draw(self, batch: PlannedBatch) -> PlannedBatch | None:
        if self._stage not in self._transformation.augment:
            return None
        images, masks = self._transformation.draw(batch)
        return {"image": images} if masks is None else {"image": images, "mask": masks}


class StripeVisuals(PatchVisuals):
    """See `Visuals`.

    Args:
        dataset: The patches of the stage.
        transformation: What is done with them.
        pixels: Cuts what the dataset leaves out.
        stage: Which stage.
    """

    def __init__(
        self,
        dataset: StripeDataset,
        transformation: StripeTransform,
        pixels: DevicePatches,
        stage: Stage,
    ) -> None:
        super().__init__(transformation, stage)
        self._dataset, self._pixels = dataset, pixels

    @override
    def annotate(self, batch: PlannedBatch) -> tuple[DefectPlan, Annotations] | None:
        return self._transformation.annotate(
            self._cut_clean(batch), self._with_plan(batch), self._stage
        )

    @override
    def describe_plan(self, batch: PlannedBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        return self._transformation.describe_plan(self._with_plan(batch), rows)

    @override
    def draw(self, batch: PlannedBatch) -> PlannedBatch | None:
        return super().draw(self._with_pixels(batch))

    @override
    def preview_families(self, batch: PlannedBatch) -> list[FamilyPreview]:
        return _preview_families(self._transformation, self._cut_clean(batch), batch)

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        whole = self._transformation.keeps_whole_values(self._stage)
        return (self._dataset.bank.dtype.name, self._transformation.values) if whole else None

    def _with_plan(self, batch: PlannedBatch) -> PlannedBatch:
        return (
            self._transformation.add_plan(batch, self._stage)
            if self._dataset.defects is not None
            else batch
        )

    def _with_pixels(self, batch: PlannedBatch) -> PlannedBatch:
        return batch if "image" in batch else self._pixels.fill(batch, self._dataset)

    def _cut_clean(self, batch: PlannedBatch) -> Tensor:
        """Stored pixels without the defects that workers may have drawn: [B, C, H, W]."""
        if self._dataset.defects is None:
            images: Tensor = self._with_pixels(batch)["image"]
            return images
        return torch.from_numpy(
            self._dataset.cut(batch["image_index"].numpy(), batch["position"].numpy())
        )


def _preview_families(
    transformation: StripeTransform, clean: Tensor, batch: PlannedBatch
) -> list[FamilyPreview]:
    """Draw every family of a synthesis on the same patches.

    Args:
        transformation: With the synthesis.
        clean: [n, C, H, W], stored pixels of the patches.
        batch: Their indices and epoch.
    """
    spec = transformation.synthesis
    if spec is None:
        return []
    plain = replace(transformation, synthesis=None, augment={})
    undrawn = {key: value for key, value in batch.items() if key != PLAN_KEY}
    planned = plain.plan(undrawn, "train") | {"image": clean}
    return [_preview(plain, spec, family, planned) for family in spec.members]


def _preview(
    plain: StripeTransform, spec: DefectSpec, family: Family, batch: PlannedBatch
) -> FamilyPreview:
    alone = replace(spec, families=(family,), probability=1.0, count=(1, 1), true_count=(1, 1))
    clean = batch["image"]
    shape = (len(plain.expand), *clean.shape[-2:])
    plan = sample_plan(alone, plain.seed, int(batch["epoch"][0]), batch["index"].numpy(), shape).to(
        "cpu"
    )
    before, _ = plain.draw(batch | {"image": clean.clone()})
    after, masks = plain.draw(batch | {"image": clean.clone(), PLAN_KEY: plan})
    images, values = plain.spread(clean, batch)
    severity = annotate(images, plan, values).severity
    order = torch.argsort(plan.row)
    centre = torch.stack((plan.y, plan.x), dim=1)[order]
    return FamilyPreview(
        family.name, before[:, 0], after[:, 0], cast(Tensor, masks)[:, 0], severity[order], centre
    )
