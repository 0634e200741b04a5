import pytest
import torch

from lit_data.core.value_range import ValueRange
from lit_data.synthesis.canvas import Canvas


@pytest.mark.parametrize(
    ("dtype", "top"), [(torch.uint8, 255), (torch.uint16, 65535), (torch.int16, 32767)]
)
def test_sums_come_before_the_bounds(dtype: torch.dtype, top: int) -> None:
    images = torch.full((1, 1, 2, 3), top, dtype=torch.int32).to(dtype)
    index, steps = torch.tensor([1, 1, 1, 4, 5]), torch.tensor([100.0, -30.0, -80.0, 7.0, -1e6])
    for _ in range(2):  # what was kept from the first time is 0 again
        canvas = Canvas(images.clone(), ValueRange(0, top, whole=True))
        canvas.add(index, steps)
        after = canvas.read(torch.arange(6)).tolist()
        assert after == [top, top - 10, top, top, top, 0]


@pytest.mark.parametrize(
    ("values", "scale", "bounds"),
    [
        (ValueRange(), 1.0, (0.0, 1.0)),
        (ValueRange(10.5, 20.25), 9.75, (10.5, 20.25)),
        (ValueRange(10.5, 20.25, whole=True), 9.75, (11, 20)),
    ],
)
def test_bounds_of_whole_values_are_whole(
    values: ValueRange, scale: float, bounds: tuple[float, float]
) -> None:
    assert (values.scale, values.bounds) == (scale, bounds)
