"""Which font files watermarks are written with."""

import os
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lit_data.errors import ConfigError

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
        Their paths in the order of their names; `BUILT_IN` for Pillow's own font. Of installed fonts those that lack a
        character are left out.

    Raises:
        ConfigError: A font is missing, cannot be read or lacks a character, or none is left.
    """
    _check_pillow()
    characters = "".join(sorted(set("".join(texts)) - {" "}))
    if fonts == SYSTEM:
        return _find_installed(characters)
    named = (fonts,) if isinstance(fonts, str) else fonts
    paths = (BUILT_IN,) if named is None else tuple(path for name in named for path in _expand(name))
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
        raise ConfigError("this Pillow was built without FreeType and cannot draw text: install one from PyPI")


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
    return tuple(sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES))


def _find_installed(characters: str) -> tuple[str, ...]:
    found = [path for folder in _system_folders() if folder.is_dir() for path in _list_folder(folder)]
    usable = tuple(path for path in sorted(found) if _is_usable(path, characters))
    if not usable:
        raise ConfigError(f"fonts=system: none of the {len(found)} installed fonts holds all characters of the texts")
    return usable


def _system_folders() -> tuple[Path, ...]:
    home = Path.home()
    if sys.platform == "darwin":
        return Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library" / "Fonts"
    if sys.platform == "win32":
        return (Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts",)
    return Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), home / ".fonts", home / ".local/share/fonts"


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
