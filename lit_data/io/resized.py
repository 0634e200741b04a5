"""Images resized once, on their way into a store."""

import json
from dataclasses import dataclass, field, replace

import numpy as np

from lit_data.errors import ConfigError
from lit_data.io.decoders import DecodedSource, ImageDecoder, ImageSource, SourceHeader
from lit_data.types import Array

_FORMAT = 1  # raised when the same images and options give other pixels


@dataclass(frozen=True, slots=True)
class ResizedDecoder:
    """Decodes images and scales them, shape kept, until they fit a size.

    Shrinking takes means over areas, enlarging is bilinear.

    Args:
        fit_px: (height, width) that an image fills in one direction and does not exceed in the other.
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
        options = {"decoder": "resized", "format": _FORMAT, "fit_px": self.fit_px}
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
    height, width = (min(fit, max(1, round(size * scale))) for fit, size in zip(fit_px, size_px, strict=True))
    return height, width


def resize_planes(image: Array, size_px: tuple[int, int]) -> Array:
    """[C, H, W] to [C, h, w], plane by plane: means over areas to shrink, bilinear to enlarge."""
    import cv2

    if image.shape[1:] == size_px:
        return image
    smaller = size_px[0] * size_px[1] < image.shape[1] * image.shape[2]
    method = cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
    return np.stack([cv2.resize(plane, size_px[::-1], interpolation=method) for plane in image])
