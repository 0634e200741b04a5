"""Distribution of text watermarks, and plans drawn from it: all random numbers, no pixels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from lit_data.core.checks import check_choice, check_count, check_fraction
from lit_data.core.errors import ConfigError
from lit_data.core.rng import CROP_DRAWS, Stream, check_seed, uniform
from lit_data.core.types import Bools, Floats, Ints, Size
from lit_data.synthesis.families.base import Range, check_range, spread
from lit_data.synthesis.plan import Synthesis

_EPOCH = 2**32 - 1
"""Epoch that no run reaches, so that texts share no random number with samples."""
_DRAWS = 32
_PHRASES = (
    "CONFIDENTIAL", "DRAFT", "SAMPLE", "COPY", "DO NOT COPY", "PREVIEW", "SPECIMEN", "VOID",
    "PROOF", "INTERNAL", "ORIGINAL", "NOT FOR SALE", "RESTRICTED", "EVALUATION", "TRIAL VERSION",
    "UNPAID", "ARCHIVE", "For review only", "Personal use", "All rights reserved", "watermark",
    "stock photo", "demo", "licensed to",
)  # fmt: skip
_STARTS = (
    "b", "br", "c", "ch", "d", "f", "g", "gr", "h", "k",
    "l", "m", "n", "p", "r", "s", "st", "t", "v", "w",
)  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "io")
_ENDS = ("", "", "l", "n", "r", "s", "t", "nd", "rk", "x")
_TAILS = ("com", "net", "org", "photo", "info")

MarkMask = Literal["alpha", "binary"]
Mode = Literal["normal", "multiply", "screen", "overlay"]
MODES: tuple[Mode, ...] = get_args(Mode)
MOST_MARKS = 16

_FRACTIONS = (
    "probability",
    "straight",
    "tiling",
    "coloured",
    "outline",
    "jpeg",
    "mask_threshold",
    "least_change",
    "least_contrast",
)
_RANGES: dict[str, tuple[float, float]] = {
    "count": (1, MOST_MARKS),
    "size_px": (4, 512),
    "size_share": (0.01, 2),
    "spacing": (0, 20),
    "lightness": (0, 1),
    "saturation": (0, 1),
    "opacity": (0.02, 1),
    "outline_share": (0.01, 0.3),
    "soft_px": (0, 8),
    "jpeg_quality": (1, 100),
}

_SAMPLE_DRAWS = 16
_MARK_DRAWS = 8


class _Draws:
    """A sequence of random numbers."""

    def __init__(self, seed: int, number: int) -> None:
        draws = uniform(seed, Stream.WATERMARK, np.array([number]), _EPOCH, _DRAWS)
        self._remaining = iter(draws[0].tolist())

    def below(self, count: int) -> int:
        return int(next(self._remaining) * count)

    def choose(self, choices: tuple[str, ...]) -> str:
        return choices[self.below(len(choices))]


def draw_texts(count: int, seed: int) -> tuple[str, ...]:
    """Draw texts; each is a pure function of (seed, its number).

    Args:
        count: Number of texts.
        seed: 0 <= seed < 2**64.
    """
    return tuple(_draw_text(_Draws(seed, number)) for number in range(count))


def _draw_text(draws: _Draws) -> str:
    writers: tuple[Callable[[_Draws], str], ...] = (
        _write_phrase,
        _write_phrase,
        _write_phrase,
        _write_name,
        _write_name,
        _write_date,
        _write_number,
        _write_address,
        _write_owner,
    )
    text = writers[draws.below(len(writers))](draws)
    return (text, text, text.upper(), text.title())[draws.below(4)]


def _write_phrase(draws: _Draws) -> str:
    return draws.choose(_PHRASES)


def _write_word(draws: _Draws, syllables: int) -> str:
    word = ""
    for _ in range(syllables):
        word += draws.choose(_STARTS) + draws.choose(_MIDDLES)
    return word + draws.choose(_ENDS)


def _write_name(draws: _Draws) -> str:
    first, second = _write_word(draws, 1 + draws.below(2)), _write_word(draws, 2)
    return f"{first} {second}".title()


def _write_date(draws: _Draws) -> str:
    # Every month has 28 days.
    year, month, day = 1995 + draws.below(36), 1 + draws.below(12), 1 + draws.below(28)
    dates = (f"{year}-{month:02}-{day:02}", f"{day:02}.{month:02}.{year}", f"{month}/{day}/{year}")
    return draws.choose(dates)


def _write_number(draws: _Draws) -> str:
    before = draws.choose(("No. ", "#", "ID ", "Copy ", "", "Ref "))
    return f"{before}{draws.below(10 ** (3 + draws.below(5))):03}"


def _write_address(draws: _Draws) -> str:
    word = _write_word(draws, 2)
    www_tail, tail = draws.choose(_TAILS), draws.choose(_TAILS)
    return draws.choose((f"www.{word}.{www_tail}", f"@{word}", f"{word}.{tail}"))


def _write_owner(draws: _Draws) -> str:
    return f"\N{COPYRIGHT SIGN} {_write_word(draws, 2).title()} {2005 + draws.below(26)}"


@dataclass(frozen=True, kw_only=True)
class WatermarkSpec(Synthesis):
    """Distribution of text watermarks over samples.

    A sample has a watermark with `probability`: `count` texts, or with `tiling` one text that is
    repeated over the whole sample. All marks of a sample share color, opacity and blend mode.

    Args:
        probability: Probability that a sample has a watermark, 0 to 1.
        texts: Texts of the marks; None makes `text_count` random words, dates, numbers and
            addresses.
        text_count: Number of random texts.
        text_seed: Seed of the random texts.
        fonts: None for the free font that comes with Pillow; a font file, a folder of fonts,
            several of both, or ``system`` for those installed on the machine (another machine then
            gives other samples).
        size_px: Smallest and largest font size, distributed log-uniformly.
        size_share: The same as a fraction of the height of a sample; replaces `size_px`.
        angle_deg: Smallest and largest angle, counterclockwise.
        straight: Fraction of texts that are not rotated.
        count: Minimum and maximum number of texts of a sample that is not tiled.
        tiling: Fraction of samples with a repeated text.
        spacing: Smallest and largest gap between repeated texts, in heights of the text.
        lightness: Smallest and largest brightness of the color.
        coloured: Fraction of marks that are not gray.
        saturation: Smallest and largest saturation of these marks.
        opacity: Smallest and largest opacity.
        modes: Blend modes with equal probability: `normal`, `multiply`, `screen`, `overlay`.
        outline: Fraction of samples whose letters are outlines.
        outline_share: Smallest and largest width of the outline, as a fraction of the font size.
        soft_px: Smallest and largest standard deviation of the softening of edges.
        jpeg: Fraction of samples, with and without a watermark, that are compressed as JPEG.
        jpeg_quality: Smallest and largest quality, as in libjpeg.
        least_change: A mark that would change most pixels under it by less than this, in units of
            the 0..1 value range, is painted in black, white or gray instead, because the mask
            should not mark invisible pixels.
        least_contrast: A mark that changes pixels by less than this fraction of their standard
            deviation gets more opacity, up to the largest of `opacity`.
        mask: `alpha`: opacity times coverage of a pixel. `binary`: 1 for pixels with a coverage of
            at least `mask_threshold`, at any opacity.
        mask_threshold: See `mask`.
        cache_bytes: Maximum size of the drawn texts that each worker process keeps.

    Raises:
        ConfigError: A range is empty, a fraction is outside 0..1, a mode or mask is unknown, or
            there is no text.
    """

    probability: float = 0.9
    texts: tuple[str, ...] | None = None
    text_count: int = 200
    text_seed: int = 0
    fonts: str | tuple[str, ...] | None = None
    size_px: Range = (14, 72)
    size_share: Range | None = None
    angle_deg: Range = (-50, 50)
    straight: float = 0.25
    count: tuple[int, int] = (1, 2)
    tiling: float = 0.35
    spacing: Range = (0.4, 2.5)
    lightness: Range = (0, 1)
    coloured: float = 0.3
    saturation: Range = (0.3, 1)
    opacity: Range = (0.15, 0.6)
    modes: tuple[Mode, ...] = MODES
    outline: float = 0.15
    outline_share: Range = (0.03, 0.06)
    soft_px: Range = (0, 0.8)
    jpeg: float = 0.5
    jpeg_quality: Range = (50, 95)
    least_change: float = 0.06
    least_contrast: float = 0.75
    mask: MarkMask = "binary"
    mask_threshold: float = 0.25
    cache_bytes: int = 2**26

    def __post_init__(self) -> None:
        """Convert lists of a configuration file to tuples, and check every range."""
        for name in _FRACTIONS:
            check_fraction(name, getattr(self, name))
        for name, limits in _RANGES.items():
            bounds = getattr(self, name)
            if bounds is not None:
                object.__setattr__(self, name, check_range(name, bounds, limits))
        if not all(isinstance(bound, int) for bound in self.count):
            raise ConfigError(f"count={list(self.count)} must be two whole numbers")
        object.__setattr__(self, "angle_deg", _check_angles(self.angle_deg))
        for name in ("texts", "modes"):
            values = getattr(self, name)
            if isinstance(values, Sequence) and not isinstance(values, str):
                object.__setattr__(self, name, tuple(values))
        if self.fonts is not None and not isinstance(self.fonts, str):
            object.__setattr__(self, "fonts", tuple(map(str, self.fonts)))
        self._check_words()

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Texts of the marks."""
        return draw_texts(self.text_count, self.text_seed) if self.texts is None else self.texts

    def _check_words(self) -> None:
        check_choice("mask", self.mask, get_args(MarkMask))
        if not isinstance(self.modes, tuple) or not self.modes:
            raise ConfigError(f"modes={self.modes!r} must be a list of {', '.join(MODES)}")
        for mode in self.modes:
            check_choice("modes", mode, MODES)
        check_seed(self.text_seed)
        for name in ("text_count", "cache_bytes"):
            check_count(name, getattr(self, name), 1)
        if self.texts is None:
            return
        is_list = isinstance(self.texts, tuple) and len(self.texts) > 0
        if not is_list or not all(map(_is_line, self.texts)):
            raise ConfigError(
                f"texts={self.texts!r} must be a list of lines that are not empty; null draws "
                "random ones"
            )


