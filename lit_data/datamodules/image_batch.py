"""Transform of batches of patches, which are planned on the host and finished on the device."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lit_data.augment import Augmentation, Layers, SingleTexture
from lit_data.core.rng import find_streams
from lit_data.core.types import Batch, PlannedBatch, Size, Stage
from lit_data.core.value_range import ValueRange, to_unit
from lit_data.datamodules.base import BaseDataModule
from lit_data.datasets.device_bank import DevicePatches
from lit_data.datasets.patches import PatchDataset
from lit_data.synthesis import DefectPlan, DefectSpec, render, sample_plan
from lit_data.synthesis.renderer import Annotations, annotate
from lit_data.synthesis.writer import DefectWriter
from lit_inspect.layouts import ROLES

PLAN_KEY = "plan"
"""Key of the `DefectPlan` of a planned batch, which moves to a device like a tensor."""


class ImageBatches(BaseDataModule[PatchDataset]):
    """The part of a datamodule of image patches that transforms batches.

    Attributes:
        transformation: Transform of the batches of any stage, without augmentation; set by `setup`.
    """

    transformation: "ImageTransform"
    _transformations: "dict[Stage, ImageTransform]"

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Draw defects, nuisance and augmentation of each sample from its own stream."""
        return self.transformation_of(stage).plan(batch)

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Cut patches that the loader did not cut, cast to float, render defects, and augment."""
        if "image" not in batch:  # the dataset has no pixels, and the batch has only positions
            batch = self.device_patches.fill(batch, self.dataset(stage))
        finished = {key: batch[key] for key in self.batch_keys if key in batch}
        return finished | self.transformation_of(stage).finish(batch)

    def transformation_of(self, stage: Stage) -> "ImageTransform":
        """Return the transform of the batches of a stage; it draws defects if its dataset does not."""
        if stage not in self._transformations:
            fitted = self.fit_transformation(stage)
            if not self.dataset(stage).drawn_late:
                fitted = replace(fitted, synthesis=None)
            self._transformations[stage] = fitted
        return self._transformations[stage]

    @abstractmethod
    def fit_transformation(self, stage: Stage) -> "ImageTransform":
        """Return the transform of the batches of a stage with its size and augmentation."""

    @cached_property
    def device_patches(self) -> DevicePatches:
        """Images on the device, for datasets without pixels."""
        return DevicePatches()


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Casts to 0..1, expands to three channels, makes them differ, draws defects, and augments.

    Args:
        values: Pixel values that become 0 and 1.
        read_px: (H, W) of a sample, with the margin that its augmentation needs.
        expand: Stored channel for each of target, ref1, ref2.
        seed: Seed of every draw.
        synthesis: Defects to draw into each sample; None draws none.
        nuisance: Module that makes the channels of a single texture differ.
        augment: Augmentation of the samples, if any.
        is_single: True if the channels are those of one image, so that every defect is true and in
            all of them.
    """

    values: ValueRange
    read_px: Size
    expand: tuple[int, ...]
    seed: int
    synthesis: DefectSpec | None
    nuisance: SingleTexture | None
    augment: Augmentation | None
    is_single: bool = False

    def plan(self, batch: PlannedBatch) -> PlannedBatch:
        """Add the drawn numbers of each sample, from its own stream.

        Args:
            batch: Batch from the loader, on the host.

        Returns:
            The batch with a few more small tensors.
        """
        streams, epoch = find_streams(batch), int(batch["epoch"][0])
        channels = len(self.expand)
        batch = self.add_plan(batch)
        # Every kind of draw has its own stream, so none depends on whether the others are on.
        for step in (self.nuisance, self.augment):
            if step is not None:
                batch = batch | step.draw(self.seed, epoch, streams, channels)
        return batch

    def add_plan(self, batch: PlannedBatch) -> PlannedBatch:
        """Add the synthetic defects of each sample, if any."""
        if self.synthesis is None:
            return batch
        epoch, channels = int(batch["epoch"][0]), len(self.expand)
        # A defect of one image is planned for one channel and then used in all of them.
        shape = (1 if self.is_single else channels, *self.read_px)
        plan = sample_plan(self.synthesis, self.seed, epoch, find_streams(batch), shape)
        if self.is_single:
            plan = replace(plan, channels=np.ones((len(plan), channels), np.bool_))
        return batch | {PLAN_KEY: plan.to("cpu")}

    def finish(self, batch: PlannedBatch) -> Batch:
        """Transform a planned batch on its device.

        Args:
            batch: A planned batch with its pixels.

        Returns:
            ``image`` [B, C, H, W] float32 in 0..1, and ``mask`` [B, 1, H, W] float32 in {0, 1} or
            with class numbers, if the defects are known. If `draw` gives ``clean``, it has the
            form of ``image``.
        """
        rendered = self.draw(batch)
        if self.augment is None:
            return rendered
        augmented = self.augment.forward(Layers(rendered["image"], rendered.get("mask")), batch)
        finished = to_batch(augmented.images, augmented.masks)
        if "clean" in rendered:
            # The planned numbers move it like the image.
            finished["clean"] = self.augment.forward(Layers(rendered["clean"]), batch).images
        return finished

    def draw(self, batch: PlannedBatch) -> Batch:
        """Apply the steps before augmentation; see `finish`."""
        images, values = self.spread(batch["image"], batch)
        masks = batch["mask"].to(torch.float32) if "mask" in batch else None
        plan = self._plan_of(batch)
        if plan is not None:
            # Drawing works in place, and the loader's pixels may be needed again.
            canvas = images.to(torch.float32, copy=images is batch["image"])
            images, drawn_masks = render(canvas.contiguous(), plan, values)
            # If real and synthetic defects overlap, the class of the real one is kept.
            masks = drawn_masks if masks is None else torch.where(masks > 0, masks, drawn_masks)
        return to_batch(to_unit(images, values), masks)

    def spread(self, images: Tensor, batch: PlannedBatch) -> tuple[Tensor, ValueRange]:
        """Return target and references [B, 3, H, W] of stored pixels, made to differ if needed.

        The second result is their value range.
        """
        if self.expand != tuple(range(images.shape[1])):
            if images.dtype is torch.uint16 and images.is_cuda:
                images = images.to(torch.float32)  # CUDA has few kernels for uint16
            images = torch.stack([images[:, channel] for channel in self.expand], dim=1)
        if self.nuisance:
            # It works on 0..1, so the result needs no further scaling.
            return self.nuisance.forward(to_unit(images, self.values), batch), ValueRange()
        return images, self.values

    @property
    def runs_on_host(self) -> bool:
        """True if workers augment the samples, completely or in part."""
        return self.augment is not None and len(self.augment.host_steps) > 0

    @property
    def keeps_whole_values(self) -> bool:
        """True if finished samples are integer pixel values, apart from scaling."""
        return self.values.whole and self.nuisance is None and self.augment is None

    def make_writer(self) -> DefectWriter | None:
        """Make the writer that workers draw defects with; None if they cannot or nothing is drawn.

        Workers draw into stored pixels, so these must be integers, and already be the target and
        references.
        """
        is_as_stored = self.nuisance is None and self.expand == tuple(range(len(ROLES)))
        if self.synthesis is None or self.is_single or not (is_as_stored and self.values.whole):
            return None
        return DefectWriter(self.synthesis, self.seed, self.values)

    def annotate(self, clean: Tensor, batch: PlannedBatch) -> tuple[DefectPlan, Annotations] | None:
        """Return the positions and strengths of the defects of a planned batch.

        Args:
            clean: [B, C, H, W] stored pixels of the batch before anything was drawn.
            batch: The planned batch.

        Returns:
            The plan and its annotations, with labels as the model sees them; None for a batch
            without a plan, or of samples that workers have augmented.
        """
        plan = self._plan_of(batch)
        # The plan does not know how workers have moved samples.
        if plan is None or self.runs_on_host:
            return None
        images, values = self.spread(clean, batch)
        annotations = annotate(images.contiguous(), plan, values)
        if self.augment is not None:
            # Labels are moved like masks; the zeros replace images, which are not needed.
            labels = annotations.labels
            moved = self.augment.forward(Layers(torch.zeros(labels.shape), labels), batch)
            annotations = replace(annotations, labels=cast(Tensor, moved.masks))
        return plan, annotations

    def describe_plan(self, batch: PlannedBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the defects planned for some samples of a batch, one dict each.

        Positions are those before augmentation.

        Args:
            batch: A planned batch on the host.
            rows: Numbers of the samples in the batch.
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


def find_margin(augment: Augmentation, patch_px: Size) -> Size:
    """Return the margin read around patches, in pixels above and below, and left and right.

    An augmentation that crops to a patch needs this margin; without it, padding would be visible.
    """
    if augment.crop_px != patch_px:  # any other crop uses only the pixels of the patch
        return (0, 0)
    return augment.margin_px(patch_px)


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
