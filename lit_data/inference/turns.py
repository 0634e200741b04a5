"""Test-time augmentation: a tile is looked at from several sides, and the answers are turned back and averaged."""

import functools
from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

Augment = Literal["flips", "d4"]
Turn = tuple[int, bool]
"""Quarter turns, then whether left and right are exchanged."""

TURNS: Final[dict[Augment, tuple[Turn, ...]]] = {
    "flips": ((0, False), (0, True), (2, True), (2, False)),  # none, left-right, top-bottom, both
    "d4": tuple((quarter, mirror) for mirror in (False, True) for quarter in range(4)),
}


def average_turned(call: Callable[[Tensor], Tensor], tiles: Tensor, turns: tuple[Turn, ...]) -> Tensor:
    """Mean of a net's answers to all turns of the tiles, one turn at a time.

    Args:
        call: From [B, C, h, w] to [B, K, h, w].
        tiles: [B, C, h, w]; tiles that are not square lie on their side in some turns.
        turns: What to do.

    Returns:
        [B, K, h, w].
    """
    # The net may work in place, and a turn by nothing is no copy.
    answers = (turn_back(call(turn(tiles, one).clone()), one) for one in turns)
    return functools.reduce(torch.add, answers) / len(turns)


def turn(tiles: Tensor, how: Turn) -> Tensor:
    """Turn and mirror: [B, C, h, w]."""
    quarters, mirror = how
    turned = torch.rot90(tiles, quarters, (2, 3)) if quarters else tiles
    return turned.flip(3) if mirror else turned


def turn_back(tiles: Tensor, how: Turn) -> Tensor:
    """Undo `turn`."""
    quarters, mirror = how
    mirrored = tiles.flip(3) if mirror else tiles
    return torch.rot90(mirrored, -quarters, (2, 3)) if quarters else mirrored
