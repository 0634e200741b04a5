"""Reach of a net, by which tiles overlap, and by which their seams have a margin."""

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

_MEASURED_PX = 256  # of the tile by which it is measured how far a net sees


def measure_reach_px(
    call: Callable[[Tensor], Tensor],
    channels: int,
    tile_px: Size,
    *,
    multiple_px: int = 1,
) -> int | None:
    """Return the pixels to each side on which a net's value of a pixel depends.

    That is half its receptive field.

    One pixel in the middle of a tile is not a number, and neither are the values that depend on it:
    they need no threshold, and one call at each end of a period of the net's stride. A net that
    replaces such values (by ``where`` or ``nan_to_num``) seems to see less than it does.

    Args:
        call: From [1, C, h, w] float32 to [1, K, h, w].
        channels: C.
        tile_px: (h, w).
        multiple_px: Total stride of the net.

    Returns:
        The larger of both axes; None where it sees as far as the tile's border, at least.
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
    """Return the reach from one pixel (y, x); None where it ends at the border of the tile."""
    tile = torch.zeros(1, channels, *tile_px)
    tile[:, :, pixel[0], pixel[1]] = torch.nan
    is_touched = call(tile).isnan().any(1)[0]
    farthest = 0
    for axis, middle in enumerate(pixel):
        touched = is_touched.any(1 - axis).nonzero().flatten().tolist()
        if not touched:
            continue
        # at the border the reach may be cut off
        if touched[0] == 0 or touched[-1] == tile_px[axis] - 1:
            return None
        farthest = max(farthest, middle - touched[0], touched[-1] - middle)
    return farthest


def find_reach_px(
    forward: Forward, channels: int, tile_px: Size, *, multiple_px: int
) -> int | None:
    """Return the receptive field of a net to each side, px; None if it reaches beyond a tile.

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
    """Return the net's receptive field; a quarter of a tile if half does not hold that.

    Args:
        net: A `ProbabilityNet`.
        channels: Of a tile.
        options: Tiles.
        device: Where the net computes.

    Raises:
        ConfigError: The net gives no probability.
        BatchMemoryError: A single tile does not fit into memory.
    """
    height_px, width_px = options.tile_sides_px
    measured_px = (min(_MEASURED_PX, height_px), min(_MEASURED_PX, width_px))
    forward = Forward(net, device, ForwardOptions())
    reach_px = find_reach_px(forward, channels, measured_px, multiple_px=options.multiple_px)
    shorter_px = min(height_px, width_px)
    if reach_px is None or 2 * reach_px > shorter_px // 2:
        log.warning(
            "the net's receptive field exceeds a quarter of a tile (%d px), so seams may differ "
            "from a prediction of the whole image: set predict.tile_px and predict.overlap_px, "
            "or predict.blend=gaussian",
            shorter_px,
        )
        return shorter_px // 4
    # Each tile keeps its half of the overlap, and has to see as far beyond that as the net does.
    overlap_px = 2 * reach_px
    log.info(
        "tiles of %d x %d px overlap by %d px, because the net sees %d px to each side",
        height_px,
        width_px,
        overlap_px,
        reach_px,
    )
    return overlap_px
