"""The default backgrounds of the watermark experiment: pages, photographs and textures, made once."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from typing_extensions import override

from lit_data.io.images.writing import write_png
from lit_data.samples.sample_set import SampleSpec, open_streams
from lit_data.synthesis.watermarks.glyphs import BUILT_IN, open_font
from lit_data.types import Array, Bytes, Floats, Size

Pixels = Bytes

_LETTERS = np.array(list("etaoinshrdlcumwfgypbvk"))
_ODDS = np.arange(len(_LETTERS), 0, -1) / sum(range(len(_LETTERS) + 1))

SMALLEST_SIDE_PX = 96  # room for a line of text
JPEG_QUALITY = 90

README = """Backgrounds for watermarks, made by lit_data (lit_data.samples.watermarks). Synthetic, CC0.

train/, val/, test/   page_*.png     grey: headings, paragraphs, tables and pictures; words without meaning
                      photo_*.jpg    colour: sky, hills, things
                      texture_*.png  grey: surfaces
                      Of ten images five are pages, four photographs, one is a texture. No image has a watermark.
samples.json          what the set was made from, and the size of each file. Without it the set is made again.
"""


def draw_photo(rng: np.random.Generator, size_px: Size) -> Bytes:
    """Draw one photograph.

    Args:
        rng: Where it comes from.
        size_px: (height, width).

    Returns:
        [3, H, W] uint8, R, G, B.
    """
    high, low = rng.uniform(0.2, 1, (3, 1, 1)), rng.uniform(0.1, 0.9, (3, 1, 1))
    share = np.linspace(0, 1, size_px[0])[:, None] + 0.3 * (_cloud(rng, size_px, 3, 1.0) - 0.5)
    image = (high + (low - high) * share.clip(0, 1)).astype(np.float32)
    # Hills from the horizon forwards, each in front of the one before.
    for number in range(int(rng.integers(1, 4))):
        _draw_hill(image, rng, 0.25 + 0.2 * number)
    for _ in range(int(rng.integers(2, 9))):
        _draw_thing(image, rng)
    image += rng.normal(0, rng.uniform(0.004, 0.02), image.shape).astype(np.float32)
    return np.asarray(np.rint(image.clip(0, 1) * 255), np.uint8)


def draw_texture(rng: np.random.Generator, size_px: Size) -> Bytes:
    """Draw a grey surface of grains of many sizes.

    Now and then with joints like those of brick or cloth.

    Returns:
        [H, W] uint8.
    """
    grey = rng.uniform(0.2, 0.5) + rng.uniform(0.2, 0.5) * _cloud(
        rng, size_px, 6, rng.uniform(0.4, 1.2)
    )
    if rng.random() < 0.5:
        pitch, width = rng.integers(12, 60, 2), int(rng.integers(1, 4))
        rows, columns = np.arange(size_px[0])[:, None], np.arange(size_px[1])[None]
        # Every second row of bricks is shifted by half a brick.
        shifted = columns + pitch[1] // 2 * (rows // pitch[0] % 2)
        joints = (rows % pitch[0] < width) | (shifted % pitch[1] < width)
        grey = np.where(joints, rng.uniform(0.2, 0.9), grey)
    return np.asarray(np.rint(grey.clip(0, 1) * 255), np.uint8)


def _draw_hill(image: Floats, rng: np.random.Generator, horizon: float) -> None:
    """Everything below a line that wanders."""
    height, width = image.shape[1:]
    line = height * (horizon + 0.5 * (_cloud(rng, (1, width), 4, 1.0)[0] - 0.5) + 0.2)
    inside = np.arange(height)[:, None] > line
    ground = rng.uniform(0.1, 0.7, (3, 1, 1)) * (
        0.6 + 0.8 * _cloud(rng, (height, width), 6, rng.uniform(0.3, 1))
    )
    np.copyto(image, ground.astype(np.float32), where=inside)


def _draw_thing(image: Floats, rng: np.random.Generator) -> None:
    """A lit ball, or a block with a pattern."""
    height, width = image.shape[1:]
    radius = rng.uniform(0.03, 0.2) * min(height, width)
    y, x = rng.uniform(0, height), rng.uniform(0, width)
    rows, columns = (np.arange(height)[:, None] - y) / radius, (np.arange(width)[None] - x) / radius
    colour = rng.uniform(0, 1, (3, 1, 1))
    if rng.random() < 0.5:
        inside, shade = rows**2 + columns**2 < 1, 1.1 - 0.5 * np.hypot(rows + 0.4, columns + 0.4)
    else:
        inside = np.maximum(abs(rows), abs(columns)) < 1
        shade = 0.7 + 0.3 * np.sign(
            np.sin(rng.uniform(3, 20) * columns) * np.sin(rng.uniform(3, 20) * rows)
        )
    np.copyto(image, (colour * shade).astype(np.float32), where=inside)


def _cloud(rng: np.random.Generator, size_px: Size, octaves: int, decay: float) -> Floats:
    """[H, W] about 0..1: noise of ever finer grain, each octave weaker than the last by 2 ** decay."""
    import cv2

    cloud, total = np.zeros(size_px, np.float32), 0.0
    for octave in range(octaves):
        cells = tuple(min(size, 2 ** (octave + 1) + 1) for size in size_px)
        noise = rng.random(cells, dtype=np.float32)
        # Finer octaves are weaker, which makes the grain smoother the larger the decay.
        weight = 2.0 ** (-decay * octave)
        cloud += weight * cv2.resize(noise, size_px[::-1], interpolation=cv2.INTER_CUBIC)
        total += weight
    return np.asarray(cloud / np.float32(total))


def draw_page(rng: np.random.Generator, size_px: Size) -> Pixels:
    """Draw one page.

    Args:
        rng: Where it comes from.
        size_px: (height, width).

    Returns:
        [H, W] uint8.
    """
    height, width = size_px
    ink = np.full(size_px, 255, np.uint8)
    margin, columns = round(width * rng.uniform(0.05, 0.1)), int(rng.integers(1, 3))
    top = margin + _write_line(
        ink, rng, (margin, margin), width - 2 * margin, int(rng.integers(18, 30)), words=4
    )
    gap = width // 25
    # What margins and gaps leave, shared by the columns.
    column_px = (width - 2 * margin - (columns - 1) * gap) // columns
    for column in range(columns):
        left = margin + column * (column_px + gap)
        _Column(ink, rng, (top, left), height - margin, column_px).fill()
    return _light(ink, rng)


class _Column:
    """Column of a page, filled with blocks from the top.

    Args:
        ink: [H, W] the page, written.
        rng: Source of what is drawn.
        corner: (y, x) px of its first pixel.
        bottom: Row behind its last one.
        width_px: Columns of pixels.
    """

    def __init__(
        self,
        ink: Pixels,
        rng: np.random.Generator,
        corner: tuple[int, int],
        bottom: int,
        width_px: int,
    ) -> None:
        self.ink = ink
        self.rng = rng
        self.y, self.left = corner
        self.bottom = bottom
        self.width_px = width_px
        self.size_px = int(rng.integers(9, 15))

    def fill(self) -> None:
        """Write blocks under each other until no three lines fit."""
        while self.y < self.bottom - 3 * self.size_px:
            kind = self.rng.choice(4, p=(0.7, 0.1, 0.1, 0.1))
            if kind == 0:
                self._write_paragraph()
            elif kind == 1:
                self._write_line(self.size_px + 5, words=3)
            elif kind == 2:
                self._draw_table()
            else:
                self._draw_picture()
            self.y += self.size_px

    def _write_line(self, size_px: int, words: int = 30) -> None:
        corner = self.y, self.left
        self.y += _write_line(self.ink, self.rng, corner, self.width_px, size_px, words=words)

    def _write_paragraph(self) -> None:
        for _ in range(int(self.rng.integers(3, 9))):
            if self.y + self.size_px > self.bottom:
                break
            self._write_line(self.size_px)

    def _draw_table(self) -> None:
        """Draw rows of cells with a word each, and the lines between them."""
        ink, left, right = self.ink, self.left, self.left + self.width_px
        cells, pitch_px = int(self.rng.integers(2, 5)), self.size_px + 6
        rows = min(int(self.rng.integers(3, 8)), (self.bottom - self.y) // pitch_px)
        cell_px = self.width_px // cells - 6
        for row in range(rows):
            top = self.y + row * pitch_px
            ink[top, left:right] = 60
            for cell in range(cells):
                corner = top + 2, left + cell * self.width_px // cells + 3
                _write_line(ink, self.rng, corner, cell_px, self.size_px, words=1)
        end = self.y + rows * pitch_px
        # The lower edge and the lines between cells, within the page.
        ink[min(end, len(ink) - 1), left:right] = 60
        for cell in range(cells + 1):
            ink[self.y : end, min(left + cell * self.width_px // cells, right - 1)] = 60
        self.y = end

    def _draw_picture(self) -> None:
        height_px = min(int(self.width_px * self.rng.uniform(0.3, 0.7)), self.bottom - self.y)
        picture = draw_texture(self.rng, (height_px, self.width_px))
        self.ink[self.y : self.y + height_px, self.left : self.left + self.width_px] = picture
        self.y += height_px


def _write_line(
    ink: Pixels,
    rng: np.random.Generator,
    corner: tuple[int, int],
    width_px: int,
    size_px: int,
    *,
    words: int = 30,
) -> int:
    """Write as many words as fit; return the pitch of the lines in px."""
    from PIL import Image, ImageDraw

    font, (y, x) = open_font(BUILT_IN, size_px), corner
    image = Image.new("L", (width_px, round(1.3 * size_px)), 255)
    pen, left, grey = ImageDraw.Draw(image), 0.0, int(rng.integers(0, 60))
    for word in _make_words(rng, words):
        length = font.getlength(word + " ")
        if left and left + length > width_px:
            break
        pen.text((left, 0), word, fill=grey, font=font)
        left += length
    target = ink[y : y + image.height, x : x + width_px]
    np.minimum(target, np.asarray(image)[: target.shape[0], : target.shape[1]], out=target)
    return image.height


def _make_words(rng: np.random.Generator, count: int) -> list[str]:
    lengths = rng.integers(2, 10, count)
    letters = rng.choice(_LETTERS, int(lengths.sum()), p=_ODDS)
    ends = np.cumsum(lengths).tolist()
    words = ["".join(letters[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    # One word in twelve is a number, one in eight has a capital.
    kinds = rng.random(count)
    return [
        str(int(kind * 1e6)) if kind < 0.08 else word.title() if kind < 0.2 else word
        for word, kind in zip(words, kinds, strict=True)
    ]


def _light(ink: Pixels, rng: np.random.Generator) -> Pixels:
    """The page as a scanner or a camera sees it."""
    rows, columns = (np.linspace(-1, 1, size) for size in ink.shape)
    slope = rng.uniform(0, 0.12, 2) * rng.choice((-1, 1), 2)
    light = rng.uniform(0.82, 1.0) * (1 + slope[0] * rows[:, None] + slope[1] * columns)
    noise = rng.normal(0, rng.uniform(0, 2.0), ink.shape)
    return np.asarray(np.rint(ink * light + noise).clip(0, 255), np.uint8)


@dataclass(frozen=True, kw_only=True)
class WatermarkSampleSpec(SampleSpec):
    """Recipe of backgrounds; equal specs give equal pixels (photographs: before compression).

    Args:
        size_px: (height, width) of a page; photographs lie on their side.
    """

    kind = "watermark"
    sides = (SMALLEST_SIDE_PX, 2**13)
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
