import pytest
import torch

from lit_data.augment import Layers
from lit_data.errors import ConfigError

IMAGES = torch.zeros(2, 3, 4, 5)


def test_layers_hold_what_fits() -> None:
    layers = Layers(IMAGES, torch.zeros(2, 7, 4, 5, dtype=torch.uint8), torch.zeros(0, 6))
    assert layers.size_px == (4, 5)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"images": IMAGES.double()},
            r"images are \[2, 3, 4, 5\] float64: they must be \[B, C, H, W\] float32",
        ),
        ({"images": IMAGES[0]}, r"images are \[3, 4, 5\] float32"),
        (
            {"masks": torch.zeros(2, 1, 5, 4)},
            r"masks are \[2, 1, 5, 4\] float32 beside images \[2, 3, 4, 5\]",
        ),
        ({"masks": torch.zeros(1, 1, 4, 5)}, r"must be \[B, K, H, W\]"),
        ({"boxes": torch.zeros(3, 5)}, r"boxes are \[3, 5\] float32: they must be \[N, 6\]"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Layers(**({"images": IMAGES} | given))
