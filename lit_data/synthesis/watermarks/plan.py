"""Plan of watermarks, their places and looks: all the randomness, and no pixels."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_data.rng import Stream, uniform
from lit_data.synthesis.families.base import Floats, spread
from lit_data.synthesis.watermarks.spec import MODES, WatermarkSpec

CROP_DRAWS: Final = 4
"""Numbers of a sample's stream for its crop, which come first; the others are those of the plan."""
_SAMPLE_DRAWS: Final = 16
_MARK_DRAWS: Final = 8

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WatermarkPlan:
    """Watermarks of B samples, with N texts in all.

    Args:
        spec: Their distribution.
        present: [B] bool, True where a sample has a watermark.
        tiled: [B] bool, True where its text is repeated.
        gap: [B, 2] (vertical, horizontal) gap between repeated texts, in heights of the text.
        opacity: [B] in 0..1; 0 without a watermark.
        mode: [B] number of the blend mode, see `MODES`.
        colour: [B, 3] R, G, B in 0..1.
        outline: [B] width of the outline as a fraction of the font size; 0 fills the letters.
        soft_px: [B] standard deviation of the softening.
        quality: [B] quality of the JPEG file; 0 leaves a sample as it is.
        row: [N] the sample of each text, ascending.
        text: [N] number of the text.
        font: [N] in [0, 1), position in the list of fonts.
        size_px: [N] font size.
        angle_deg: [N] counter-clockwise.
        centre: [N, 2] (y, x) px of the middle of the text.
    """

    spec: WatermarkSpec
    present: NDArray[np.bool_]
    tiled: NDArray[np.bool_]
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
    spec: WatermarkSpec, seed: int, epoch: int, index: ArrayLike, shape: tuple[int, int]
) -> WatermarkPlan:
    """Draw the watermarks of a batch.

    Those of a sample are a pure function of (seed, epoch, its index).

    Args:
        spec: The distribution.
        seed: 0 <= seed < 2**64.
        epoch: The epoch, 0 for stages that must not change.
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


def sample_crops(seed: int, epoch: int, index: ArrayLike, room_px: Ints) -> Ints:
    """Draw the crops of samples; a pure function of (seed, epoch, the index).

    Args:
        seed: 0 <= seed < 2**64.
        epoch: The epoch.
        index: [M] sample indices.
        room_px: [M, 2] (vertical, horizontal) last corner that is allowed; the first is 0.

    Returns:
        [M, 2] (y, x) px.
    """
    draws = uniform(seed, Stream.WATERMARK, index, epoch, CROP_DRAWS)[:, :2].astype(np.float64)
    corners: Ints = np.floor(draws * (room_px + 1)).astype(np.int64)
    return corners


def _choose_modes(spec: WatermarkSpec, draws: Floats) -> Ints:
    numbers = np.array([MODES.index(mode) for mode in spec.modes])
    chosen: Ints = numbers[(draws * np.float32(len(numbers))).astype(np.int64)]
    return chosen


def _mix_colours(spec: WatermarkSpec, draws: Floats) -> Floats:
    """Return colours [B, 3] of the usual cone of hue, saturation and value.

    Args:
        spec: The distribution.
        draws: [4, B] for lightness, coloured or grey, hue and saturation.
    """
    lightness, chance, hue, level = draws
    value = spread(lightness, spec.lightness)
    is_coloured = chance < spec.coloured
    saturation = np.where(is_coloured, spread(level, spec.saturation), np.float32(0))
    sector = (np.array([5, 3, 1], np.float32)[:, None] + hue * 6) % 6
    darkening = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    colours: Floats = (value * (1 - saturation * darkening)).T.astype(np.float32)
    return colours


def _draw_sizes(spec: WatermarkSpec, draws: Floats, height_px: int) -> Floats:
    low, high = spec.size_px
    if spec.size_share is not None:
        low, high = spec.size_share[0] * height_px, spec.size_share[1] * height_px
    # Evenly on a logarithmic scale.
    sizes: Floats = (low * (high / low) ** draws.astype(np.float64)).astype(np.float32)
    return np.maximum(sizes, np.float32(4))
