import numpy as np
import pytest
import torch

from lit_data.augment.augmentation import Layers
from lit_data.augment.photometry import Photometry, blur, gaussian_weights, plane_means


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
    images, weights = (
        torch.rand(shape, generator=generator),
        torch.rand(*shape[:2], taps, generator=generator),
    )
    whole = blur(images, weights), plane_means(images)
    for part in (slice(0, 1), slice(3, 4), slice(2, 7)):
        found = blur(images[part], weights[part]), plane_means(images[part])
        assert all(torch.equal(a, b[part]) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("shape", [(7, 1, 33, 17), (7, 3, 64, 65), (7, 5, 3, 4)])
def test_an_exposure_does_not_depend_on_the_batch(shape: tuple[int, int, int, int]) -> None:
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    photometry = Photometry(gain=0.3, offset=0.1, contrast=0.2, gamma=0.5, blur_px=2, noise=0.1)
    draws = photometry.draw(0, 0, range(7), shape[1])
    whole = photometry(Layers(images), draws).images
    for part in (slice(0, 1), slice(3, 4), slice(2, 7)):
        found = photometry(
            Layers(images[part]), {key: drawn[part] for key, drawn in draws.items()}
        ).images
        assert torch.equal(found, whole[part])


def test_means() -> None:
    images = torch.rand(4, 2, 50, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        plane_means(images)[..., 0, 0], images.mean(dim=(2, 3)), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_black_and_white_stay_what_they_are_under_any_power(gamma: float) -> None:
    images = torch.zeros(4, 1, 8, 8)
    images[2:] = 1
    photometry = Photometry(gamma=gamma, gain=1e-6)
    torch.testing.assert_close(
        photometry(Layers(images), photometry.draw(0, 0, range(4), 1)).images, images
    )
