import numpy as np

from lit_data.synthesis.outlines import FIELD_PX, smooth_field

# A field that changes changes every sample with a wavy outline.
PLACES = [
    [-0.0053, 0.0585, -0.1364, -0.1265],
    [-0.0016, 0.0671, 0.0541, -0.1138],
    [-0.1072, 0.1252, -0.1071, -0.0311],
    [-0.2119, 0.0219, -0.0593, 0.0521],
]


def test_the_field_is_smooth_and_repeats() -> None:
    field = smooth_field()
    assert field.shape == (FIELD_PX, FIELD_PX)
    assert abs(float(field.mean())) < 1e-4
    assert abs(float(field.std()) - 1) < 1e-4
    steps = [np.abs(field - np.roll(field, 1, axis)) for axis in (0, 1)]
    assert max(step.max() for step in steps) < 0.5
    # No seam: the step from the last row to the first is like any other.
    assert steps[0][0].mean() < 1.5 * steps[0].mean()
    assert steps[1][:, 0].mean() < 1.5 * steps[1].mean()


def test_the_field_stays_as_it_is() -> None:
    places = smooth_field()[::128, ::128]
    np.testing.assert_allclose(places, PLACES, atol=1e-4)
