import numpy as np
import pytest
import torch

from lit_data.augment.photometry import blur, gaussian_weights, plane_means, power


def test_weights_are_a_gaussian_with_sum_one() -> None:
    weights = gaussian_weights(np.array([[0.0, 0.5], [1.0, 2.0]], np.float32), 2.0)
    assert weights.shape == (2, 2, 13)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(weights[0, 0], np.eye(13)[6])
    assert weights[1, 0, 7] / weights[1, 0, 6] == pytest.approx(np.exp(-0.5))
    # Cut at three deviations of the widest, so that one loses a little of its spread.
    assert np.sqrt((weights[1, 1] * np.arange(-6, 7) ** 2).sum()) == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("taps", [3, 7, 13])
@pytest.mark.parametrize("shape", [(7, 1, 33, 17), (7, 3, 64, 65), (7, 5, 3, 4)])
def test_results_do_not_depend_on_the_batch(shape: tuple[int, int, int, int], taps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images, weights = torch.rand(shape, generator=generator), torch.rand(*shape[:2], taps, generator=generator)
    exponents = 0.5 + torch.rand(*shape[:2], 1, 1, generator=generator)
    whole = blur(images, weights), power(images, exponents), plane_means(images)
    for part in (slice(0, 1), slice(3, 4), slice(2, 7)):
        found = blur(images[part], weights[part]), power(images[part], exponents[part]), plane_means(images[part])
        assert all(torch.equal(a, b[part]) for a, b in zip(found, whole, strict=True))


def test_means_and_powers() -> None:
    images = torch.rand(4, 2, 50, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plane_means(images)[..., 0, 0], images.mean(dim=(2, 3)), atol=2e-5, rtol=0)
    exponents = torch.linspace(0.5, 2, 8).view(4, 2, 1, 1)
    torch.testing.assert_close(power(images, exponents), images**exponents)
    assert power(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 1, 1), 0.7)).max() == 0