def _is_line(text: object) -> bool:
    return isinstance(text, str) and text.strip() != "" and text.isprintable()


def _check_angles(bounds: Any) -> Range:  # noqa: ANN401 - a user's
    pair = tuple(bounds) if isinstance(bounds, Sequence) else (bounds,)
    is_finite = all(isinstance(bound, Real) and math.isfinite(bound) for bound in pair)
    if len(pair) != 2 or not is_finite:
        raise ConfigError(f"angle_deg={list(pair)} must be [smallest, largest]")
    if not pair[0] <= pair[1]:
        raise ConfigError(
            f"angle_deg={list(pair)} must be [smallest, largest] with smallest <= largest"
        )
    return pair[0], pair[1]


@dataclass(frozen=True, slots=True)
class WatermarkPlan:
    """Watermarks of B samples, with N texts in total.

    Args:
        spec: Distribution of the watermarks.
        present: [B] bool, True for samples with a watermark.
        tiled: [B] bool, True for samples with a repeated text.
        gap: [B, 2] (vertical, horizontal) gap between repeated texts, in heights of the text.
        opacity: [B] in 0..1; 0 without a watermark.
        mode: [B] number of the blend mode, see `MODES`.
        colour: [B, 3] R, G, B in 0..1.
        outline: [B] width of the outline as a fraction of the font size; 0 fills the letters.
        soft_px: [B] standard deviation of the softening.
        quality: [B] quality of the JPEG compression; 0 for none.
        row: [N] the sample of each text, ascending.
        text: [N] number of the text.
        font: [N] in [0, 1), position in the list of fonts.
        size_px: [N] font size.
        angle_deg: [N] counterclockwise.
        centre: [N, 2] (y, x) px of the center of the text.
    """

    spec: WatermarkSpec
    present: Bools
    tiled: Bools
    gap: Floats
    opacity: Floats
    mode: Ints
    colour: Floats
    outline: Floats
    soft_px: Floats
    quality: Floats
    row: Ints
    text: Ints
    font: Floats
    size_px: Floats
    angle_deg: Floats
    centre: Floats

    def __len__(self) -> int:
        return len(self.row)


