"""Sources of images for generative models: their files, their views, and the synthetic objects."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.datamodules.image_files import ImageFolder
from lit_data.datamodules.image_transform import to_unit
from lit_data.datamodules.visuals import Visuals
from lit_data.datasets.gan.dataset import GANDataset
from lit_data.datasets.gan.table import LAYOUT_FILE, ViewLayout, Views, check_views, read_layout
from lit_data.errors import ConfigError, DataError, Problems
from lit_data.files import write_json
from lit_data.io.images.decoders import Decoder, ImageDecoder, ImageSource
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.resize import Fit, FitPadding, FittedDecoder
from lit_data.io.remote import Scope
from lit_data.samples.gan import ensure_gan_samples
from lit_data.synthesis.canvas import ValueRange
from lit_data.types import Batch

ViewOption = Literal["auto"] | Views
FitOption = Fit | Literal["patches"]

_CHOICES: Final = {
    "views": ("auto", *get_args(Views)),
    "fit": (*get_args(Fit), "patches"),
    "padding": get_args(FitPadding),
}


@dataclass(frozen=True, kw_only=True)
class GANSource(ImageFolder):
    """The files of a GAN set; by default alpha is dropped and grey images keep one channel.

    Args:
        views: `none`, `folders`, `sheet`, or `auto`: as ``views.json`` in the root says, and `none`
            without it.
        tiles: Views along each side of a sheet; by default tiles have the size of a sample.
        azimuth_deg: Of the first view, and where the circle ends; by default as ``views.json``
            says, or 0 to 360.
        elevation_deg: Lowest and highest; by default as ``views.json`` says, or 0 to 60.
        image_px: (height, width) of a sample.
        fit: `cover`, `contain`, `stretch` and `keep` as `Fit` says, once for the store. `patches`
            scales nothing: samples are patches of images of any size, at random places for
            training, else of a grid.
        padding: `reflect`, `border` or `zeros`, where `contain` and `keep` leave room.
    """

    views: ViewOption = "auto"
    tiles: int | None = None
    azimuth_deg: tuple[float, float] | None = None
    elevation_deg: tuple[float, float] | None = None
    image_px: tuple[int, int]
    fit: FitOption = "cover"
    padding: FitPadding = "reflect"
    read: ReadOptions = field(default_factory=partial(ReadOptions, alpha="drop"))

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        super().__post_init__()
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.tiles is not None and self.views != "sheet":
            raise ConfigError(
                f"tiles={self.tiles} divides sheets: set data.views=sheet, or leave data.tiles out"
            )
        if self.fit == "patches" and self.views in ("folders", "sheet"):
            raise ConfigError(
                f"views={self.views} with fit=patches: patches have no pose; choose another fit"
            )

    part = "gan"
    takes_shards = True
    draw = staticmethod(ensure_gan_samples)

    @cached_property
    def layout(self) -> ViewLayout:
        """Layout of the views: as the options say, and otherwise as ``views.json`` of the dataset."""
        layout = read_layout(self.folder)
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
        if layout.views == "sheet" and layout.tiles is None:
            return replace(layout, tiles=self._count_tiles(self.list_images()))
        return layout

    def list_names(self) -> list[str]:
        """Names of all images, good or bad."""
        return [self.name(source.paths[0]) for source in self.list_images()]

    @property
    @override
    def decoder(self) -> Decoder:
        decoder = ImageDecoder(self.read)
        if self.fit == "patches":
            return decoder
        return FittedDecoder(self.image_px, self.fit, self.padding, self.layout.tiles or 1, decoder)

    @property
    @override
    def _scope(self) -> Scope:
        return Scope.of_images(self.patterns, also=(LAYOUT_FILE,))

    @override
    def list_beside(self, scratch: Path) -> dict[str, Path]:
        """The layout of the views; the tiles of sheets, which their images say, are written into it."""
        write_json(scratch / LAYOUT_FILE, asdict(self.layout))
        return {LAYOUT_FILE: scratch / LAYOUT_FILE}

    def _count_tiles(self, sources: Sequence[ImageSource]) -> int:
        """Tiles along each side of sheets whose tiles have the size of a sample.

        Raises:
            DataError: They are not square, or not all the same.
        """
        problems, counts, (height, width) = Problems(), {}, self.image_px
        for source in sources:
            try:
                header = ImageDecoder(self.read).header(source)
            except DataError:
                continue  # found again, and listed, where it is decoded
            rows, columns = header.height_px / height, header.width_px / width
            if rows != columns or rows != int(rows):
                problems.add(
                    source.paths[0], f"{rows:g} x {columns:g} views of {height} x {width} px"
                )
            counts[self.name(source.paths[0])] = int(rows * columns)
        problems.raise_if_any(
            "sheets need as many views across as down: set data.tiles or data.image_px"
        )
        return check_views(counts) if counts else 1


class GANVisuals(Visuals):
    """See `Visuals`.

    Args:
        dataset: The images of the stage.
        values: The pixel values that become 0 and 1.
        plain: Finishes a planned batch without augmentation; none where nothing is augmented.
    """

    def __init__(
        self, dataset: GANDataset, values: ValueRange, plain: Callable[[Batch], Batch] | None
    ) -> None:
        self._dataset, self._values, self._plain = dataset, values, plain

    @override
    def draw(self, batch: Batch) -> Batch | None:
        return self._plain(batch) if self._plain else None

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        if self._plain or not self._values.whole:
            return None
        return self._dataset.bank.dtype.name, self._values

    def views_of(self, number: int) -> Tensor:
        """All views of one object: [V, C, h, w] float32 in 0..1."""
        return to_unit(torch.from_numpy(self._dataset.views_of(number)), self._values)
