"""Texts as bitmaps, drawn once in a few sizes."""

import math
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from lit_data.errors import ConfigError
from lit_data.io.cache import LruCache
from lit_data.synthesis.watermarks.spec import WatermarkSpec
from lit_data.types import Array

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

BUILT_IN: Final = ""
"""Stands for the font that comes with Pillow: Aileron Regular by Sora Sagano, CC0 (``PIL.ImageFont.load_default``)."""
SYSTEM: Final = "system"

_SUFFIXES: Final = (".ttf", ".otf")
_PROBE_PX: Final = 24


def find_fonts(fonts: str | Sequence[str] | None, texts: Iterable[str]) -> tuple[str, ...]:
    """Find font files that hold every character of some texts.

    Args:
        fonts: See `WatermarkSpec`.
        texts: What will be written.

    Returns:
        Their paths in the order of their names; `BUILT_IN` for Pillow's own font. Of installed
        fonts those that lack a character are left out.

    Raises:
        ConfigError: A font is missing, cannot be read or lacks a character, or none is left.
    """
    _check_pillow()
    characters = "".join(sorted(set("".join(texts)) - {" "}))
    if fonts == SYSTEM:
        return _find_installed(characters)
    named = (fonts,) if isinstance(fonts, str) else fonts
    paths = (
        (BUILT_IN,) if named is None else tuple(path for name in named for path in _expand(name))
    )
    if not paths:
        raise ConfigError("fonts=[] names no font: use null for the one that comes with Pillow")
    for path in paths:
        lacking = _find_lacking(path, characters)
        if lacking:
            raise ConfigError(
                f"fonts: {path or 'the font of Pillow'} has no glyph for {lacking[:20]!r}: name another font, or "
                "change texts"
            )
    return paths


@lru_cache(maxsize=512)
def open_font(path: str, size_px: int) -> "FreeTypeFont":
    """A font in one size; kerning and shaping do not depend on how Pillow was built.

    Raises:
        ConfigError: The file is no font.
    """
    from PIL import ImageFont

    try:
        if path == BUILT_IN:
            font = ImageFont.load_default(size_px)
            assert isinstance(font, ImageFont.FreeTypeFont)  # _check_pillow has seen to it
            return font
        return ImageFont.truetype(path, size_px, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise ConfigError(f"fonts: {path} cannot be read as a font ({error})") from error


def _check_pillow() -> None:
    from PIL import features

    if not features.check("freetype2"):
        raise ConfigError(
            "this Pillow was built without FreeType and cannot draw text: install one from PyPI"
        )


def _expand(name: str) -> tuple[str, ...]:
    path = Path(name).expanduser()
    if path.is_dir():
        found = _list_folder(path)
        if not found:
            raise ConfigError(f"fonts: the folder {path} holds no {' or '.join(_SUFFIXES)} file")
        return found
    if not path.is_file():
        raise ConfigError(
            f"fonts: {path} does not exist: name a font file, a folder of them, system, or null for the font that "
            "comes with Pillow"
        )
    return (str(path),)


def _list_folder(folder: Path) -> tuple[str, ...]:
    return tuple(
        sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    )


def _find_installed(characters: str) -> tuple[str, ...]:
    found = [
        path for folder in system_folders() if folder.is_dir() for path in _list_folder(folder)
    ]
    usable = tuple(path for path in sorted(found) if _is_usable(path, characters))
    if not usable:
        raise ConfigError(
            f"fonts=system: none of the {len(found)} installed fonts holds all characters of the texts"
        )
    return usable


def system_folders() -> tuple[Path, ...]:
    """Where this system keeps its fonts."""
    home = Path.home()
    if sys.platform == "darwin":
        return Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library" / "Fonts"
    if sys.platform == "win32":
        return (Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts",)
    return (
        Path("/usr/share/fonts"),
        Path("/usr/local/share/fonts"),
        home / ".fonts",
        home / ".local/share/fonts",
    )


def _is_usable(path: str, characters: str) -> bool:
    try:
        return not _find_lacking(path, characters)
    except ConfigError:
        return False


def _find_lacking(path: str, characters: str) -> str:
    """Characters that a font draws as it draws what no font has, or not at all."""
    font = open_font(path, _PROBE_PX)
    missing = _print_glyph(font, "\U0010fffd")
    return "".join(each for each in characters if _print_glyph(font, each) in (missing, None))


def _print_glyph(font: "FreeTypeFont", character: str) -> tuple[tuple[int, int], bytes] | None:
    mask = font.getmask(character)
    return (mask.size, bytes(mask)) if mask.getbbox() else None


SMALLEST_PX: Final = 16.0
"""Font size of the smallest bitmap; each of the next is larger by sqrt(2), so that a warp shrinks by less than that."""

_FREETYPE: Final = threading.Lock()  # a face of FreeType must not be used by two threads at once


class GlyphBank:
    """The texts of a specification, drawn when they are first asked for; bounded, and safe to share
    between threads.

    A pickled copy knows the same fonts and starts with an empty cache.

    Args:
        spec: Texts, fonts, and bytes to keep.

    Raises:
        ConfigError: A font is missing or lacks a character.
    """

    def __init__(self, spec: WatermarkSpec) -> None:
        self.spec = spec
        self.fonts = find_fonts(spec.fonts, spec.words)
        self.cache: LruCache[tuple[int, int, int, int], Array] = LruCache(spec.cache_bytes)

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
        load = partial(
            draw_text, self.spec.words[text], self.fonts[font], size_of(level), outline_px
        )
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
        width, height = (
            math.ceil(right) - math.floor(left) + 2,
            math.ceil(bottom) - math.floor(top) + 2,
        )
        image = Image.new("L", (width, height))
        place = 1 - math.floor(left), 1 - math.floor(top)
        pen = ImageDraw.Draw(image)
        pen.text(place, text, fill=255, font=face, stroke_width=outline_px)
        if outline_px:
            pen.text(place, text, fill=0, font=face)
    return np.array(image)
