"""Images brought to one size once, on their way into a store."""

import json
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

import numpy as np

from lit_data.checks import check_choice
from lit_data.errors import ConfigError, DataError, show_path
from lit_data.io.images.decoders import DecodedSource, ImageDecoder, ImageSource, SourceHeader
from lit_data.types import Array

_RESIZED_FORMAT = 1  # raised when the same images and options give other pixels


@dataclass(frozen=True, slots=True)
class ResizedDecoder:
    """Decodes images and scales them, shape kept, until they fit a size.

    Shrinking takes means over areas, enlarging is bilinear.

    Args:
        fit_px: (height, width) that an image fills in one direction and does not exceed in the
            other.
        decoder: How it is decoded.

    Raises:
        ConfigError: A size is below 1.
    """

    fit_px: tuple[int, int]
    decoder: ImageDecoder = field(default_factory=ImageDecoder)

    def __post_init__(self) -> None:
        """Check the size."""
        if min(self.fit_px) < 1:
            raise ConfigError(f"fit_px={list(self.fit_px)} must be at least 1 pixel high and wide")

    @property
    def fingerprint(self) -> str:
        """JSON of the size, this decoder's format and the inner fingerprint."""
        options = {"decoder": "resized", "format": _RESIZED_FORMAT, "fit_px": self.fit_px}
        return json.dumps(options | {"of": json.loads(self.decoder.fingerprint)}, sort_keys=True)

    def header(self, source: ImageSource) -> SourceHeader:
        """Tell what decoding will give; the errors are those of the inner decoder."""
        header = self.decoder.header(source)
        height, width = fit_size((header.height_px, header.width_px), self.fit_px)
        return header._replace(height_px=height, width_px=width)

    def __call__(self, source: ImageSource) -> DecodedSource:
        """Decode strictly, then scale."""
        decoded = self.decoder(source)
        size = fit_size((decoded.array.shape[1], decoded.array.shape[2]), self.fit_px)
        return replace(decoded, array=resize_planes(decoded.array, size))


