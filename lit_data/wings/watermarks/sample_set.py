"""Default backgrounds of the watermark experiment: pages, photographs and textures, made once."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from typing_extensions import override

from lit_data.core.types import Array, Bytes, Size
from lit_data.datasets.synthetic.sample_set import SampleSpec, open_streams
from lit_data.datasets.synthetic.surfaces import draw_cloud, draw_texture
from lit_data.images.writing import write_png
from lit_data.wings.watermarks.glyphs import BUILT_IN, open_font

_LETTERS = np.array(list("  etaoinshrdlcumwfgypbvk"))
_ODDS = np.arange(len(_LETTERS), 0, -1) / sum(range(len(_LETTERS) + 1))

SMALLEST_SIDE_PX = 96  # room for a line of text
JPEG_QUALITY = 90

README = """Backgrounds for watermarks, made by lit_data (lit_data.wings.watermarks.sample_set). Synthetic, CC0.

train/, val/, test/   page_*.png     gray: a heading, paragraphs and pictures; the words have no meaning
                      photo_*.jpg    color: sky, hills, balls
                      texture_*.png  gray: surfaces
                      Half of the images are pages, 40 % photographs, 10 % textures. No image has a watermark.
samples.json          what the dataset was made from, and the size of each file. If it is missing, the dataset is
                      made again.
"""


def draw_photo(rng: np.random.Generator, size_px: Size) -> Bytes:
    """Draw one photograph.

    Args:
        rng: Random number generator.
        size_px: (height, width).

    Returns:
        [3, H, W] uint8, R, G, B.
    """
    height, width = size_px
    rows, columns = np.arange(height)[:, None], np.arange(width)
    image = rng.uniform(0.4, 1, (3, 1, 1)) * (0.7 + 0.3 * draw_cloud(rng, size_px, 3, 1.0))
    # Hills from the horizon forward, each in front of the previous one.
    for horizon in 0.3 + 0.2 * np.arange(int(rng.integers(1, 4))):
        line = height * (horizon + 0.5 * draw_cloud(rng, (1, width), 4, 1.0)[0] - 0.1)
        ground = 0.6 + 0.8 * draw_cloud(rng, size_px, 6, rng.uniform(0.3, 1))
        np.copyto(image, rng.uniform(0.1, 0.7, (3, 1, 1)) * ground, where=rows > line)
    for _ in range(int(rng.integers(2, 9))):
        radius = rng.uniform(0.03, 0.2) * min(size_px)
        y = (rows - rng.uniform(0, height)) / radius
        x = (columns - rng.uniform(0, width)) / radius
        # Lit from the upper left.
        shade = 1.1 - 0.5 * np.hypot(y + 0.4, x + 0.4)
        np.copyto(image, rng.uniform(0, 1, (3, 1, 1)) * shade, where=y**2 + x**2 < 1)
    image += rng.normal(0, rng.uniform(0.004, 0.02), image.shape)
    return np.asarray(np.rint(image.clip(0, 1) * 255), np.uint8)


def draw_page(rng: np.random.Generator, size_px: Size) -> Bytes:
    """Draw one page.

    Args:
        rng: Random number generator.
        size_px: (height, width).

    Returns:
        [H, W] uint8.
    """
    height, width = size_px
    ink = np.full(size_px, 255, np.uint8)
    margin, columns = round(width * rng.uniform(0.05, 0.1)), int(rng.integers(1, 3))
    heading = ink[margin:, margin : width - margin]
    top = margin + _write_lines(heading, rng, lines=1, size_px=int(rng.integers(18, 30)))
    # Columns share the width between the margins; the last one has no gap after it.
    pitch_px, gap_px = (width - 2 * margin) // columns, width // 25
    for left in margin + pitch_px * np.arange(columns):
        y, letters_px = top, int(rng.integers(9, 15))
        while y < height - margin - 3 * letters_px:
            rest = ink[y : height - margin, left : left + pitch_px - gap_px]
            if rng.random() < 0.1:
                picture = rest[: int(pitch_px * rng.uniform(0.3, 0.7))]
                picture[:] = draw_texture(rng, picture.shape)
                y += len(picture)
            else:
                y += _write_lines(rest, rng, lines=int(rng.integers(3, 9)), size_px=letters_px)
            y += letters_px
    return _light(ink, rng)


def _write_lines(ink: Bytes, rng: np.random.Generator, *, lines: int, size_px: int) -> int:
    """Write as many lines of words as fit, from the top of a white area; return their height in px."""
    from PIL import Image, ImageDraw

    image = Image.new("L", ink.shape[::-1], 255)
    pen, font = ImageDraw.Draw(image), open_font(BUILT_IN, size_px)
    pitch_px, grey = round(1.3 * size_px), int(rng.integers(0, 60))
    height_px = min(lines, len(ink) // pitch_px) * pitch_px
    for y in range(0, height_px, pitch_px):
        # Longer than an area is wide: everything beyond its edge is cut off.
        letters = rng.choice(_LETTERS, len(ink[0]) // 4 + 1, p=_ODDS)
        pen.text((0, y), "".join(letters), fill=grey, font=font)
    ink[:height_px] = np.asarray(image)[:height_px]
    return height_px


def _light(ink: Bytes, rng: np.random.Generator) -> Bytes:
    """Return the page as a scanner or a camera sees it."""
    rows, columns = (np.linspace(-1, 1, size) for size in ink.shape)
    slope = rng.uniform(0, 0.12, 2) * rng.choice((-1, 1), 2)
    light = rng.uniform(0.82, 1.0) * (1 + slope[0] * rows[:, None] + slope[1] * columns)
    noise = rng.normal(0, rng.uniform(0, 2.0), ink.shape)
    return np.asarray(np.rint(ink * light + noise).clip(0, 255), np.uint8)


@dataclass(frozen=True, kw_only=True)
class WatermarkSampleSpec(SampleSpec):
    """Recipe of backgrounds; equal specs give equal pixels (photographs: before compression).

    Args:
        size_px: (height, width) of a page; photographs swap both.
    """

    kind = "watermark"
    sides = (SMALLEST_SIDE_PX, 2**13)
    format_version = 2
    readme = README

    count: int = 60
    size_px: Size = (640, 480)

    def kind_of(self, number: int) -> str:
        """Return ``page``, ``photo`` or ``texture``."""
        return "page" if number % 2 == 0 else "texture" if number % 10 == 9 else "photo"

    @override
    def write_samples(self, root: Path, numbers: Iterable[int]) -> None:
        height, width = self.size_px
        for number in numbers:
            (rng,) = open_streams(self.seed, number, 1)
            kind = self.kind_of(number)
            path = root / self.split_of(number) / f"{kind}_{number:04d}"
            if kind == "photo":
                _write_jpeg(path.with_suffix(".jpg"), draw_photo(rng, (width, height)))
                continue
            draw = draw_page if kind == "page" else draw_texture
            write_png(path.with_suffix(".png"), draw(rng, (height, width))[..., None])


def _write_jpeg(path: Path, pixels: Array) -> None:
    import cv2

    image = np.ascontiguousarray(np.moveaxis(pixels, 0, -1)[..., ::-1])  # OpenCV wants B, G, R
    path.write_bytes(
        cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()
    )
