"""Bitmaps of texts, drawn once in a few sizes."""

import math
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_data.core.errors import ConfigError
from lit_data.core.opening import check_regular, naming
from lit_data.core.recent_cache import LruCache
from lit_data.core.types import Array
from lit_data.wings.watermarks.plan import WatermarkSpec

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

BUILT_IN = ""
"""Name of the font that comes with Pillow (``PIL.ImageFont.load_default``): Aileron Regular by Sora
Sagano, CC0."""
SYSTEM = "system"

_SUFFIXES = (".ttf", ".otf")
_PROBE_PX = 24

SMALLEST_PX = 16.0
"""Font size of the smallest bitmap; the next is larger by sqrt(2), and no warp shrinks more."""

_FREETYPE = threading.Lock()  # a face of FreeType must not be used by two threads at once


def find_fonts(fonts: str | Sequence[str] | None, texts: Iterable[str]) -> tuple[str, ...]:
    """Find font files that have every character of some texts.

    Args:
        fonts: See `WatermarkSpec`.
        texts: The texts.

    Returns:
        Paths of the fonts, sorted by name; `BUILT_IN` for Pillow's own font. Installed fonts that
        lack a character are skipped.

    Raises:
        ConfigError: A font is missing, cannot be read or lacks a character, or none is left.
    """
    _check_pillow()
    # A space needs no glyph.
    characters = "".join(sorted(set("".join(texts)) - {" "}))
    if fonts == SYSTEM:
        return _find_installed(characters)
    paths: list[str] = []
    if fonts is None:
        paths.append(BUILT_IN)
    else:
        for name in [fonts] if isinstance(fonts, str) else fonts:
            paths += _expand(name)
    if not paths:
        raise ConfigError("fonts=[] is empty: use null for the font of Pillow")
    for path in paths:
        missing = _find_missing(path, characters)
        if missing:
            raise ConfigError(
                f"fonts: {path or 'the font of Pillow'} has no glyph for {missing[:20]!r}: name "
                "another font, or change texts"
            )
    return tuple(paths)


@lru_cache(maxsize=512)
def open_font(path: str, size_px: int) -> "FreeTypeFont":
    """Open a font in one size; kerning and shaping do not depend on the build of Pillow.

    Raises:
        ConfigError: The file is not a font.
    """
    from PIL import ImageFont

    try:
        if path == BUILT_IN:
            font = ImageFont.load_default(size_px)
            assert isinstance(font, ImageFont.FreeTypeFont)  # see `_check_pillow`
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
    """Return the fonts of a file or folder.

    Raises:
        ConfigError: There is no such file, or the folder has no font.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        font_paths = _list_folder(path)
        if not font_paths:
            raise ConfigError(f"fonts: the folder {path} holds no {' or '.join(_SUFFIXES)} file")
        return font_paths
    if not path.is_file():
        raise ConfigError(
            f"fonts: {path} does not exist: name a font file, a folder of them, system, or null "
            "for the font that comes with Pillow"
        )
    return (str(path),)


def _list_folder(folder: Path) -> tuple[str, ...]:
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES]
    for path in paths:
        with naming(path):
            check_regular(path)
    return tuple(sorted(map(str, paths)))


def _find_installed(characters: str) -> tuple[str, ...]:
    installed: list[str] = []
    for folder in system_folders():
        if folder.is_dir():
            installed += _list_folder(folder)
    usable = tuple(path for path in sorted(installed) if _is_usable(path, characters))
    if not usable:
        raise ConfigError(
            f"fonts=system: none of the {len(installed)} installed fonts holds all characters of "
            "the texts"
        )
    return usable


def system_folders() -> tuple[Path, ...]:
    """Return the folders in which this system keeps its fonts."""
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
        return not _find_missing(path, characters)
    except ConfigError:
        return False


def _find_missing(path: str, characters: str) -> str:
    """Return the characters that a font does not draw, or draws like a missing one."""
    font = open_font(path, _PROBE_PX)
    # No font has this character, so it is drawn as the placeholder for a missing one.
    placeholder = _print_glyph(font, "\U0010fffd")
    missing = ""
    for character in characters:
        if _print_glyph(font, character) in (placeholder, None):
            missing += character
    return missing


def _print_glyph(font: "FreeTypeFont", character: str) -> tuple[tuple[int, int], bytes] | None:
    mask = font.getmask(character)
    return (mask.size, bytes(mask)) if mask.getbbox() else None


class GlyphBank:
    """Bitmaps of the texts of a specification, drawn at first use.

    The cache is bounded, and threads may share it. A pickled copy has the same fonts and starts
    with an empty cache.

    Args:
        spec: Texts, fonts, and bytes of the cache.

    Raises:
        ConfigError: A font is missing or lacks a character.
    """

    def __init__(self, spec: WatermarkSpec) -> None:
        self.spec = spec
        self.fonts = find_fonts(spec.fonts, spec.words)
        self.cache: LruCache[tuple[int, int, int, int], Array] = LruCache(spec.cache_bytes)

    def get(self, text: int, font: int, level: int, outline_px: int) -> Array:
        """Return the coverage of one text.

        Args:
            text: Number of the text.
            font: Number of the font.
            level: Number of the size, see `level_of`.
            outline_px: Width of the outline; 0 fills the letters.

        Returns:
            [h, w] uint8 in 0..255, read-only, with an empty edge of one pixel.
        """
        words, path = self.spec.words[text], self.fonts[font]
        load = partial(draw_text, words, path, size_of(level), outline_px)
        return self.cache.get_or_load((text, font, level, outline_px), load)


def level_of(size_px: float) -> int:
    """Return the number of the smallest bitmap that is at least as large as a font size."""
    # Rounding must not make the size of a bitmap look larger than itself.
    return max(0, math.ceil(2 * math.log2(size_px / SMALLEST_PX) - 1e-9))


def size_of(level: int) -> int:
    """Return the font size of a bitmap in px."""
    return math.ceil(SMALLEST_PX * 2 ** (level / 2))


def draw_text(text: str, font: str, size_px: int, outline_px: int) -> Array:
    """Draw a text; see `GlyphBank.get`."""
    from PIL import Image, ImageDraw

    with _FREETYPE:
        face = open_font(font, size_px)
        left, top, right, bottom = face.getbbox(text, stroke_width=outline_px)
        first_x, first_y = math.floor(left) - 1, math.floor(top) - 1  # an empty edge of one pixel
        width, height = math.ceil(right) + 1 - first_x, math.ceil(bottom) + 1 - first_y
        image = Image.new("L", (width, height))
        anchor = (-first_x, -first_y)
        pen = ImageDraw.Draw(image)
        pen.text(anchor, text, fill=255, font=face, stroke_width=outline_px)
        if outline_px:
            pen.text(anchor, text, fill=0, font=face)  # leaves the outline
    return np.array(image)
