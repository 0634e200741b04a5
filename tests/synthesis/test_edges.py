import pytest
import torch

from lit_data.synthesis.canvas import Canvas, ValueRange
from lit_data.synthesis.windows import SEARCH_PX, Surroundings, Windows


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("y", "x"), [(8, 16), (20.5, 15.25), (2, 24), (30, 21), (16, 20)])
def test_the_strongest_edge_nearby_is_found(y: float, x: float, down: bool) -> None:
    image = torch.full((32, 32), 0.5)
    image[:, 20:], image[:, 29:] = 0.9, 0.7  # the weaker edge is no choice
    image = image if down else image.T
    centre = torch.tensor([y if down else x]), torch.tensor([x if down else y])
    canvas = Canvas(image.expand(1, 2, 32, 32).contiguous(), ValueRange())
    windows = Windows(
        Surroundings(canvas, torch.tensor([0]), *centre), torch.ones(1), slice(0, 1), (16, 16)
    )
    shift_y, shift_x = windows.edge
    assert max(shift_y.abs(), shift_x.abs()) <= SEARCH_PX
    found = windows.nearest_x + shift_x if down else windows.nearest_y + shift_y
    assert found in (19, 20)
