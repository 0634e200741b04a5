"""Work on a batch with watermarks between the loader and the model: planned on the host, done on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from lit_data.augment import Augmentation, Layers
from lit_data.datamodules.image_transform import ImageVisuals
from lit_data.datasets.patch_source import ProgressiveSize
from lit_data.datasets.patches import corner_of
from lit_data.devices import divided
from lit_data.synthesis.canvas import ValueRange
from lit_data.synthesis.watermarks.blend import Look, blend, degrade
from lit_data.synthesis.watermarks.cover import keep_visible
from lit_data.synthesis.watermarks.plan import (
    MODES,
    WatermarkPlan,
    WatermarkSpec,
    sample_watermarks,
)
from lit_data.types import Batch, PlannedBatch, Stage

PLAN_KEY: Final = "plan"
"""Key of the `BatchPlan` of a planned batch, which moves to a device as tensors do."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Size and look of the samples of a batch, for its device.

    Attributes:
        size_px: (h, w) of its samples, which lie in the upper left corner of its rows.
        look: How its watermarks look; none where none are drawn.
    """

    size_px: tuple[int, int]
    look: Look | None

    def to(self, device: "torch.device | str", *, non_blocking: bool = True) -> "BatchPlan":
        """The same with tensors on a device."""
        look = None if self.look is None else self.look.to(device, non_blocking=non_blocking)
        return BatchPlan(self.size_px, look)

    def slice_samples(self, start: int, stop: int) -> "BatchPlan":
        """The same for the samples from `start` to `stop`."""
        return BatchPlan(
            self.size_px, None if self.look is None else self.look.slice_samples(start, stop)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkTransform:
    """Cut to the size of the epoch, cast to 0..1, blend the watermark, compress, augment.

    Args:
        spec: The watermarks; none where all samples have masks of their own.
        seed: Seed of every draw.
        augment: Augmentation of the samples of each stage that has one.
        patch_px: (h, w) of samples.
        progressive: Sides of training samples by epoch, in place of `patch_px`.
        clean: True lets finished batches hold the images without watermarks as well.
    """

    spec: WatermarkSpec | None
    patch_px: tuple[int, int]
    progressive: ProgressiveSize | None
    seed: int
    augment: Mapping[Stage, Augmentation]
    clean: bool

    def plan(self, batch: PlannedBatch, stage: Stage) -> PlannedBatch:
        """Add what is drawn for each sample, from its own stream, to a batch on the host."""
        index, epoch = batch["index"].numpy(), int(batch["epoch"][0])
        plan = self.sample(batch, stage)
        look = None if plan is None else Look.of(plan)
        batch = batch | {PLAN_KEY: BatchPlan(self.size_at(stage, epoch), look)}
        if stage in self.augment:
            channels = batch["image"].shape[1]
            batch = batch | self.augment[stage].draw(self.seed, epoch, index, channels)
        return batch

    def size_at(self, stage: Stage, epoch: int) -> tuple[int, int]:
        """Return (h, w) of the samples of an epoch."""
        if stage == "train" and self.progressive is not None:
            side_px = self.progressive.size_at(epoch)
            return side_px, side_px
        return self.patch_px

    def sample(self, batch: PlannedBatch, stage: Stage) -> WatermarkPlan | None:
        """Return the watermarks of a batch on the host, in colours that can be seen; none where none are drawn."""
        if self.spec is None or "cover" not in batch:
            return None
        index, epoch = batch["index"].numpy(), int(batch["epoch"][0])
        size_px = self.size_at(stage, epoch)
        plan = sample_watermarks(self.spec, self.seed, epoch, index, size_px)
        return keep_visible(plan, batch["under"].numpy())

    def finish(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Do the work that was planned, on the device of the batch.

        Args:
            batch: A planned batch.
            stage: The stage it was planned for.

        Returns:
            ``image`` [B, 3, h, w] float32 in 0..1, ``mask`` [B, 1, h, w] float32 where there is
            any, ``clean`` as ``image`` if it is wanted.
        """
        drawn = self.draw(batch)
        if stage not in self.augment:
            return drawn
        augment = self.augment[stage]
        augmented = augment.forward(Layers(drawn["image"], drawn.get("mask")), batch)
        finished = {"image": augmented.images}
        if augmented.masks is not None:
            finished["mask"] = augmented.masks
        if "clean" in drawn:
            finished["clean"] = augment.forward(Layers(drawn["clean"]), batch).images
        return finished

    def draw(self, batch: PlannedBatch) -> Batch:
        """Do what comes before augmentation; see `finish`."""
        plan: BatchPlan = batch[PLAN_KEY]
        corner, look = corner_of(plan.size_px), plan.look
        images = batch["image"][corner]
        if look is None:
            drawn = {"image": divided(images, 255.0)}
            if "mask" in batch:
                drawn["mask"] = batch["mask"][corner].to(torch.float32)
            return drawn
        cover = batch["cover"][corner]
        drawn = {"image": degrade(blend(images, cover, look), look)}
        drawn["mask"] = self._mask(cover, look)
        if self.clean:
            drawn["clean"] = divided(images, 255.0)
        return drawn

    def describe_plan(
        self, batch: PlannedBatch, rows: Sequence[int], stage: Stage, fonts: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return the texts drawn in some samples of a batch, one dict each.

        Places are those before augmentation.

        Args:
            batch: A planned batch on the host.
            rows: Numbers of the samples in the batch.
            stage: The stage it was planned for.
            fonts: Paths of the fonts, of which the plan has numbers.
        """
        plan = self.sample(batch, stage)
        if plan is None:
            return []
        texts = []
        for number in range(len(plan)):
            row = int(plan.row[number])
            if row in rows:
                index = int(batch["index"][row])
                texts.append(_describe(plan, number, fonts) | {"index": index})
        return texts

    def _mask(self, cover: Tensor, look: Look) -> Tensor:
        """[B, 1, h, w] float32 from the cover, [B, 1, h, w] uint8."""
        assert self.spec is not None
        if self.spec.mask == "binary":
            return (cover >= max(1.0, self.spec.mask_threshold * 255)).to(torch.float32)
        return cover * (look.opacity / 255)[:, None, None, None]


def _describe(plan: WatermarkPlan, number: int, fonts: Sequence[str]) -> dict[str, Any]:
    row = int(plan.row[number])
    values = {
        "y": plan.centre[number, 0],
        "x": plan.centre[number, 1],
        "size_px": plan.size_px[number],
        "angle_deg": plan.angle_deg[number],
        "opacity": plan.opacity[row],
        "outline": plan.outline[row],
        "jpeg_quality": plan.quality[row],
    }
    return {
        "index": 0,
        "text": plan.spec.words[int(plan.text[number])],
        "font": fonts[int(plan.font[number] * len(fonts))] or "built in",
        **{name: round(float(value), 3) for name, value in values.items()},
        "tiled": bool(plan.tiled[row]),
        "mode": MODES[int(plan.mode[row])],
        "colour": [round(part, 3) for part in plan.colour[row].tolist()],
    }


_BYTES = ValueRange(0.0, 255.0, whole=True)


class WatermarkVisuals(ImageVisuals):
    """See `Visuals`.

    Args:
        transformation: What is done with the patches.
        stage: Which stage.
        fonts: Paths of the fonts of the watermarks.
    """

    def __init__(
        self, transformation: WatermarkTransform, stage: Stage, fonts: Sequence[str]
    ) -> None:
        super().__init__(transformation, stage)
        self._transformation: WatermarkTransform = transformation
        self._fonts = fonts

    @override
    def describe_plan(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
        return self._transformation.describe_plan(batch, rows, self._stage, self._fonts)

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        return None if self._stage in self._transformation.augment else ("uint8", _BYTES)