def sample_watermarks(
    spec: WatermarkSpec, seed: int, epoch: int, index: ArrayLike, shape: Size
) -> WatermarkPlan:
    """Draw the watermarks of a batch.

    Watermarks of a sample are a pure function of (seed, epoch, its index).

    Args:
        spec: The distribution.
        seed: 0 <= seed < 2**64.
        epoch: The epoch; 0 for stages that must not change.
        index: [B] sample indices.
        shape: (H, W) of a sample.
    """
    least, most = spec.count
    count = CROP_DRAWS + _SAMPLE_DRAWS + _MARK_DRAWS * most
    draws = uniform(seed, Stream.WATERMARK, index, epoch, count)
    sample_draws, text_draws = np.split(draws[:, CROP_DRAWS:], [_SAMPLE_DRAWS], axis=1)
    u = sample_draws.T
    present = u[0] < spec.probability
    tiled = u[1] < spec.tiling
    text_count = least + (u[2] * np.float32(most - least + 1)).astype(np.int64)
    text_count = np.where(tiled, 1, text_count)
    # Every sample draws for the most texts, so its texts do not depend on their number.
    row, slot = np.nonzero(present[:, None] & (np.arange(most) < text_count[:, None]))
    mark = text_draws.reshape(len(draws), most, _MARK_DRAWS)[row, slot].T
    return WatermarkPlan(
        spec=spec,
        present=present,
        tiled=tiled,
        gap=spread(sample_draws[:, 3:5], spec.spacing),
        opacity=np.where(present, spread(u[5], spec.opacity), np.float32(0)),
        mode=_choose_modes(spec, u[6]),
        colour=_mix_colours(spec, u[7:11]),
        outline=np.where(u[11] < spec.outline, spread(u[12], spec.outline_share), np.float32(0)),
        soft_px=spread(u[13], spec.soft_px),
        quality=np.where(
            u[14] < spec.jpeg, np.rint(spread(u[15], spec.jpeg_quality)), np.float32(0)
        ),
        row=row,
        text=(mark[0] * np.float32(len(spec.words))).astype(np.int64),
        font=mark[1],
        size_px=_draw_sizes(spec, mark[2], shape[0]),
        angle_deg=np.where(mark[3] < spec.straight, np.float32(0), spread(mark[4], spec.angle_deg)),
        centre=mark[5:7].T * np.array(shape, np.float32),
    )


