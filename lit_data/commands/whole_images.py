"""Whole images as ``predict`` reads them: stored pixels, and what makes them what patches were in training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lit_data.datamodules import StripeDataModule, WatermarkDataModule
from lit_data.errors import ConfigError
from lit_data.io.bank import ImageBank
from lit_data.synthesis.values import ValueRange
from lit_data.types import Array

_COLOURS: Final = 3


@dataclass(frozen=True, kw_only=True)
class WholeImages:
    """Images of any sizes, with what is done to their pixels.

    Args:
        bank: Stored pixels [C, H, W].
        names: Path of each image below the root, with forward slashes.
        channels: For each channel that a model gets the one of a tile.
        value_range: Pixel values that become 0 and 1; None: the whole range of the dtype, and floats as they are.
        finish: Makes an image [C, H, W] what the model gets; None: its stored pixels are that, but for the range.
    """

    bank: ImageBank
    names: Sequence[str]
    channels: tuple[int, ...]
    value_range: tuple[float, float] | None
    finish: Callable[[int], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tile_channels(self) -> int:
        """Channels of a tile."""
        return self.bank.channels if self.finish is None else len(self.channels)

    def load(self, number: int) -> Array | Tensor:
        """One image as it goes to the predictor: [C, H, W].

        Raises:
            DataError: Its file is bad.
        """
        return self.bank[number] if self.finish is None else self.finish(number)

    def count_px(self, number: int) -> int:
        """Pixels of an image."""
        return int(self.bank.heights_px[number] * self.bank.widths_px[number])

    def count_sizes(self) -> int:
        """How many different sizes there are."""
        return len(np.unique(np.stack((self.bank.heights_px, self.bank.widths_px)), axis=1).T)

    def exceed(self, size_px: tuple[int, int]) -> bool:
        """Whether any image is higher or wider."""
        return bool((self.bank.heights_px > size_px[0]).any() or (self.bank.widths_px > size_px[1]).any())

    def stamp(self, number: int) -> list[int]:
        """Size and time of the file of an image, which change with it."""
        found = Path(self.bank.name(number)).stat()
        return [found.st_size, found.st_mtime_ns]


def open_stripe_images(datamodule: StripeDataModule) -> WholeImages:
    """The images of a stripe set.

    Where their finishing is more than choosing channels and scaling (a nuisance for layout `single`, an augmentation
    of the predict stage), an image is finished whole by the datamodule, as one patch would be.
    """
    transform = datamodule.transformation
    names = datamodule.source_files.names(datamodule.bank)
    if transform.nuisance is not None or "predict" in transform.augment:
        return WholeImages(
            bank=datamodule.bank,
            names=names,
            channels=tuple(range(len(transform.expand))),
            value_range=None,
            finish=lambda number: _finish(datamodule, number),
        )
    values = transform.values
    span = None if values == ValueRange() else (values.low, values.high)
    return WholeImages(bank=datamodule.bank, names=names, channels=transform.expand, value_range=span)


def open_watermark_images(datamodule: WatermarkDataModule) -> WholeImages:
    """The images of a watermark set, as they are.

    Raises:
        ConfigError: The predict stage has an augmentation.
    """
    if "predict" in datamodule.transformation.augment:
        raise ConfigError("predict takes watermarked images as they are: leave predict out of data.augment")
    bank = datamodule.bank
    names = datamodule.source.names(bank)
    return WholeImages(bank=bank, names=names, channels=tuple(range(_COLOURS)), value_range=None)


def _finish(datamodule: StripeDataModule, number: int) -> Tensor:
    pixels = np.array(datamodule.bank[number])  # a copy, as torch warns of arrays that cannot be written
    own, zero = torch.tensor([number]), torch.zeros(1, dtype=torch.int64)
    place = {"index": own, "image_index": own, "position": torch.zeros(1, 2, dtype=torch.int64), "epoch": zero}
    finished = datamodule.transform({"image": torch.from_numpy(pixels)[None], **place}, "predict")["image"][0]
    if finished.shape[1:] != pixels.shape[1:]:
        raise ConfigError(
            f"the augmentation of the predict stage makes {list(finished.shape[1:])} of {list(pixels.shape[1:])} px: "
            "maps have the size of their images, so leave out what crops or resizes"
        )
    return finished
