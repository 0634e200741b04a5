"""`StripeDataModule`: patches of images with references."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np
from typing_extensions import override

from lit_data.augment import SingleTexture
from lit_data.core.grid import Edges
from lit_data.core.types import NEUTRAL, Array, PathText, Size, Stage
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.drawn_images import DrawnImages
from lit_data.datamodules.image import Augment, ImageDataModule
from lit_data.datamodules.image_files import LayoutKeywords, MaskedImageFolder
from lit_data.datamodules.placement import Backend, DrawingBackend
from lit_data.datasets.occupancy import is_defect
from lit_data.datasets.patches import PatchDataset, PatchWriter
from lit_data.datasets.synthetic.stripes import StripeSampleSpec
from lit_data.images.bank import ImageBank
from lit_data.images.store.store import cut_middle
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_inspect.counts import inflect
from lit_inspect.layouts import ROLES
from lit_inspect.references import MEASURED_PX, describe_misfits, find_limits, measure_fit

_MEASURED = 50
"""Largest number of images with which the limits of references are measured."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StripeFiles(MaskedImageFolder):
    """Images with references; see `lit_data.datasets.references`."""

    layout: str | None = "channels"

    caches = ("store", "device", "lru", "none")
    sample_spec = StripeSampleSpec
    sample_masks = "test_masks"


