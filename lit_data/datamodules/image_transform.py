"""Work on a batch of patches between loader and model, planned on the host and done on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lit_data.augment import Augmentation, Layers, SingleTexture
from lit_data.core.rng import find_streams
from lit_data.core.types import Batch, PlannedBatch, Size, Stage
from lit_data.core.value_range import ValueRange, to_unit
from lit_data.datamodules.visuals import FamilyPreview, Visuals
from lit_data.datasets.device_bank import DevicePatches
from lit_data.datasets.patches import PatchDataset
from lit_data.synthesis import DefectPlan, DefectSpec, render, sample_plan
from lit_data.synthesis.families.base import Family
from lit_data.synthesis.renderer import Annotations, annotate
from lit_data.synthesis.writer import DefectWriter
from lit_inspect.layouts import ROLES

PLAN_KEY = "plan"
"""Key of the `DefectPlan` of a planned batch, which moves to a device as tensors do."""


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Cast to 0..1, spread to three channels, tell them apart, draw defects, augment.

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
    read_px: Mapping[Stage, Size]
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
        streams, epoch = find_streams(batch), int(batch["epoch"][0])
        channels = len(self.expand)
        # Workers who draw give a mask too.
        if self.draws(stage, has_masks="mask" in batch or "mask_index" in batch):
            batch = self.add_plan(batch, stage)
        # Every kind of draw has a stream of its own, so none depends on whether the others are on.
        if self.nuisance:
            batch = batch | self.nuisance.draw(self.seed, epoch, streams, channels)
        if stage in self.augment:
            batch = batch | self.augment[stage].draw(self.seed, epoch, streams, channels)
        return batch

    @property
    def drawing(self) -> object | None:
        """The spec of what is drawn into samples; None draws nothing."""
        return self.synthesis

    def draws(self, stage: Stage, *, has_masks: bool) -> bool:
        """Return True if defects are to be drawn into the samples of a stage.

        Args:
            stage: The stage.
            has_masks: Something says what a defect is. Real defects of single images train beside
                synthetic ones.
        """
        if self.drawing is None or stage == "predict":
            return False
        return not has_masks or (self.is_single and stage == "train")

    def add_plan(self, batch: PlannedBatch, stage: Stage) -> PlannedBatch:
        """Add the synthetic defects of each sample, whether they are drawn yet or not; if any."""
        if self.synthesis is None:
            return batch
        epoch, channels = int(batch["epoch"][0]), len(self.expand)
        # A defect of one image is planned for one channel, and then lies in all of them.
        shape = (1 if self.is_single else channels, *self.read_px[stage])
        plan = sample_plan(self.synthesis, self.seed, epoch, find_streams(batch), shape)
        if self.is_single:
            plan = replace(plan, channels=np.ones((len(plan), channels), np.bool_))
        return batch | {PLAN_KEY: plan.to("cpu")}

    def finish(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Do the work that was planned, on the device of the batch.

        Args:
            batch: A planned batch with its pixels.
            stage: The stage it was planned for.

        Returns:
            ``image`` [B, C, H, W] float32 in 0..1, and ``mask`` [B, 1, H, W] float32 where
            something says what a defect is: {0, 1}, or numbers of classes. ``clean`` as ``image``
            where `draw` gives it.
        """
        rendered = self.draw(batch)
        if stage not in self.augment:
            return rendered
        augment = self.augment[stage]
        augmented = augment.forward(Layers(rendered["image"], rendered.get("mask")), batch)
        finished = to_batch(augmented.images, augmented.masks)
        if "clean" in rendered:
            # The numbers of the plan move it as they moved the image.
            finished["clean"] = augment.forward(Layers(rendered["clean"]), batch).images
        return finished

    def draw(self, batch: PlannedBatch) -> Batch:
        """Do what comes before augmentation; see `finish`."""
        images, values = self.spread(batch["image"], batch)
        masks = batch["mask"].to(torch.float32) if "mask" in batch else None
        plan = self._plan_of(batch)
        if plan is not None:
            # Drawing is in place, and the pixels of the loader may be needed again.
            canvas = images.to(torch.float32, copy=images is batch["image"])
            images, drawn_masks = render(canvas.contiguous(), plan, values)
            # Where real and synthetic defects overlap, the class of the real one stays.
            masks = drawn_masks if masks is None else torch.where(masks > 0, masks, drawn_masks)
        return to_batch(to_unit(images, values), masks)

    def spread(self, images: Tensor, batch: PlannedBatch) -> tuple[Tensor, ValueRange]:
        """Stored pixels as target and references, [B, 3, H, W], with their value range; told apart if need be."""
        if self.expand != tuple(range(images.shape[1])):
            if images.dtype is torch.uint16 and images.is_cuda:
                images = images.to(torch.float32)  # CUDA has few kernels for uint16
            images = torch.stack([images[:, channel] for channel in self.expand], dim=1)
        if self.nuisance:
            # It works on 0..1, so the result needs no scaling any more.
            return self.nuisance.forward(to_unit(images, self.values), batch), ValueRange()
        return images, self.values

    def runs_on_host(self, stage: Stage) -> bool:
        """Return True if workers augment the samples of a stage, all or in part."""
        return stage in self.augment and len(self.augment[stage].host_steps) > 0

    def keeps_whole_values(self, stage: Stage) -> bool:
        """Return True if finished samples are whole pixel values, only scaled."""
        return self.values.whole and self.nuisance is None and stage not in self.augment

    def make_writer(self) -> DefectWriter | None:
        """Make the writer that workers draw defects with; None where they cannot, or nothing is drawn.

        They draw into stored pixels, so these must be whole numbers, and target and references as
        they are.
        """
        is_as_stored = self.nuisance is None and self.expand == tuple(range(len(ROLES)))
        if self.synthesis is None or not is_as_stored or not self.values.whole:
            return None
        return DefectWriter(self.synthesis, self.seed, self.values)

    def annotate(
        self, clean: Tensor, batch: PlannedBatch, stage: Stage
    ) -> tuple[DefectPlan, Annotations] | None:
        """Return the places and the strength of the defects of a planned batch.

        Args:
            clean: [B, C, H, W], the stored pixels of the batch before anything was drawn.
            batch: The planned batch.
            stage: The stage it was planned for.

        Returns:
            The plan and its annotations, with labels as the model sees them; none for a batch
            without a plan, or of samples that workers have augmented.
        """
        plan = self._plan_of(batch)
        # What workers have moved lies where no plan says.
        if plan is None or self.runs_on_host(stage):
            return None
        images, values = self.spread(clean, batch)
        annotations = annotate(images.contiguous(), plan, values)
        if stage in self.augment:
            # Labels are moved as masks are; the zeros stand for images, which are not needed.
            labels = annotations.labels
            moved = self.augment[stage].forward(Layers(torch.zeros(labels.shape), labels), batch)
            annotations = replace(annotations, labels=cast(Tensor, moved.masks))
        return plan, annotations

    def describe_plan(self, batch: PlannedBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the defects planned for some samples of a batch, one dict each.

        Places are those before augmentation.

        Args:
            batch: A planned batch on the host.
            rows: The samples in question.
        """
        plan_of_batch = self._plan_of(batch)
        if plan_of_batch is None:
            return []
        roles = () if self.is_single else ROLES
        # One row for each defect, so a sample may give several or none.
        is_asked = torch.isin(plan_of_batch.row, torch.tensor(rows, dtype=torch.int64))
        plan = plan_of_batch.select(is_asked)
        columns = {
            "index": batch["index"][plan.row].tolist(),
            "family": [plan.spec.members[number].name for number in plan.family.tolist()],
            "y": plan.y.tolist(),
            "x": plan.x.tolist(),
            "amplitude": [round(value, 4) for value in plan.amplitude.tolist()],
            "is_true": plan.is_true.tolist(),
            **{name: plan.channels[:, number].tolist() for number, name in enumerate(roles)},
            "parameters": [_describe_shape(plan, number) for number in range(len(plan))],
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _plan_of(self, batch: PlannedBatch) -> DefectPlan | None:
        plan: DefectPlan | None = batch.get(PLAN_KEY)
        return plan


def find_margins(augment: Mapping[Stage, Augmentation], patch_px: Size) -> dict[Stage, Size]:
    """Return the pixels that patches of each stage are read larger by.

    An augmentation that crops to a patch needs them; without a margin it would see padding.
    """
    margins: dict[Stage, Size] = dict.fromkeys(get_args(Stage), (0, 0))
    for stage, step in augment.items():
        if step.crop_px == patch_px:  # any other crop works with the pixels of the patch
            margins[stage] = step.margin_px(patch_px)
    return margins


def to_batch(images: Tensor, masks: Tensor | None) -> Batch:
    """Return ``image``, and ``mask`` if there is any."""
    return {"image": images} if masks is None else {"image": images, "mask": masks}


def _describe_shape(plan: DefectPlan, number: int) -> str:
    """Return the parameters of one defect, ``name=value`` each."""
    names = plan.spec.members[int(plan.family[number])].parameters
    return " ".join(
        f"{name}={value:.4g}"
        for name, value in zip(names, plan.values[number].tolist(), strict=False)
    )


class SynthesisVisuals(Visuals):
    """Pictures of samples with synthetic defects or watermarks, see `Visuals`.

    Args:
        dataset: The patches of the stage.
        transformation: Work on their batches.
        pixels: Cuts the pixels of a dataset without them.
        stage: Of the patches.
    """

    def __init__(
        self,
        dataset: PatchDataset,
        transformation: ImageTransform,
        pixels: DevicePatches,
        stage: Stage,
    ) -> None:
        super().__init__(transformation.draw if stage in transformation.augment else None)
        self._dataset = dataset
        self._transformation = transformation
        self._pixels = pixels
        self._stage = stage

    @override
    def annotate(self, batch: PlannedBatch) -> tuple[DefectPlan, Annotations] | None:
        planned = self._with_plan(batch)
        if PLAN_KEY not in planned:
            return None
        return self._transformation.annotate(self._cut_clean(batch), planned, self._stage)

    @override
    def describe_plan(self, batch: PlannedBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        return self._transformation.describe_plan(self._with_plan(batch), rows)

    @override
    def draw(self, batch: PlannedBatch) -> PlannedBatch | None:
        return super().draw(self._with_pixels(batch))

    @override
    def preview_families(self, batch: PlannedBatch) -> list[FamilyPreview]:
        spec = self._transformation.synthesis
        if spec is None:
            return []
        # The same patches for every family, so that the rows of the picture can be compared.
        plain = replace(self._transformation, synthesis=None, augment={})
        undrawn = {key: value for key, value in batch.items() if key != PLAN_KEY}
        planned = plain.plan(undrawn, "train") | {"image": self._cut_clean(batch)}
        return [_preview(plain, spec, family, planned) for family in spec.members]

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        if not self._transformation.keeps_whole_values(self._stage):
            return None
        return self._dataset.bank.dtype.name, self._transformation.values

    def _with_plan(self, batch: PlannedBatch) -> PlannedBatch:
        if self._dataset.writer is None:
            return batch
        return self._transformation.add_plan(batch, self._stage)

    def _with_pixels(self, batch: PlannedBatch) -> PlannedBatch:
        return batch if "image" in batch else self._pixels.fill(batch, self._dataset)

    def _cut_clean(self, batch: PlannedBatch) -> Tensor:
        """[B, C, H, W] stored pixels without the defects that workers may have drawn."""
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
        plain: Work on the batch without synthesis and augmentation.
        spec: With the family.
        family: One of its members.
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
