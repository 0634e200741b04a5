"""Pictures of samples with synthetic defects: the plan, its positions, and each family alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lit_data.core.types import PlannedBatch
from lit_data.core.value_range import ValueRange
from lit_data.datamodules.image_batch import PLAN_KEY, ImageTransform
from lit_data.datamodules.visuals import FamilyPreview, Visuals
from lit_data.datasets.device_bank import DevicePatches
from lit_data.datasets.patches import PatchDataset
from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan
from lit_data.synthesis.families.base import Family
from lit_data.synthesis.renderer import Annotations, annotate


class SynthesisVisuals(Visuals):
    """Pictures of samples with synthetic defects or watermarks; see `Visuals`.

    Args:
        dataset: Patches of the stage.
        transformation: Transform of their batches.
        synthesis: The defects, wherever they are drawn; None without any.
        pixels: Cuts the pixels for a dataset without pixels.
    """

    def __init__(
        self,
        dataset: PatchDataset,
        transformation: ImageTransform,
        synthesis: DefectSpec | None,
        pixels: DevicePatches,
    ) -> None:
        super().__init__(None if transformation.augment is None else transformation.draw)
        self._dataset = dataset
        self._transformation = transformation
        self._synthesis = synthesis
        self._pixels = pixels

    @override
    def annotate(self, batch: PlannedBatch) -> tuple[DefectPlan, Annotations] | None:
        planned = self._with_plan(batch)
        if PLAN_KEY not in planned:
            return None
        return self._transformation.annotate(self._cut_clean(batch), planned)

    @override
    def describe_plan(self, batch: PlannedBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        return self._transformation.describe_plan(self._with_plan(batch), rows)

    @override
    def draw(self, batch: PlannedBatch) -> PlannedBatch | None:
        return super().draw(self._with_pixels(batch))

    @override
    def preview_families(self, batch: PlannedBatch) -> list[FamilyPreview]:
        spec = self._synthesis
        if spec is None:
            return []
        # The same patches for every family, so that the rows of the picture can be compared.
        plain = replace(self._transformation, synthesis=None, augment=None)
        undrawn = {key: value for key, value in batch.items() if key != PLAN_KEY}
        planned = plain.plan(undrawn) | {"image": self._cut_clean(batch)}
        return [_preview(plain, spec, family, planned) for family in spec.members]

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        if not self._transformation.keeps_whole_values:
            return None
        return self._dataset.bank.dtype.name, self._transformation.values

    def _with_plan(self, batch: PlannedBatch) -> PlannedBatch:
        if self._dataset.writer is None:
            return batch
        return replace(self._transformation, synthesis=self._synthesis).add_plan(batch)

    def _with_pixels(self, batch: PlannedBatch) -> PlannedBatch:
        return batch if "image" in batch else self._pixels.fill(batch, self._dataset)

    def _cut_clean(self, batch: PlannedBatch) -> Tensor:
        """Return stored pixels [B, C, H, W] without the defects that workers may have drawn."""
        if self._dataset.writer is None:
            images: Tensor = self._with_pixels(batch)["image"]
            return images
        return torch.from_numpy(
            self._dataset.cut(batch["image_index"].numpy(), batch["position"].numpy())
        )


def _preview(
    plain: ImageTransform, spec: DefectSpec, family: Family, batch: PlannedBatch
) -> FamilyPreview:
    """Draw one true defect of a family on each patch of a batch.

    Args:
        plain: Transform of the batch without synthesis and augmentation.
        spec: Specification with the family.
        family: One of the specification's members.
        batch: A planned batch of clean patches.
    """
    alone = replace(spec, families=(family,), probability=1.0, count=(1, 1), true_count=(1, 1))
    clean = batch["image"]
    shape = (len(plain.expand), *clean.shape[-2:])
    plan = sample_plan(alone, plain.seed, int(batch["epoch"][0]), batch["index"].numpy(), shape).to(
        "cpu"
    )
    before = plain.draw(batch | {"image": clean.clone()})["image"]
    after = plain.draw(batch | {"image": clean.clone(), PLAN_KEY: plan})
    images, values = plain.spread(clean, batch)
    severity = annotate(images, plan, values).severity
    order = torch.argsort(plan.row)  # one defect for each patch, in the order of the patches
    centre = torch.stack((plan.y, plan.x), dim=1)[order]
    return FamilyPreview(
        name=family.name,
        before=before[:, 0],
        after=after["image"][:, 0],
        mask=after["mask"][:, 0],
        severity=severity[order],
        centre=centre,
    )
