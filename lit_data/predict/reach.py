"""Reach of a net, which determines the overlap of tiles and the margin of their seams."""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lit_data.core.types import Size
from lit_data.predict.forward import Forward, ForwardOptions
from lit_data.predict.memory_limit import try_twice
from lit_data.predict.options import PredictOptions

log = logging.getLogger(__name__)

_MEASURED_PX = 256  # side of the tile with which the reach is measured


def measure_reach_px(
    call: Callable[[Tensor], Tensor],
    channels: int,
    tile_px: Size,
    *,
    multiple_px: int = 1,
) -> int | None:
    """Return how many pixels to each side affect a net's value at a pixel.

    That is half its receptive field.

    A pixel in the middle of a tile is set to NaN, and all values that depend on it become NaN, so no
    threshold is needed. The net is called once for each end of a period of its stride. The result is
    too small for a net that replaces NaN (by ``where`` or ``nan_to_num``).

    Args:
        call: Net from [1, C, h, w] float32 to [1, K, h, w].
        channels: Number of channels C.
        tile_px: (h, w).
        multiple_px: Total stride of the net.

    Returns:
        The larger value of both axes; None if the reach extends to the tile's border or beyond.
    """
    middle_y, middle_x = (side // 2 // multiple_px * multiple_px for side in tile_px)
    farthest = 0
    for shift in {0, multiple_px - 1}:  # both ends of a period of the stride
        reach = _measure_at(call, channels, tile_px, (middle_y + shift, middle_x + shift))
        if reach is None:
            return None
        farthest = max(farthest, reach)
    return farthest


def _measure_at(
    call: Callable[[Tensor], Tensor],
    channels: int,
    tile_px: Size,
    pixel: tuple[int, int],
) -> int | None:
    """Return the reach from one pixel (y, x); None if it extends to the border of the tile."""
    tile = torch.zeros(1, channels, *tile_px)
    tile[:, :, pixel[0], pixel[1]] = torch.nan
    is_touched = call(tile).isnan().any(1)[0]
    farthest = 0
    for axis, middle in enumerate(pixel):
        touched = is_touched.any(1 - axis).nonzero().flatten().tolist()
        if not touched:
            continue
        # at the border the reach may be truncated
        if touched[0] == 0 or touched[-1] == tile_px[axis] - 1:
            return None
        farthest = max(farthest, middle - touched[0], touched[-1] - middle)
    return farthest


def find_reach_px(
    forward: Forward, channels: int, tile_px: Size, *, multiple_px: int
) -> int | None:
    """Return the reach of a net to each side, px; None if it extends beyond a tile.

    Raises:
        BatchMemoryError: A single tile does not fit into memory.
    """
    call = forward.call_plain
    measure = partial(measure_reach_px, call, channels, tile_px, multiple_px=multiple_px)
    tile = f"a single tile of {channels}x{tile_px[0]}x{tile_px[1]}"
    return try_twice(measure, tile, forward.device)


def measure_overlap_px(
    net: nn.Module, channels: int, options: PredictOptions, device: torch.device
) -> int:
    """Return the overlap of tiles, px: twice the net's reach, or a quarter of a tile if that is too much.

    Args:
        net: A `ProbabilityNet`.
        channels: Channels of a tile.
        options: Options with the size of tiles.
        device: Device of the net.

    Raises:
        ConfigError: The net returns no probabilities.
        BatchMemoryError: A single tile does not fit into memory.
    """
    height_px, width_px = options.tile_sides_px
    measured_px = (min(_MEASURED_PX, height_px), min(_MEASURED_PX, width_px))
    forward = Forward(net, device, ForwardOptions())
    reach_px = find_reach_px(forward, channels, measured_px, multiple_px=options.multiple_px)
    shorter_px = min(height_px, width_px)
    if reach_px is None or 2 * reach_px > shorter_px // 2:
        overlap_px = shorter_px // 4
        log.info(
            "tiles of %d x %d px overlap by %d px, less than the net sees: near seams, results may "
            "differ a little from a prediction of the whole image (predict.blend=gaussian hides "
            "them)",
            height_px,
            width_px,
            overlap_px,
        )
        return overlap_px
    # Each tile keeps its half of the overlap, and needs the net's reach beyond it.
    overlap_px = 2 * reach_px
    log.info(
        "tiles of %d x %d px overlap by %d px, because the net sees %d px to each side",
        height_px,
        width_px,
        overlap_px,
        reach_px,
    )
    return overlap_px
