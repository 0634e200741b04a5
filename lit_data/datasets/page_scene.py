"""Drawn pages: headings, paragraphs in columns, tables and framed pictures on paper that is lit unevenly."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.photo_scene import draw_texture
from lit_data.synthesis.watermarks.fonts import BUILT_IN, open_font

Pixels = NDArray[np.uint8]

_LETTERS: Final = np.array(list("etaoinshrdlcumwfgypbvk"))
_ODDS: Final = np.arange(len(_LETTERS), 0, -1) / sum(range(len(_LETTERS) + 1))


def draw_page(rng: np.random.Generator, size_px: tuple[int, int]) -> Pixels:
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
    top = margin + _write_line(ink, rng, (margin, margin), width - 2 * margin, int(rng.integers(18, 30)), words=4)
    gap = width // 25
    column_px = (width - 2 * margin - (columns - 1) * gap) // columns
    for column in range(columns):
        _fill_column(ink, rng, (top, margin + column * (column_px + gap)), (height - margin, column_px))
    return _light(ink, rng)


def _fill_column(ink: Pixels, rng: np.random.Generator, place: tuple[int, int], limits: tuple[int, int]) -> None:
    """Blocks under each other from (y, x) `place` on, to `limits` (last row, width)."""
    (y, x), (bottom, width) = place, limits
    size_px = int(rng.integers(9, 15))
    while y < bottom - 3 * size_px:
        kind = rng.choice(4, p=(0.7, 0.1, 0.1, 0.1))
        if kind == 0:
            y = _write_paragraph(ink, rng, (y, x), (bottom, width), size_px)
        elif kind == 1:
            y += _write_line(ink, rng, (y, x), width, size_px + 5, words=3)
        elif kind == 2:
            y = _draw_table(ink, rng, (y, x), (bottom, width), size_px)
        else:
            y = _draw_picture(ink, rng, (y, x), (bottom, width))
        y += size_px


def _write_paragraph(
    ink: Pixels, rng: np.random.Generator, place: tuple[int, int], limits: tuple[int, int], size_px: int
) -> int:
    (y, x), (bottom, width) = place, limits
    for _ in range(int(rng.integers(3, 9))):
        if y + size_px > bottom:
            break
        y += _write_line(ink, rng, (y, x), width, size_px)
    return y


def _draw_table(
    ink: Pixels, rng: np.random.Generator, place: tuple[int, int], limits: tuple[int, int], size_px: int
) -> int:
    (y, x), (bottom, width) = place, limits
    cells, pitch_px = int(rng.integers(2, 5)), size_px + 6
    rows = min(int(rng.integers(3, 8)), (bottom - y) // pitch_px)
    for row in range(rows):
        ink[y + row * pitch_px, x : x + width] = 60
        for cell in range(cells):
            left = x + cell * width // cells
            _write_line(ink, rng, (y + row * pitch_px + 2, left + 3), width // cells - 6, size_px, words=1)
    ink[min(y + rows * pitch_px, len(ink) - 1), x : x + width] = 60
    for cell in range(cells + 1):
        ink[y : y + rows * pitch_px, min(x + cell * width // cells, x + width - 1)] = 60
    return y + rows * pitch_px


def _draw_picture(ink: Pixels, rng: np.random.Generator, place: tuple[int, int], limits: tuple[int, int]) -> int:
    (y, x), (bottom, width) = place, limits
    height = min(int(width * rng.uniform(0.3, 0.7)), bottom - y)
    ink[y : y + height, x : x + width] = draw_texture(rng, (height, width))
    return y + height


def _write_line(
    ink: Pixels, rng: np.random.Generator, place: tuple[int, int], width_px: int, size_px: int, *, words: int = 30
) -> int:
    """Write as many words as fit; return the pitch of the lines in px."""
    from PIL import Image, ImageDraw

    font, (y, x) = open_font(BUILT_IN, size_px), place
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