def fit_size(size_px: tuple[int, int], fit_px: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of an image that was scaled to fit."""
    scale = min(fit / size for fit, size in zip(fit_px, size_px, strict=True))
    height, width = (
        min(fit, max(1, round(size * scale))) for fit, size in zip(fit_px, size_px, strict=True)
    )
    return height, width


def resize_planes(image: Array, size_px: tuple[int, int]) -> Array:
    """[C, H, W] to [C, h, w], plane by plane: means over areas to shrink, bilinear to enlarge."""
    import cv2

    if image.shape[1:] == size_px:
        return image
    smaller = size_px[0] * size_px[1] < image.shape[1] * image.shape[2]
    method = cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
    return np.stack([cv2.resize(plane, size_px[::-1], interpolation=method) for plane in image])


Fit = Literal["cover", "contain", "stretch", "keep"]
"""How an image comes to a size: scaled until it covers it, or until it fits inside; each side
scaled by itself; or not scaled at all. What stands over is cut off, and what is missing is padded,
evenly on both sides."""

FitPadding = Literal["reflect", "border", "zeros"]
"""What is padded with: the image mirrored, its outermost pixels, or 0."""

_FORMAT = 1  # raised when the same images and options give other pixels
_PAD_MODES: Final = {"reflect": "reflect", "border": "edge", "zeros": "constant"}


@dataclass(frozen=True, slots=True)
class FittedDecoder:
    """Decodes images, or sheets of square numbers of images, and brings each of them to one size.

    Shrinking takes means over areas, enlarging is bilinear.

    Args:
        size_px: (height, width) that comes out; of each tile of a sheet.
        fit: See `Fit`.
        padding: See `FitPadding`.
        tiles: Tiles along each side of a sheet; 1 for images.
        decoder: How it is decoded.

    Raises:
        ConfigError: A size is below 1, or a word is unknown.
    """

    size_px: tuple[int, int]
    fit: Fit = "cover"
    padding: FitPadding = "reflect"
    tiles: int = 1
    decoder: ImageDecoder = field(default_factory=ImageDecoder)

    def __post_init__(self) -> None:
        """Check what was asked for."""
        if min(*self.size_px, self.tiles) < 1:
            raise ConfigError(
                f"size_px={list(self.size_px)} and tiles={self.tiles} must be at least 1"
            )
        for name, choices in (("fit", get_args(Fit)), ("padding", get_args(FitPadding))):
            check_choice(name, getattr(self, name), choices)

    @property
    def fingerprint(self) -> str:
        """JSON of the options, this decoder's format and the inner fingerprint."""
        options = {"decoder": "fitted", "format": _FORMAT, "size_px": self.size_px, "fit": self.fit}
        options |= {
            "padding": self.padding,
            "tiles": self.tiles,
            "of": json.loads(self.decoder.fingerprint),
        }
        return json.dumps(options, sort_keys=True)

    def header(self, source: ImageSource) -> SourceHeader:
        """Tell what decoding will give.

        Raises:
            DataError: As the inner decoder, or a sheet cannot be divided into tiles.
        """
        header = self.decoder.header(source)
        self._check_sheet(source, header.height_px, header.width_px)
        height, width = self.size_px
        return header._replace(height_px=height * self.tiles, width_px=width * self.tiles)

    def __call__(self, source: ImageSource) -> DecodedSource:
        """Decode strictly, then bring to size."""
        decoded = self.decoder(source)
        channels, height, width = decoded.array.shape
        self._check_sheet(source, height, width)
        split = decoded.array.reshape(
            channels, self.tiles, height // self.tiles, self.tiles, width // self.tiles
        )
        fitted = [
            [self._fit(split[:, row, :, column]) for column in range(self.tiles)]
            for row in range(self.tiles)
        ]
        return replace(
            decoded, array=np.concatenate([np.concatenate(row, axis=2) for row in fitted], axis=1)
        )

    def _check_sheet(self, source: ImageSource, height_px: int, width_px: int) -> None:
        if height_px % self.tiles or width_px % self.tiles:
            raise DataError(
                f"{show_path(source.paths[0])}: a sheet of {self.tiles} x {self.tiles} views "
                f"cannot be {height_px} x {width_px} px: its sides must be multiples of "
                f"{self.tiles}"
            )

    def _fit(self, image: Array) -> Array:
        """[C, H, W] to [C, h, w]."""
        size = image.shape[1], image.shape[2]
        return place_centred(
            resize_planes(image, scale_size(size, self.size_px, self.fit)),
            self.size_px,
            self.padding,
        )


def scale_size(size_px: tuple[int, int], fit_px: tuple[int, int], fit: Fit) -> tuple[int, int]:
    """(height, width) that an image is scaled to before what stands over is cut off and what is missing is padded."""
    if fit == "contain":
        return fit_size(size_px, fit_px)
    if fit == "cover":
        scale = max(target / size for target, size in zip(fit_px, size_px, strict=True))
        height, width = (
            max(target, round(size * scale)) for target, size in zip(fit_px, size_px, strict=True)
        )
        return height, width
    return fit_px if fit == "stretch" else size_px


def place_centred(image: Array, size_px: tuple[int, int], padding: FitPadding) -> Array:
    """Crop or pad an image around its centre.

    An odd pixel goes to bottom and right.

    Args:
        image: [C, H, W].
        size_px: (h, w) that comes out.
        padding: See `FitPadding`.

    Returns:
        [C, h, w].
    """
    spare = [have - target for have, target in zip(image.shape[1:], size_px, strict=True)]
    starts = [max(0, each) // 2 for each in spare]
    cut = image[:, starts[0] : starts[0] + size_px[0], starts[1] : starts[1] + size_px[1]]
    before = [max(0, -each) // 2 for each in spare]
    missing = [(first, max(0, -each) - first) for each, first in zip(spare, before, strict=True)]
    if not any(map(any, missing)):
        return cut
    padded: Array = np.pad(cut, ((0, 0), *missing), mode=_PAD_MODES[padding])  # type: ignore[call-overload]
    return padded
