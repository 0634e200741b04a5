"""`GANDataModule`: images for generative models, and objects with several views."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.augment import Augmentation, Layers, stage_augmentations
from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError, Problems
from lit_data.core.files import write_json
from lit_data.core.grid import pair_px
from lit_data.core.types import Batch, Ints, PathText, PlannedBatch, Size, Stage
from lit_data.core.value_range import ValueRange, find_unit_range, to_unit
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.datamodules.image_files import FolderKeywords, ImageFolder
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.split_lists import LIST_PATHS
from lit_data.datasets.split_names import SPLITS
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import Decoder, ImageDecoder, ImageSource
from lit_data.images.read_options import ReadOptions
from lit_data.images.scaling import FitPadding, FittedDecoder
from lit_data.images.scope import Scope
from lit_data.loading import LoaderOptions
from lit_data.wings.gan.dataset import (
    LAYOUT_FILE,
    Cut,
    GANDataset,
    Labels,
    SampleTable,
    ViewLayout,
    Views,
    check_views,
    lie_in_splits,
    read_layout,
    tabulate,
)
from lit_data.wings.gan.sample_set import GANSampleSpec
from lit_inspect.scaling import Fit

ViewOption = Literal["auto"] | Views
FitOption = Fit | Literal["patches"]

_CHOICES = {
    "views": ("auto", *get_args(Views)),
    "fit": (*get_args(Fit), "patches"),
    "padding": get_args(FitPadding),
}


@dataclass(frozen=True, kw_only=True)
class GANSource(ImageFolder):
    """The files of a GAN dataset; by default alpha is dropped and gray images keep one channel.

    Args:
        views: `none`, `folders`, `sheet`, or `auto`, which follows ``views.json`` in the root, or
            means `none` without it.
        tiles: Views along each side of a sheet; by default tiles have the size of a sample.
        azimuth_deg: Azimuth of the first view, and end of the circle; by default from
            ``views.json``, or 0 to 360.
        elevation_deg: Lowest and highest elevation; by default from ``views.json``, or 0 to 60.
        image_px: (height, width) of a sample.
        fit: `cover`, `contain`, `stretch` and `keep` as in `Fit`, applied once for the store.
            `patches` scales nothing: samples are patches of images of any size, at random places
            for training, otherwise on a grid.
        padding: `reflect`, `border` or `zeros`, if `contain` and `keep` do not fill the sample.
    """

    views: ViewOption = "auto"
    tiles: int | None = None
    azimuth_deg: tuple[float, float] | None = None
    elevation_deg: tuple[float, float] | None = None
    image_px: Size
    fit: FitOption = "cover"
    padding: FitPadding = "reflect"
    read: ReadOptions = field(default_factory=partial(ReadOptions, alpha="drop"))

    def __post_init__(self) -> None:
        """Check everything that can be checked without the disk."""
        super().__post_init__()
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.tiles is not None and self.views != "sheet":
            raise ConfigError(
                f"tiles={self.tiles} divides sheets: set data.views=sheet, or remove data.tiles"
            )
        if self.fit == "patches" and self.views in ("folders", "sheet"):
            raise ConfigError(
                f"views={self.views} with fit=patches: patches have no pose; choose another fit"
            )

    part = "gan"
    takes_shards = True
    sample_spec = GANSampleSpec

    @cached_property
    def layout(self) -> ViewLayout:
        """Layout of the views, from the options, or otherwise from ``views.json`` of the dataset."""
        layout = read_layout(self.folder)
        # Options take precedence over the file, to read the same images in another way.
        if self.views != "auto" and self.views != layout.views:
            layout = replace(layout, views=self.views, tiles=None)
        layout = replace(
            layout,
            tiles=self.tiles or layout.tiles,
            azimuth_deg=self.azimuth_deg or layout.azimuth_deg,
            elevation_deg=self.elevation_deg or layout.elevation_deg,
        )
        if self.fit == "patches" and layout.views != "none":
            raise ConfigError(
                f"{self.folder} holds views, and fit=patches cuts them: "
                "set data.views=none, or another fit"
            )
        # Without a number of tiles, it follows from the size of a sample.
        if layout.views == "sheet" and layout.tiles is None:
            return replace(layout, tiles=self._count_tiles(self.list_images()))
        return layout

    def list_names(self) -> list[str]:
        """Return the names of all images, good or bad."""
        return [self.name(source.paths[0]) for source in self.list_images()]

    @property
    @override
    def decoder(self) -> Decoder:
        decoder = ImageDecoder(self.read)
        if self.fit == "patches":
            return decoder  # nothing is scaled: patches are cut when they are read
        return FittedDecoder(self.image_px, self.fit, self.padding, self.layout.tiles or 1, decoder)

    @property
    @override
    def scope(self) -> Scope:
        return Scope.of_images(self.patterns, also=(LAYOUT_FILE, *LIST_PATHS))

    @override
    def list_beside(self, scratch: Path) -> dict[str, Path]:
        """Write the layout of the views, including the tiles of sheets, which are found from their images."""
        write_json(scratch / LAYOUT_FILE, asdict(self.layout))
        return super().list_beside(scratch) | {LAYOUT_FILE: scratch / LAYOUT_FILE}

    def _count_tiles(self, sources: Sequence[ImageSource]) -> int:
        """Return the tiles along each side of sheets whose tiles have the size of a sample.

        Raises:
            DataError: Sheets are not square, or differ from each other.
        """
        problems, counts, (height, width) = Problems(), {}, self.image_px
        for source in sources:
            try:
                header = ImageDecoder(self.read).header(source)
            except DataError:
                continue  # found and listed again when it is decoded
            rows, columns = header.height_px / height, header.width_px / width
            if rows != columns or rows != int(rows):
                problems.add(
                    source.paths[0], f"{rows:g} x {columns:g} views of {height} x {width} px"
                )
            counts[self.name(source.paths[0])] = int(rows * columns)
        problems.raise_if_any(
            "sheets need equal numbers of rows and columns of views: set data.tiles or "
            "data.image_px"
        )
        return check_views(counts) if counts else 1


class GANVisuals(Visuals):
    """Visuals of the images of one stage, see `Visuals`.

    Args:
        dataset: Images of the stage.
        values: Pixel values that become 0 and 1.
        plain: Finishes a planned batch without augmentation; None if nothing is augmented.
    """

    def __init__(
        self, dataset: GANDataset, values: ValueRange, plain: Callable[[Batch], Batch] | None
    ) -> None:
        super().__init__(plain)
        self._dataset = dataset
        self._values = values

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        if self._finish_plain or not self._values.whole:  # augmentation blends pixels
            return None
        return self._dataset.bank.dtype.name, self._values

    def views_of(self, number: int) -> Tensor:
        """Return all views of one object: [V, C, h, w] float32 in 0..1."""
        return to_unit(torch.from_numpy(self._dataset.views_of(number)), self._values)


class GANDataModule(BaseDataModule[GANDataset]):
    """Images of one size, with labels, and with poses if objects have several views.

    A batch is a dict:

    ===============  =======================  ==================================================================
    key              shape, dtype             what
    ===============  =======================  ==================================================================
    ``image``        [B, C, H, W] float32     0..1; three channels are R, G, B
    ``label``        [B] int64                class, view or object, as `labels` says; 0 without
    ``view``         [B] int64                number of the view; with views only, as the next two
    ``object``       [B] int64                number of the object among those of all splits
    ``pose``         [B, 2] float32           (azimuth, elevation) of the camera, rad; augmentation does not change it
    ``index``        [B] int64                number of the sample among those of all images
    ``image_index``  [B] int64                number of the image
    ``epoch``        [B] int64                epoch the sample was drawn for
    ===============  =======================  ==================================================================

    Objects have k * k views, from k azimuths and k elevations. The azimuth changes fastest: view =
    number of the elevation * k + number of the azimuth. Views are in a folder for each object,
    sorted by name, or are the tiles of a sheet, row by row. A split has whole objects.

    Args, in addition to those of `GANSource` and `BaseDataModule`:
        splits: Splits of the images, or objects, as in `split_images`; or `same`: each split has
            all of them, as is usual for metrics of generated images.
        image_px: Size of a sample, one number or (height, width).
        labels: `none`, `folders` (the folder of the image or object), `views` or `objects`.
        samples_per_image: Training patches of each image in an epoch, for `fit=patches`.
        value_range: Pixel values that become 0 and 1; by default the full range of an unsigned
            dtype, and 0..1 for float32.
        augment: Augmentation of the training split, or a mapping of stages to augmentations.

    Raises:
        ConfigError: An option is out of its range.
    """

    task = "lit_data.wings.gan.predictions.GenerateTask"
    bank: ImageBank
    table: SampleTable
    batch_keys: Sequence[str] = (
        "image",
        "label",
        "view",
        "object",
        "pose",
        "index",
        "image_index",
        "epoch",
    )

    def __init__(
        self,
        root: PathText | None = None,
        *,
        image_px: int | Size = 64,
        views: ViewOption = "auto",
        tiles: int | None = None,
        azimuth_deg: tuple[float, float] | None = None,
        elevation_deg: tuple[float, float] | None = None,
        labels: Labels = "none",
        fit: FitOption = "cover",
        padding: FitPadding = "reflect",
        samples_per_image: int = 16,
        value_range: tuple[float, float] | None = None,
        loader: LoaderOptions | None = None,
        augment: nn.Module | Mapping[Stage, nn.Module | None] | None = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[FolderKeywords],
    ) -> None:
        super().__init__(loader=loader, batch_format=batch_format)
        self.image_px = pair_px("image_px", image_px)
        self.source: GANSource = GANSource.of(
            root=root,
            image_px=self.image_px,
            views=views,
            tiles=tiles,
            azimuth_deg=azimuth_deg,
            elevation_deg=elevation_deg,
            fit=fit,
            padding=padding,
            **options,
        )
        if value_range is not None:
            self.source = self.source.keeping_numbers()
        self.labels = labels
        self.samples_per_image = samples_per_image
        self.value_range = value_range
        self.augment = stage_augmentations(augment, self.batch_keys)
        self._check()

    @property
    def channels(self) -> int:
        """Number of channels of the images; available after `setup`."""
        return self.bank.channels

    @property
    def num_labels(self) -> int:
        """Number of labels, 0 without labels; available after `setup`."""
        return self.table.num_labels

    @property
    def poses(self) -> Tensor | None:
        """(azimuth, elevation) of each view in rad, [V, 2] float32, None without views; available after `setup`."""
        return None if self.table.poses is None else torch.from_numpy(self.table.poses)

    def build_dataset(self, stage: Stage) -> GANDataset:
        """Return the images of one stage; all images for ``predict``."""
        # Training cuts patches again in each epoch, the other stages those of a grid.
        cut: Cut = "random" if stage == "train" else "grid"
        return GANDataset(
            self.bank,
            self.table,
            samples=None
            if stage == "predict"
            else self.table.samples_of(self.split_objects[stage]),
            image_px=self.image_px,
            cut=cut if self.source.fit == "patches" else "whole",
            samples_per_image=self.samples_per_image,
            seed=self.loader.seed,
        )

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Draw the augmentation of each sample from its own stream."""
        # Numbers are drawn on the host, so that it never waits for the device.
        if stage not in self.augment:
            return batch
        index, epoch = batch["index"].numpy(), int(batch["epoch"][0])
        return batch | self.augment[stage].draw(
            self.loader.seed, epoch, index, batch["image"].shape[1]
        )

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Cast to 0..1 and augment."""
        return self._finish(batch, self.augment.get(stage))

    @override
    def inspect(self, stage: Stage) -> GANVisuals:
        plain = partial(self._finish, augment=None) if stage in self.augment else None
        return GANVisuals(self.dataset(stage), self._values, plain)

    @override
    def check_sources(self) -> dict[str, int]:
        report = super().check_sources()
        table = self._tabulate(self.source.list_names(), ())  # of all files, also of bad ones
        counts = {f"{split}_objects": len(objects) for split, objects in self._split(table).items()}
        return report | {"objects": len(table.objects)} | counts

    def describe(self) -> dict[str, Any]:
        """Return facts about the opened dataset: images, objects, samples by split, labels, bytes of its pixels."""
        views = 0 if self.table.poses is None else len(self.table.poses)
        counts = {"objects": len(self.table.objects), "views": views, "labels": self.num_labels}
        return super().describe() | counts

    def _finish(self, batch: PlannedBatch, augment: Augmentation | None) -> Batch:
        images = to_unit(batch["image"], self._values)
        if augment is not None:
            images = augment.forward(Layers(images), batch).images
        return {key: batch[key] for key in self.batch_keys if key in batch} | {"image": images}

    @override
    def open_source(self) -> None:
        bank = self.source.open_images()
        self._values = find_unit_range(bank.dtype, self.value_range)
        names = [self.source.name(bank.name(number)) for number in range(len(bank))]
        self.table = self._tabulate(names, [self.source.name(path) for path, _ in bank.skipped])
        self.split_objects = self._split(self.table)
        self.bank = bank

    def _tabulate(self, names: Sequence[str], skipped: Sequence[str]) -> SampleTable:
        in_splits = lie_in_splits(names, self.source.splits)
        return tabulate(
            names, self.source.layout, self.labels, skipped=skipped, in_splits=in_splits
        )

    def _split(self, table: SampleTable) -> dict[str, Ints]:
        if self.source.splits == "same":  # as is usual for metrics of generated images
            return dict.fromkeys(SPLITS, np.arange(len(table.objects)))
        return self.source.split(table.objects)

    def _check(self) -> None:
        check_choice("labels", self.labels, get_args(Labels))
        for stage, augment in self.augment.items():
            if augment.crop_px not in (None, self.image_px):
                raise ConfigError(
                    f"the augmentation of {stage} crops to {augment.crop_px}: samples of all stages have one size, set "
                    "data.image_px"
                )
