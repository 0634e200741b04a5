"""What there is to say about stripe samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lit_data.datamodules.inspection import FamilyPreview, Inspection
from lit_data.datamodules.stripe_transform import PLAN_KEY, StripeTransform
from lit_data.datasets import StripeDataset
from lit_data.datasets.device_bank import DevicePatches
from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan
from lit_data.synthesis.annotation import Annotations, annotate
from lit_data.synthesis.families.base import Family
from lit_data.synthesis.values import ValueRange
from lit_data.types import PlannedBatch, Stage


class StripeInspection(Inspection):
    """See `Inspection`.

    Args:
        dataset: The patches of the stage.
        transformation: What is done with them.
        pixels: Cuts what the dataset leaves out.
        stage: Which stage.
    """

    def __init__(
        self, dataset: StripeDataset, transformation: StripeTransform, pixels: DevicePatches, stage: Stage
    ) -> None:
        self._dataset, self._transformation, self._pixels, self._stage = dataset, transformation, pixels, stage

    @override
    def annotate(self, batch: PlannedBatch) -> tuple[DefectPlan, Annotations] | None:
        return self._transformation.annotate(self._cut_clean(batch), self._with_plan(batch), self._stage)

    @override
    def describe_plan(self, batch: PlannedBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        return self._transformation.describe_plan(self._with_plan(batch), rows)

    @override
    def draw(self, batch: PlannedBatch) -> PlannedBatch | None:
        if self._stage not in self._transformation.augment:
            return None
        images, masks = self._transformation.draw(self._with_pixels(batch))
        return {"image": images} if masks is None else {"image": images, "mask": masks}

    @override
    def preview_families(self, batch: PlannedBatch) -> list[FamilyPreview]:
        return _preview_families(self._transformation, self._cut_clean(batch), batch)

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        whole = self._transformation.keeps_whole_values(self._stage)
        return (self._dataset.bank.dtype.name, self._transformation.values) if whole else None

    def _with_plan(self, batch: PlannedBatch) -> PlannedBatch:
        return self._transformation.add_plan(batch, self._stage) if self._dataset.defects is not None else batch

    def _with_pixels(self, batch: PlannedBatch) -> PlannedBatch:
        return batch if "image" in batch else self._pixels.fill(batch, self._dataset)

    def _cut_clean(self, batch: PlannedBatch) -> Tensor:
        """Stored pixels without the defects that workers may have drawn: [B, C, H, W]."""
        if self._dataset.defects is None:
            images: Tensor = self._with_pixels(batch)["image"]
            return images
        return torch.from_numpy(self._dataset.cut(batch["image_index"].numpy(), batch["position"].numpy()))


def _preview_families(transformation: StripeTransform, clean: Tensor, batch: PlannedBatch) -> list[FamilyPreview]:
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


def _preview(plain: StripeTransform, spec: DefectSpec, family: Family, batch: PlannedBatch) -> FamilyPreview:
    alone = replace(spec, families=(family,), probability=1.0, count=(1, 1), true_count=(1, 1))
    clean = batch["image"]
    shape = (len(plain.expand), *clean.shape[-2:])
    plan = sample_plan(alone, plain.seed, int(batch["epoch"][0]), batch["index"].numpy(), shape).to("cpu")
    before, _ = plain.draw(batch | {"image": clean.clone()})
    after, masks = plain.draw(batch | {"image": clean.clone(), PLAN_KEY: plan})
    images, values = plain.spread(clean, batch)
    severity = annotate(images, plan, values).severity
    order = torch.argsort(plan.row)
    centre = torch.stack((plan.y, plan.x), dim=1)[order]
    return FamilyPreview(family.name, before[:, 0], after[:, 0], cast(Tensor, masks)[:, 0], severity[order], centre)