def _choose_modes(spec: WatermarkSpec, draws: Floats) -> Ints:
    numbers = np.array([MODES.index(mode) for mode in spec.modes])
    chosen: Ints = numbers[(draws * np.float32(len(numbers))).astype(np.int64)]
    return chosen


def _mix_colours(spec: WatermarkSpec, draws: Floats) -> Floats:
    """Return colors [B, 3] of the usual cone of hue, saturation and value.

    Args:
        spec: The distribution.
        draws: [4, B] for lightness, colored or gray, hue and saturation.
    """
    lightness, chance, hue, level = draws
    value = spread(lightness, spec.lightness)
    is_coloured = chance < spec.coloured
    saturation = np.where(is_coloured, spread(level, spec.saturation), np.float32(0))
    # HSV to RGB in closed form: one ramp for each of red, green and blue.
    sector = (np.array([5, 3, 1], np.float32)[:, None] + hue * 6) % 6
    darkening = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    colours: Floats = (value * (1 - saturation * darkening)).T.astype(np.float32)
    return colours


def _draw_sizes(spec: WatermarkSpec, draws: Floats, height_px: int) -> Floats:
    low, high = spec.size_px
    if spec.size_share is not None:
        low, high = spec.size_share[0] * height_px, spec.size_share[1] * height_px
    # Log-uniformly.
    sizes: Floats = (low * (high / low) ** draws.astype(np.float64)).astype(np.float32)
    return np.maximum(sizes, np.float32(4))
