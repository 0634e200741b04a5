"""Pictures of verdicts: an image in 8 bits with its defects, objects or marks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_inspect.boxes import Box
from lit_inspect.marks import tint
from lit_inspect.tiles import Rows

Picture = NDArray[np.uint8]

_FOUND = (43, 214, 106)  # the color of `predict`, which draws missed defects in red
_LINE_PX = 500  # pixels of the longest side for each pixel of line width
_LETTER_PX = 30  # height of OpenCV's font at scale 1


@dataclass(frozen=True, slots=True)
class Shown:
    """Image of a verdict for pictures.

    Attributes:
        image: Pixels of the image, in memory or in a file.
        channels: Numbers of the channels for R, G and B, or of the one to show in gray.
        threshold: Least probability of the pixels of a defect.
    """

    image: Rows
    channels: tuple[int, ...]
    threshold: float

    def paint(self) -> Picture:
        """Return the image, [H, W, 3]; dtypes other than uint8 are scaled to its range of values."""
        pixels = self.image.read(0, self.image.shape[1])[list(self.channels)]
        grey_or_colours = _to_bytes(pixels) if pixels.dtype != np.uint8 else pixels
        planes = np.broadcast_to(grey_or_colours, (3, *pixels.shape[1:]))
        return np.ascontiguousarray(np.moveaxis(planes, 0, -1))

    def tint(self, probability: NDArray[np.float32]) -> Picture:
        """Return the image with its marked pixels tinted red."""
        return tint(np.moveaxis(self.paint(), -1, 0), probability, self.threshold)

    def outline(self, probability: NDArray[np.float32]) -> Picture:
        """Return the image with a green line around the pixels that reach the threshold."""
        import cv2

        picture = self.paint()
        is_found = (probability >= self.threshold).astype(np.uint8)
        contours, _ = cv2.findContours(is_found, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(picture, contours, -1, _FOUND, self._line_px)
        return picture

    def frame(self, boxes: Sequence[Box]) -> Picture:
        """Return the image with a green frame around each object, and its class and score."""
        import cv2

        picture = self.paint()
        scale = (9 + 3 * self._line_px) / _LETTER_PX
        for box in boxes:
            left, top = round(box.left), round(box.top)
            corner = round(box.right) - 1, round(box.bottom) - 1
            cv2.rectangle(picture, (left, top), corner, _FOUND, self._line_px)
            text = f"{box.name} {box.score:.2f}"
            place = left, top - 2 if top > scale * _LETTER_PX else corner[1] - 2
            cv2.putText(picture, text, place, cv2.FONT_HERSHEY_SIMPLEX, scale, _FOUND)
        return picture

    @property
    def _line_px(self) -> int:
        return max(1, round(max(self.image.shape[1:]) / _LINE_PX))


def _to_bytes(pixels: NDArray[Any]) -> Picture:
    low, high = float(pixels.min()), float(pixels.max())
    unit = (pixels.astype(np.float32) - low) / max(high - low, 1e-6)
    picture: Picture = np.rint(255 * unit).astype(np.uint8)
    return picture