class StripeDataModule(ImageDataModule):
    """Patches of images with references, and synthetic defects or real masks.

    A batch is a dict:

    ===============  ===========================  ======================================================
    key              shape, dtype                 content
    ===============  ===========================  ======================================================
    ``image``        [B, 3, H, W] float32         0..1, channels target, ref1, ref2
    ``mask``         [B, 1, H, W] float32         {0, 1}, true defects; not when predicting
    ``index``        [B] int64                    number of the patch among those of all images
    ``image_index``  [B] int64                    number of the image
    ``position``     [B, 2] int64                 (y, x) of the patch in its image, px
    ``epoch``        [B] int64                    epoch for which the sample was drawn
    ===============  ===========================  ======================================================

    `batch_format` renames keys or returns a tuple; it may also name ``target``, ``ref1`` and ``ref2``
    ([B, 1, H, W]). With `classes` the mask is [B, H, W] int64; `anomalib` returns its ImageBatch.

    Args, in addition to those of `MaskedImageFolder` and `ImageDataModule`:
        augment: Augmentation of the training split, or a mapping from stages to augmentations: an
            `Augmentation`, or any module of yours (see `lit_data.augment.ExternalTransform`). None
            does not change images.
        nuisance: Synthetic differences between target and references, for layout `single`.
        backend: `cpu` draws defects in the workers, `device` on the device of the batch; `auto`
            decides by a short measurement. Samples are byte-identical on the CPU, and differ by at
            most one gray level of 255 between CPU and GPU.

    Raises:
        ConfigError: An option is out of its range.
    """

    source_type = StripeFiles
    synthesis: DefectSpec | None
    channel_names: ClassVar[Mapping[str, int]] = {name: number for number, name in enumerate(ROLES)}

    def __init__(
        self,
        root: PathText | None = None,
        *,
        mask_splits: Annotated[Sequence[Stage], NEUTRAL] = ("test",),
        patch_px: Annotated[int | Size, NEUTRAL] = 128,
        stride_px: Annotated[int | Size, NEUTRAL] = 112,
        edges: Annotated[Edges, NEUTRAL] = "cover",
        value_range: tuple[float, float] | None = None,
        loader: LoaderOptions | None = None,
        synthesis: DefectSpec | None = None,
        augment: Augment = None,
        nuisance: SingleTexture | None = None,
        backend: Annotated[Backend, NEUTRAL] = "auto",
        batch_format: BatchFormat = "dict",
        **options: Unpack[LayoutKeywords],
    ) -> None:
        super().__init__(
            root,
            patch_px=patch_px,
            stride_px=stride_px,
            edges=edges,
            mask_splits=mask_splits,
            value_range=value_range,
            synthesis=synthesis,
            augment=augment,
            loader=loader,
            batch_format=batch_format,
            **options,
        )
        if self.source.layout == "single":
            self.nuisance = nuisance or SingleTexture()
        self.backend = DrawingBackend(backend)

    @override
    def choose_writer(self, dataset: PatchDataset) -> PatchWriter | None:
        writer = self.transformation.make_writer()
        return self.backend.choose(dataset, writer, self.loader, self.trainer)

    def describe_loaders(self) -> dict[str, dict[str, Any]]:
        """Return the workers of each stage that was read, and the device on which defects are drawn."""
        return super().describe_loaders() | self.backend.to_plain()

    @override
    def open_source(self) -> None:
        super().open_source()
        self._drawn: dict[Stage, DrawnImages | None] = {}
        self._limits: tuple[float, float] | None = None
        self._mask_places: Mapping[int, tuple[ImageBank, int]] | None = None
        is_split = sum(len(numbers) > 0 for numbers in self.split_images.values()) > 1
        if is_split and self.source.mask_folder is None and self.synthesis is not None:
            log.info(
                "no masks: all targets count as good, and synthetic defects are drawn into them"
            )

    @property
    def image_kinds(self) -> list[str]:
        """Return an empty kind for each image, because no folder names it."""
        return [""] * len(self.bank)

    @property
    def has_references(self) -> bool:
        """True if references are stored, not created from the target."""
        return self.source.layout != "single"

    def find_reference_limits(self) -> tuple[float, float] | None:
        """Return the limits of matching references, from images assumed to be correct.

        See `lit_inspect.references.find_limits`. The result is None if there are no references.
        """
        # Images in shards must be fetched, and those of validation already are at this point.
        numbers = self.split_images["val" if self.bank.fetches else "train"]
        if self._limits is None and self.has_references and len(numbers):
            fits = []
            for number in numbers[:: -(-len(numbers) // _MEASURED)].tolist():
                target, *references = cut_middle(self.bank, number, MEASURED_PX)
                fits += [measure_fit(target, reference) for reference in references]
            self._limits = find_limits(fits)
        return self._limits

    def describe_misfits(self, number: int, limits: Sequence[float]) -> str:
        """Return a text on the references of an image that do not match by these limits."""
        return describe_misfits(cut_middle(self.bank, number, MEASURED_PX), ROLES, limits)

    def describe_doubt(self) -> str:
        """Return the reason why the truth of an image is unknown, with advice."""
        return (
            "it is unknown which images show a defect: set data.masks=FOLDER with a mask for each, or "
            "synthesis=gaussian to draw defects into them"
        )

    def draw_images(self, split: Stage) -> DrawnImages | None:
        """Return the whole images of a split, without changes and with synthetic defects.

        Returns:
            The images; None if masks give the truth, or nothing does.
        """
        if split not in self._drawn:
            self._drawn[split] = self._draw_images(split)
        return self._drawn[split]

    def _draw_images(self, split: Stage) -> DrawnImages | None:
        numbers = self.split_images[split]
        uses_masks = split in self.mask_splits and bool(self.source.list_masks())
        if self.synthesis is None or uses_masks or not len(numbers):
            return None
        all_names = self.source.names(self.bank)
        names = [all_names[number] for number in numbers.tolist()]
        log.info(
            "%s has no masks: its %d %s and with synthetic defects, so image scores and "
            "thresholds are for synthetic defects",
            split,
            len(names),
            inflect("[image is scored as it is|images are scored as they are]", len(names)),
        )
        return DrawnImages(self.bank, numbers, names, self.transformation, self.make_grid)

    def read_mask(self, number: int) -> Array | None:
        """Return the mask [H, W] uint8 of an image; None if its split uses none.

        Without `mask_splits`, as in a prediction, any image's mask is returned if it has one.
        """
        if self._mask_places is None:
            self._mask_places = self._find_masks()
        if number not in self._mask_places:
            return None
        masks, position = self._mask_places[number]
        return np.asarray(masks[position][0])

    read_stored_mask = read_mask

    def has_defect(self, number: int) -> bool | None:
        """Return True if the mask of an image marks a defect; None if its split uses none."""
        mask = self.read_mask(number)
        return None if mask is None else bool(is_defect(mask).any())

    def _find_masks(self) -> dict[int, tuple[ImageBank, int]]:
        """Return the bank of masks, and the number in it, for each image whose mask is used."""
        opened = [self.open_split_masks(split) for split in self.mask_splits]
        if not opened:
            opened = [self.source.open_known_masks(self.bank)]
        places: dict[int, tuple[ImageBank, int]] = {}
        for numbers, masks in opened:
            for position, number in enumerate(numbers.tolist()):
                if masks is not None:
                    places[number] = masks, position
        return places
