"""What an Apple GPU is asked to compute, in float32 at most: scores, drawing, augmentation."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lit_data.augment import Geometry, Layers
from lit_data.synthesis import render
from lit_data.wings.watermarks.blend import compress
from tests.augment.test_augmentation import ANY_CHANNELS, RGB, make_layers
from tests.simulated.log import LOG
from tests.synthesis.placing import many, plan_of
from tests.synthesis.test_renderer import NAMES, RANGES, as_dtype, scene

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
MPS = torch.device("mps", 0)


@pytest.fixture(autouse=True)
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    if not LOG.installed:
        pytest.skip("an Apple GPU is simulated only")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.parametrize("name", NAMES)
def test_defects_are_drawn(name: str) -> None:
    plan = plan_of(many(name), 8, (3, 64, 64))
    images = as_dtype(scene(8, (3, 64, 64)), "uint8").to(torch.float32)
    expected, _ = render(images.clone(), plan, RANGES["uint8"][1])
    found, _ = render(images.to(MPS), plan, RANGES["uint8"][1])
    difference = (found.cpu() - expected).abs()
    assert float((difference > 1).float().mean()) < 1e-3  # noise is estimated in float32


@pytest.mark.parametrize("number", range(len([*ANY_CHANNELS, *RGB])))
def test_batches_are_augmented(number: int) -> None:
    make = [*ANY_CHANNELS, *RGB][number]
    augmentation, layers = make(), make_layers(4, 3, 32, 32)
    draws = augmentation.draw(0, 0, np.arange(4), 3)
    there = Layers(layers.images.to(MPS), layers.masks.to(MPS))
    found = augmentation(there, {name: value.to(MPS) for name, value in draws.items()})
    expected = augmentation(layers, draws).images
    assert_close(found.images.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_whole_numbers_are_turned_and_files_are_compressed() -> None:
    geometry = Geometry(rotate_deg=10)
    draws = {name: value.to(MPS) for name, value in geometry.draw(0, 0, np.arange(2), 3).items()}
    masks = torch.arange(512, dtype=torch.int64).reshape(2, 1, 16, 16)
    turned = geometry.transform(Layers(torch.rand(2, 3, 16, 16).to(MPS), masks.to(MPS)), draws)
    assert set(turned.masks.cpu().unique().tolist()) <= set(range(512))
    images, quality = torch.rand(2, 3, 32, 32).to(MPS), torch.tensor([50.0, 90.0]).to(MPS)
    assert compress(images, quality).shape == images.shape
