"""Scaling of images to the size that a net takes, and of its answers back to the size of the file."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from lit_inspect.bounds import Sides
from lit_inspect.errors import ImageError

Pixels = NDArray[Any]
Size = tuple[int, int]
Fit = Literal["cover", "contain", "stretch", "keep"]
"""Way to fit an image to a size: scale it until it covers the size, or until it fits inside; scale
each side by itself; or do not scale. The excess is cropped, and missing pixels are padded, evenly
on both sides."""

_MOST_SCALED_PX = 2**27


@dataclass(frozen=True, slots=True)
class Scaling:
    """Size to which images are scaled, see `lit_data.images.scaling`.

    Attributes:
        size_px: (height, width) that images are scaled to fit, and reflect-padded to.
        factor: Factor of height and width, instead of `size_px`.
        fit: ``contain`` keeps the aspect ratio, ``stretch`` scales each side by itself.
    """

    size_px: Sides | None
    factor: Annotated[float, Field(gt=0, le=16)] | None
    fit: Literal["contain", "stretch"] = "contain"

    def __post_init__(self) -> None:
        """Check that exactly one of both is given."""
        if (self.size_px is None) == (self.factor is None):
            raise ValueError("size_px or factor must be set, and not both")

    def scaled_px(self, size_px: Size) -> Size:
        """Return the size of an image of `size_px` after scaling, without padding."""
        return scale_size(size_px, self.size_px, self.fit, self.factor)

    def scale(self, image: Pixels) -> Pixels:
        """Scale an image: [C, H, W] to [C, h, w]."""
        resized = self.resize(image)
        return resized if self.size_px is None else place_centred(resized, self.size_px)

    def resize(self, image: Pixels) -> Pixels:
        """Scale an image without padding: [C, H, W] to [C, h, w].

        Raises:
            ImageError: The image would be too large.
        """
        height, width = self.scaled_px((image.shape[1], image.shape[2]))
        if height * width > max(_MOST_SCALED_PX, image[0].size):
            raise ImageError(f"{height} x {width} px after scaling, more than {_MOST_SCALED_PX}")
        return resize_planes(image, (height, width))

    def restore(self, values: Pixels, size_px: Size) -> Pixels:
        """Scale the values of a scaled image back to the size of its file."""
        return restore(values, self.scaled_px(size_px), size_px)


def scale_size(size_px: Size, fit_px: Size | None, fit: Fit, factor: float | None = None) -> Size:
    """Return the (height, width) that an image is scaled to, before it is cropped or padded; at least 1 x 1.

    Args:
        size_px: (height, width) of the image.
        fit_px: (height, width) of the final result.
        fit: See `Fit`.
        factor: Factor of height and width if there is no `fit_px`.
    """
    height, width = size_px
    if fit_px is None:
        assert factor is not None
        return max(1, round(height * factor)), max(1, round(width * factor))
    if fit == "keep":
        return size_px
    if fit == "stretch":
        return fit_px
    factors = fit_px[0] / height, fit_px[1] / width
    factor = min(factors) if fit == "contain" else max(factors)
    height, width = round(height * factor), round(width * factor)
    # Rounding may miss the required side by a pixel, and a thin side may vanish.
    if fit == "cover":
        return max(fit_px[0], height), max(fit_px[1], width)
    return min(fit_px[0], max(1, height)), min(fit_px[1], max(1, width))


def resize_planes(image: Pixels, size_px: Size) -> Pixels:
    """Resize [C, H, W] to [C, h, w], plane by plane: area means to shrink, bilinear to enlarge."""
    import cv2

    if image.shape[1:] == size_px:
        return image
    is_smaller = size_px[0] * size_px[1] < image.shape[1] * image.shape[2]
    method = cv2.INTER_AREA if is_smaller else cv2.INTER_LINEAR
    return np.stack([cv2.resize(plane, size_px[::-1], interpolation=method) for plane in image])


def place_centred(
    image: Pixels, size_px: Size, mode: Literal["reflect", "edge", "constant"] = "reflect"
) -> Pixels:
    """Crop or pad an image around its center.

    An odd pixel is at the bottom or the right.

    Args:
        image: [C, H, W].
        size_px: (h, w) of the result.
        mode: Padding, as NumPy names it.

    Returns:
        [C, h, w].
    """
    widths = [(0, 0)]
    for axis, target_px in enumerate(size_px, 1):
        spare_px = image.shape[axis] - target_px
        if spare_px > 0:
            image = np.moveaxis(image, axis, 0)[spare_px // 2 :][:target_px]
            image = np.moveaxis(image, 0, axis)
        before_px = max(0, -spare_px) // 2
        widths.append((before_px, max(0, -spare_px) - before_px))
    return image if widths == [(0, 0)] * 3 else np.pad(image, widths, mode=mode)


def restore(values: Pixels, scaled_px: Size, size_px: Size) -> Pixels:
    """Remove the padding and scale back: bilinear to enlarge, area means to shrink.

    Args:
        values: [C, h, w] of a scaled image, such as probabilities.
        scaled_px: (height, width) without padding.
        size_px: (H, W) of its file.

    Returns:
        [C, H, W] of the same dtype.
    """
    restored = resize_planes(place_centred(values, scaled_px), size_px)
    if values.dtype.kind != "f":
        return restored
    # Rounded sums of floats may exceed 1, which would overflow to 0 as an integer.
    return np.clip(restored, values.min(), values.max())
