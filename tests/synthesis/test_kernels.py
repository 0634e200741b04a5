import numpy as np
import pytest

from lit_data.synthesis.families.spot import SUBPIXELS, SpotShape, spot_kernels, window_start


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (4, 2)])
def test_a_kernel_is_a_gaussian_in_the_middle_of_the_largest_window(
    height: int, width: int
) -> None:
    shapes = (
        SpotShape(height_px=height, width_px=width, sigma_y_px=1.3, sigma_x_px=0.8),
        SpotShape(height_px=6, width_px=7, sigma_y_px=1.0, sigma_x_px=1.0),
    )
    kernels = spot_kernels(shapes)
    assert kernels.shape == (2, SUBPIXELS, SUBPIXELS, 6, 7)
    assert (kernels[0, 4, 4] > 0).sum() == height * width
    assert kernels[0, 4, 4, window_start(6), window_start(7)] == 1
    top, left = window_start(6) - window_start(height), window_start(7) - window_start(width)
    rows = np.arange(height) - window_start(height) - (1 / SUBPIXELS - 0.5)
    columns = np.arange(width) - window_start(width) - (6 / SUBPIXELS - 0.5)
    expected = np.exp(-(rows[:, None] ** 2 / (2 * 1.3**2) + columns**2 / (2 * 0.8**2)))
    found = kernels[0, 1, 6, top : top + height, left : left + width]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
