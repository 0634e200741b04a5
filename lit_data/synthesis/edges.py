"""The strongest edge near each defect."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

    from lit_data.synthesis.windows import Windows

SEARCH_PX: Final = 6
"""How far from where it was put a defect looks for an edge."""
_TIE: Final = 1e-6


def find_edge(windows: "Windows") -> tuple["Tensor", "Tensor"]:
    """Where the target changes most, from the centre of each defect: [n] float32 whole px each."""
    import torch

    offset = torch.arange(-SEARCH_PX - 1, SEARCH_PX + 2, device=windows.device)
    rows = (windows.nearest_y[:, None] + offset)[:, :, None]
    columns = (windows.nearest_x[:, None] + offset)[:, None, :]
    target = windows.canvas.read_target(windows.row, rows, columns)
    change = (target[:, 2:, 1:-1] - target[:, :-2, 1:-1]).abs_() + (target[:, 1:-1, 2:] - target[:, 1:-1, :-2]).abs_()
    side = 2 * SEARCH_PX + 1
    # Equal edges are common; the first of them is taken on every device.
    best = (change.flatten(1) - torch.arange(side**2, device=windows.device) * _TIE).argmax(1)
    return (best // side - SEARCH_PX).float(), (best % side - SEARCH_PX).float()
