"""Files of tests that ask for their names alone, and pictures."""

from pathlib import Path
from typing import Any

from PIL import Image

from lit_data.core.types import Array


def touch(folder: Path, *names: str) -> Path:
    """Write files of one byte below a folder; return the folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


def save_picture(path: Path, pixels: Array, **options: Any) -> Path:
    """Write pixels in the format of the name, with options of Pillow; return the path."""
    Image.fromarray(pixels).save(path, **options)
    return path
