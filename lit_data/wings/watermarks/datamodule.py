"""`WatermarkDataModule`: pages and photographs with text watermarks, synthetic or real."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.rng import find_streams
from lit_data.core.types import NEUTRAL, Batch, Ints, PathText, PlannedBatch, Size, Stage
from lit_data.core.value_range import ValueRange, to_unit
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image import Augment, ImageDataModule
from lit_data.datamodules.image_batch import ImageTransform, to_batch
from lit_data.datamodules.image_files import MaskedImageFolder, MaskedKeywords
from lit_data.datasets.patch_source import PatchSource, ProgressiveSize, RandomPatches
from lit_data.datasets.patches import PatchDataset, PatchWriter, corner_of
from lit_data.datasets.split_names import SPLITS
from lit_data.images.bank import describe_bank
from lit_data.images.read_options import ReadOptions
from lit_data.loading import LoaderOptions
from lit_data.wings.watermarks.blend import Look, blend, degrade
from lit_data.wings.watermarks.cover import keep_visible
from lit_data.wings.watermarks.glyphs import GlyphBank
from lit_data.wings.watermarks.plan import MODES, WatermarkPlan, WatermarkSpec, sample_watermarks
from lit_data.wings.watermarks.sample_set import WatermarkSampleSpec
from lit_data.wings.watermarks.writer import WatermarkWriter, check_colours

MARKS_KEY = "marks"
"""Key of the `WatermarkBatch` of a planned batch, which moves to a device like a tensor."""


@dataclass(frozen=True, slots=True)
class WatermarkBatch:
    """Size and look of the samples of a batch, for its device.

    Attributes:
        size_px: (h, w) of the samples, which are in the upper left corner of their rows.
        look: Look of the watermarks; None if none are drawn.
    """

    size_px: Size
    look: Look | None

    def to(self, device: "torch.device | str", *, non_blocking: bool = True) -> "WatermarkBatch":
        """Return the same with tensors on a device."""
        look = None if self.look is None else self.look.to(device, non_blocking=non_blocking)
        return WatermarkBatch(self.size_px, look)

    def slice_samples(self, start: int, stop: int) -> "WatermarkBatch":
        """Return the same for the samples from `start` to `stop`."""
        look = None if self.look is None else self.look.slice_samples(start, stop)
        return WatermarkBatch(self.size_px, look)


@dataclass(frozen=True, kw_only=True)
class WatermarkTransform(ImageTransform):
    """Cut to the size of the epoch, cast to 0..1, blend the watermark, compress, augment.

    Args:
        spec: The watermarks; None if all samples have masks.
        fonts: Paths of the fonts, to which the numbers of a plan refer.
        progressive: Sides of the samples by epoch, instead of `read_px`.
        clean: True to include the images without watermarks in finished batches.
    """

    spec: WatermarkSpec | None
    fonts: Sequence[str]
    progressive: ProgressiveSize | None
    clean: bool

    @override
    def plan(self, batch: PlannedBatch) -> PlannedBatch:
        size_px = self.size_at(int(batch["epoch"][0]))
        plan = self.sample(batch, size_px)
        look = None if plan is None else Look.of(plan)
        batch = batch | {MARKS_KEY: WatermarkBatch(size_px, look)}
        return super().plan(batch)

    def size_at(self, epoch: int) -> Size:
        """Return (h, w) of the samples of an epoch."""
        if self.progressive is None:
            return self.read_px
        side_px = self.progressive.size_at(epoch)
        return side_px, side_px

    def sample(self, batch: PlannedBatch, size_px: Size) -> WatermarkPlan | None:
        """Return the watermarks of a batch on the host, in visible colors; None without watermarks.

        Args:
            batch: Batch of workers that drew the coverage of each pixel.
            size_px: (h, w) of its samples.
        """
        if self.spec is None or "cover" not in batch:
            return None
        streams, epoch = find_streams(batch), int(batch["epoch"][0])
        # The same numbers as those with which the workers drew the cover.
        plan = sample_watermarks(self.spec, self.seed, epoch, streams, size_px)
        return keep_visible(plan, batch["under"].numpy())

    @override
    def draw(self, batch: PlannedBatch) -> Batch:
        marks: WatermarkBatch = batch[MARKS_KEY]
        # Rows are as large as the largest size of all epochs; a sample fills their corner.
        corner, look = corner_of(marks.size_px), marks.look
        images = batch["image"][corner]
        if look is None:
            masks = batch["mask"][corner].to(torch.float32) if "mask" in batch else None
            return to_batch(to_unit(images, self.values), masks)
        cover = batch["cover"][corner]
        rendered = to_batch(degrade(blend(images, cover, look), look), self._to_mask(cover, look))
        if self.clean:
            rendered["clean"] = to_unit(images, self.values)
        return rendered

    @override
    def describe_plan(self, batch: PlannedBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
        plan = self.sample(batch, batch[MARKS_KEY].size_px)
        texts: list[dict[str, Any]] = []
        if plan is None:
            return texts
        for number in range(len(plan)):
            row = int(plan.row[number])
            if row in rows:
                texts.append(_describe_text(plan, number, self.fonts, int(batch["index"][row])))
        return texts

    def _to_mask(self, cover: Tensor, look: Look) -> Tensor:
        """Return masks [B, 1, h, w] float32 from the cover, [B, 1, h, w] uint8."""
        assert self.spec is not None
        if self.spec.mask == "binary":  # otherwise the mask is the opacity of each pixel
            return (cover >= max(1.0, self.spec.mask_threshold * 255)).to(torch.float32)
        return cover * (look.opacity / 255)[:, None, None, None]


def _describe_text(
    plan: WatermarkPlan, number: int, fonts: Sequence[str], index: int
) -> dict[str, Any]:
    """Return the row of one text for a table."""
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
        "index": index,
        "text": plan.spec.words[int(plan.text[number])],
        "font": fonts[int(plan.font[number] * len(fonts))] or "built in",
        **{name: round(float(value), 3) for name, value in values.items()},
        "tiled": bool(plan.tiled[row]),
        "mode": MODES[int(plan.mode[row])],
        "colour": [round(part, 3) for part in plan.colour[row].tolist()],
    }


@dataclass(frozen=True, kw_only=True)
class WatermarkFiles(MaskedImageFolder):
    """Images with watermarks; by default gray ones are copied to three channels, and alpha is dropped."""

    read: ReadOptions = field(default_factory=partial(ReadOptions, gray_to_rgb=True, alpha="drop"))

    sample_spec = WatermarkSampleSpec

    def __post_init__(self) -> None:
        if self.masks and not self.root:
            raise ConfigError(
                "the synthetic backgrounds have no masks: set data.root, or remove data.masks"
            )
        super().__post_init__()


class WatermarkDataModule(ImageDataModule):
    """Patches of images of any size, with synthetic watermarks or real ones with masks.

    A batch is a dict:

    ===============  =======================  ==================================================================
    key              shape, dtype             what
    ===============  =======================  ==================================================================
    ``image``        [B, 3, H, W] float32     0..1, R, G, B
    ``mask``         [B, 1, H, W] float32     0..1, the watermark; not when predicting
    ``clean``        [B, 3, H, W] float32     0..1, the image before its watermark; only with `clean`
    ``index``        [B] int64                number of the sample among those of all images
    ``image_index``  [B] int64                number of the image
    ``position``     [B, 2] int64             (y, x) of the patch in its image, px
    ``epoch``        [B] int64                epoch the sample was drawn for
    ===============  =======================  ==================================================================

    Training patches are cut at random; those of the other stages are on a grid and have the same
    watermarks in every epoch. Prediction takes the grid of all images, without drawing watermarks.

    Args, in addition to those of `WatermarkFiles` and `ImageDataModule`:
        samples_per_image: Training patches of each image in an epoch.
        progressive: Sizes of training patches by epoch, instead of `patch_px`: pairs (first epoch,
            side in px), or a `ProgressiveSize`.
        clean: True to add ``clean`` to batches, for modules that restore images; synthetic
            watermarks only.
        synthesis: Watermarks to draw; None draws none.

    Raises:
        ConfigError: An option is out of its range.
    """

    task = "lit_data.wings.watermarks.predictions.MarkTask"
    batch_keys: Sequence[str] = (*ImageDataModule.batch_keys, "clean")
    source_type = WatermarkFiles
    reads_margins = False
    synthesis: WatermarkSpec | None
    marks: GlyphBank | None

    def __init__(
        self,
        root: PathText | None = None,
        *,
        mask_splits: Annotated[Sequence[Stage], NEUTRAL] = SPLITS,
        patch_px: Annotated[int | Size, NEUTRAL] = 192,
        stride_px: Annotated[int | Size | None, NEUTRAL] = None,
        samples_per_image: Annotated[int, NEUTRAL] = 16,
        progressive: Annotated[ProgressiveSize | Sequence[tuple[int, int]] | None, NEUTRAL] = None,
        clean: bool = False,
        loader: LoaderOptions | None = None,
        synthesis: WatermarkSpec | None = None,
        augment: Augment = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[MaskedKeywords],
    ) -> None:
        super().__init__(
            root,
            patch_px=patch_px,
            stride_px=stride_px,
            mask_splits=mask_splits,
            synthesis=synthesis,
            augment=augment,
            loader=loader,
            batch_format=batch_format,
            **options,
        )
        if progressive is not None and not isinstance(progressive, ProgressiveSize):
            progressive = ProgressiveSize(tuple(progressive))
        self.samples_per_image = samples_per_image
        self.progressive = progressive
        self.clean = clean
        self._check()

    @override
    def choose_patches(self, images: Ints, stage: Stage) -> PatchSource:
        if stage != "train":  # the same patches in every epoch, so that scores can be compared
            return super().choose_patches(images, stage)
        size_px = self.progressive or self.patch_px
        return RandomPatches(self.bank, images, self.samples_per_image, size_px, self.loader.seed)

    @override
    def choose_writer(self, dataset: PatchDataset) -> PatchWriter | None:
        return None if self.marks is None else WatermarkWriter(self.marks, self.loader.seed)

    @override
    def check_sources(self) -> dict[str, int]:
        # Patches of the current files, whatever a store contains.
        fresh = self.renew(self.source.unstored())
        samples = {f"{split}_samples": len(fresh.dataset(split)) for split in SPLITS}
        return self.source.check() | samples

    @override
    def describe(self) -> dict[str, Any]:
        """Return facts about the opened dataset: images, samples of each split, bytes of its pixels, fonts."""
        samples = {f"{split}_samples": len(self.dataset(split)) for split in SPLITS}
        images = {f"{split}_images": len(numbers) for split, numbers in self.split_images.items()}
        fonts = {"fonts": len(self.marks.fonts) if self.marks else 0}
        return describe_bank(self.bank) | samples | images | fonts

    @override
    def open_source(self) -> None:
        # Fonts are read before images: a missing font ends the run immediately.
        self.marks = GlyphBank(self.synthesis) if self.synthesis else None
        super().open_source()
        check_colours(self.bank)  # before a worker blends into them

    @override
    def make_transformation(self) -> WatermarkTransform:
        return WatermarkTransform(
            values=ValueRange(0.0, 255.0, whole=True),
            read_px=self.patch_px,
            expand=(0, 1, 2),
            seed=self.loader.seed,
            synthesis=None,
            nuisance=None,
            augment=None,
            spec=self.synthesis,
            fonts=self.marks.fonts if self.marks else (),
            progressive=None,
            clean=self.clean,
        )

    @override
    def fit_transformation(self, stage: Stage) -> ImageTransform:
        fitted = super().fit_transformation(stage)
        assert isinstance(fitted, WatermarkTransform)
        return replace(fitted, progressive=self.progressive) if stage == "train" else fitted

    def _check(self) -> None:
        if self.synthesis is not None and not isinstance(self.synthesis, WatermarkSpec):
            kind = type(self.synthesis).__name__
            raise ConfigError(
                f"synthesis is a {kind}, which draws no watermarks: set synthesis=watermark"
            )
        unknown = set(self.mask_splits) - set(SPLITS)
        if unknown:
            raise ConfigError(
                f"mask_splits={list(self.mask_splits)} does not name a split: choose from "
                f"{', '.join(SPLITS)}"
            )
        # A crop would give samples of all epochs the same size.
        if self.progressive and "train" in self.augment and self.augment["train"].crop_px:
            raise ConfigError(
                "progressive sets the size of training patches: remove crop_px from the "
                "augmentation"
            )
