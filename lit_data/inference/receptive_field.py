"""How far a net sees."""

from collections.abc import Callable

import torch
from torch import Tensor


def measure_reach_px(
    call: Callable[[Tensor], Tensor], channels: int, tile_px: tuple[int, int], *, multiple_px: int = 1
) -> int | None:
    """Pixels to each side on which a net's value of a pixel depends: half its receptive field.

    One pixel in the middle of a tile is not a number, and neither is what depends on it: that is found without a
    threshold, and with one call at each end of a period of the net's stride. A net that replaces such values (by
    ``where`` or ``nan_to_num``) seems to see less than it does.

    Args:
        call: From [1, C, h, w] float32 to [1, K, h, w].
        channels: C.
        tile_px: (h, w).
        multiple_px: Total stride of the net.

    Returns:
        The larger of both axes; None where it sees as far as the tile's border, at least.
    """
    middle = [side // 2 // multiple_px * multiple_px for side in tile_px]
    reaches = [
        _measure_at(call, channels, tile_px, (middle[0] + shift, middle[1] + shift)) for shift in {0, multiple_px - 1}
    ]
    known = [reach for reach in reaches if reach is not None]
    return max(known) if len(known) == len(reaches) else None


def _measure_at(
    call: Callable[[Tensor], Tensor], channels: int, tile_px: tuple[int, int], place: tuple[int, int]
) -> int | None:
    tile = torch.zeros(1, channels, *tile_px)
    tile[:, :, place[0], place[1]] = torch.nan
    touched = call(tile).isnan().any(1)[0]
    farthest = 0
    for axis, middle in enumerate(place):
        found = touched.any(1 - axis).nonzero().flatten().tolist()
        if not found:
            continue
        if found[0] == 0 or found[-1] == tile_px[axis] - 1:
            return None
        farthest = max(farthest, middle - found[0], found[-1] - middle)
    return farthest
