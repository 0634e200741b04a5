import math

import pytest
import torch

from lit_data.synthesis.canvas import Canvas, ValueRange
from lit_data.synthesis.windows import Surroundings, Windows


def _windows(
    y: float, x: float, size: tuple[int, int] = (4, 5), *, across: bool = False
) -> Windows:
    rows, columns = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    image = ((rows if across else columns) % 6 < 3).float()
    canvas = Canvas(image.expand(2, 1, 20, 20).contiguous(), ValueRange())
    centre = torch.tensor([9.0, y]), torch.tensor([9.0, x])
    surroundings = Surroundings(canvas, torch.tensor([0, 1]), *centre)
    return Windows(surroundings, torch.tensor([0.1, 0.2]), slice(1, 2), size)


@pytest.mark.parametrize(
    ("y", "x", "top", "left"),
    [(5, 6, 4, 4), (5.375, 5.5, 4, 4), (5.5, 6.375, 5, 4), (0, -1, -1, -3)],
)
def test_places_are_measured_from_the_centre(y: float, x: float, top: int, left: int) -> None:
    windows = _windows(y, x)
    assert (windows.top.item(), windows.left.item()) == (top, left)
    assert windows.y.flatten().tolist() == [top + n - y for n in range(4)]
    assert windows.x.flatten().tolist() == [left + n - x for n in range(5)]
    assert windows.strength.tolist() == pytest.approx([0.2])
    expected = [
        [0 <= top + row < 20 and 0 <= left + column < 20 for column in range(5)] for row in range(4)
    ]
    assert windows.inside[0].tolist() == expected


def test_turned_coordinates() -> None:
    along, across = _windows(10, 10).turned(torch.full((1, 1, 1), math.pi / 2))
    torch.testing.assert_close(along, _windows(10, 10).y.expand(1, 4, 5), atol=1e-6, rtol=0)
    torch.testing.assert_close(across, -_windows(10, 10).x.expand(1, 4, 5), atol=1e-6, rtol=0)


@pytest.mark.parametrize("across", [False, True])
def test_along_the_stripes(across: bool) -> None:
    windows = _windows(10, 10, across=across)
    ways = [windows.x.expand(1, 4, 5), windows.y.expand(1, 4, 5)]
    along, over = windows.along_stripes()
    assert torch.equal(along, ways[not across])
    assert torch.equal(over, ways[across])
