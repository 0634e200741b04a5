import numpy as np
import pytest
import torch

from lit_data.synthesis.canvas import Canvas, ValueRange, mirror
from tests.synthesis.placing import RANGES, as_dtype, scene


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_beyond_the_edges_pixels_are_mirrored(length: int) -> None:
    reach = length - 1
    expected = np.pad(np.arange(length), reach, mode="reflect")
    assert mirror(torch.arange(-reach, length + reach), length).tolist() == expected.tolist()
    far = mirror(torch.arange(-100, 100), length)
    assert far.min() >= 0
    assert far.max() <= length - 1


@pytest.mark.parametrize("kind", RANGES)
def test_pixels_are_read_in_their_range(kind: str) -> None:
    images, values = as_dtype(scene(3, (2, 6, 7)), kind), RANGES[kind][1]
    canvas = Canvas(images, values)
    row, y, x = (
        torch.tensor([2, 0]),
        torch.tensor([[1, 7], [-2, 5]]),
        torch.tensor([[3, 6], [8, 0]]),
    )
    mirrored = np.array([[1, 3], [2, 5]]), np.array([[3, 6], [4, 0]])
    expected = (
        images.numpy().astype(np.float32)[row.numpy()[:, None], :, *mirrored] - values.low
    ) / values.scale
    np.testing.assert_allclose(canvas.read_channels(row, y, x), expected, rtol=1e-6)
    np.testing.assert_allclose(canvas.read_target(row, y, x), expected[..., 0], rtol=1e-6)


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


def test_float_pixels_add_up() -> None:
    images = torch.tensor([0.5, 0.25, 2.0, -1.0]).view(1, 1, 2, 2)
    Canvas(images, ValueRange()).add(
        torch.tensor([0, 0, 3, 2]), torch.tensor([0.9, -0.5, 0.0, -0.25])
    )
    torch.testing.assert_close(images.view(-1), torch.tensor([0.9, 0.25, 0.75, 0.0]))


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
