import pytest

from lit_data.synthesis.canvas import ValueRange


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
    assert values.scale == scale
    assert values.bounds == bounds
