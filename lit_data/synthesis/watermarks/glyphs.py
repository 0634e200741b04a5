"""Texts as bitmaps, drawn once in a few sizes."""

import math
import threading
from functools import partial
from typing import Final

import numpy as np

from lit_data.io.cache import LruCache
from lit_data.synthesis.watermarks.fonts import find_fonts, open_font
from lit_data.synthesis.watermarks.spec import WatermarkSpec
from lit_data.types import Array

SMALLEST_PX: Final = 16.0
"""Font size of the smallest bitmap; each of the next is larger by sqrt(2), so that a warp shrinks by less than that."""

_FREETYPE: Final = threading.Lock()  # a face of FreeType must not be used by two threads at once


class GlyphBank:
    """The texts of a specification, drawn when they are first asked for; bounded, and safe to share between threads.

    A pickled copy knows the same fonts and starts with an empty cache.

    Args:
        spec: Texts, fonts, and bytes to keep.

    Raises:
        ConfigError: A font is missing or lacks a character.
    """

    def __init__(self, spec: WatermarkSpec) -> None:
        self.spec = spec
        self.fonts = find_fonts(spec.fonts, spec.words)
        self.cache: LruCache[tuple[int, int, int, int]] = LruCache(spec.cache_bytes)

    def get(self, text: int, font: int, level: int, outline_px: int) -> Array:
        """The coverage of one text.

        Args:
            text: Its number.
            font: The number of the font.
            level: Number of the size, see `level_of`.
            outline_px: Width of the outline, 0 fills the letters.

        Returns:
            [h, w] uint8 in 0..255, read-only, with an empty edge of one pixel.
        """
        load = partial(draw_text, self.spec.words[text], self.fonts[font], size_of(level), outline_px)
        return self.cache.get_or_load((text, font, level, outline_px), load)


def level_of(size_px: float) -> int:
    """The smallest bitmap that is at least as large as a font size."""
    return max(0, math.ceil(2 * math.log2(size_px / SMALLEST_PX) - 1e-9))


def size_of(level: int) -> int:
    """Font size of a bitmap in px."""
    return math.ceil(SMALLEST_PX * 2 ** (level / 2))


def draw_text(text: str, font: str, size_px: int, outline_px: int) -> Array:
    """Draw a text; see `GlyphBank.get`."""
    from PIL import Image, ImageDraw

    with _FREETYPE:
        face = open_font(font, size_px)
        left, top, right, bottom = face.getbbox(text, stroke_width=outline_px)
        width, height = math.ceil(right) - math.floor(left) + 2, math.ceil(bottom) - math.floor(top) + 2
        image = Image.new("L", (width, height))
        place = 1 - math.floor(left), 1 - math.floor(top)
        pen = ImageDraw.Draw(image)
        pen.text(place, text, fill=255, font=face, stroke_width=outline_px)
        if outline_px:
            pen.text(place, text, fill=0, font=face)
    return np.array(image)
