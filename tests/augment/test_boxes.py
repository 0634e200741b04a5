import pytest
import torch

from lit_data.augment.matrices import BoxLimits, box_corners, hull_boxes, move_points
from lit_data.errors import ConfigError

ANY = BoxLimits(min_px=0, min_visible=0)


def _to_boxes(
    *edges: tuple[float, float, float, float], size: tuple[int, int] = (10, 20)
) -> torch.Tensor:
    """From (left, top, right, bottom) in px between pixels."""
    height, width = size
    rows = [
        (n, 7, (x0 + x1) / 2 / width, (y0 + y1) / 2 / height, (x1 - x0) / width, (y1 - y0) / height)
        for n, (x0, y0, x1, y1) in enumerate(edges)
    ]
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)


def test_boxes_are_cut_to_the_crop() -> None:
    boxes = _to_boxes((-4, 2, 6, 8), (18, 8, 26, 12))
    cut = hull_boxes(boxes, box_corners(boxes, (10, 20)), (10, 20), ANY)
    torch.testing.assert_close(cut, _to_boxes((0, 2, 6, 8), (18, 8, 20, 10)))


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (ANY, [0, 1, 2]),
        (BoxLimits(min_px=2, min_visible=0), [0, 1]),
        (BoxLimits(min_px=0, min_visible=0.5), [0, 2]),
        (BoxLimits(min_px=0, min_visible=0.4), [0, 1, 2]),
    ],
)
def test_small_and_hidden_boxes_are_left_out(limits: BoxLimits, kept: list[int]) -> None:
    boxes = _to_boxes((5, 2, 8, 8), (-6, 2, 4, 8), (9, 2, 10, 8), (21, 2, 25, 8))
    assert hull_boxes(boxes, box_corners(boxes, (10, 20)), (10, 20), limits)[:, 0].tolist() == kept


def test_no_boxes_stay_none() -> None:
    none = torch.zeros(0, 6)
    assert hull_boxes(
        none, move_points(box_corners(none, (4, 4)), torch.zeros(0, 3, 3)), (4, 4), ANY
    ).shape == (0, 6)


def test_points_move_in_perspective() -> None:
    matrix = torch.tensor([[[1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [0.5, 0.0, 1.0]]])
    assert move_points(torch.tensor([[[2.0, 4.0]]]), matrix).tolist() == [[[2.0, 2.0]]]


@pytest.mark.parametrize(("min_px", "min_visible"), [(-1, 0.1), (1, -0.1), (1, 1.1)])
def test_bad_limits(min_px: float, min_visible: float) -> None:
    with pytest.raises(ConfigError, match="need min_box_px >= 0 and a share"):
        BoxLimits(min_px=min_px, min_visible=min_visible)


def test_without_limits_all_are_kept() -> None:
    boxes = torch.tensor([[0, 1, 0.5, 0.5, 0.001, 0.001], [1, 0, 0.0, 0.5, 1.8, 0.2]])
    moved = hull_boxes(boxes, box_corners(boxes, (10, 20)), (10, 20), None)
    torch.testing.assert_close(
        moved, torch.tensor([[0, 1, 0.5, 0.5, 0.001, 0.001], [1, 0, 0.45, 0.5, 0.9, 0.2]])
    )
