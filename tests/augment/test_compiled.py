import copy
import pickle

import numpy as np
import pytest
import torch

from lit_data.augment import Compiled, Geometry, Layers, Photometry, Pipeline, StripeAugment

INDEX = np.arange(6)


def _layers() -> Layers:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6, 3, 40, 40, generator=generator)
    return Layers(images, (images[:, :1] > 0.8).float())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "plain",
    [
        StripeAugment(),
        Pipeline([Geometry(rotate_deg=10, shift_px=3, crop_px=32), Photometry(gamma=0.2)]),
    ],
)
def test_the_result_is_that_of_the_augmentation(plain: Pipeline) -> None:
    compiled = Compiled(plain, backend="aot_eager")
    assert (compiled.draw_keys, compiled.crop_px) == (plain.draw_keys, plain.crop_px)
    assert compiled.margin_px((32, 32)) == plain.margin_px((32, 32))
    draws = compiled.draw(1, 2, INDEX, 3)
    assert draws.keys() == plain.draw(1, 2, INDEX, 3).keys()
    for augmentation in (compiled, copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        found, expected = augmentation(_layers(), draws), plain(_layers(), draws)
        # Compiled, places are float32; OpenCV, which warps what is not compiled on a CPU, has them
        # in float64.
        torch.testing.assert_close(found.images, expected.images, rtol=0, atol=1e-5)
        assert torch.equal(found.masks, expected.masks)


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: calls.append(options) or function
    )
    compiled = Compiled(StripeAugment(), backend="inductor", mode="max-autotune")
    for _ in range(2):
        compiled(_layers(), compiled.draw(0, 0, INDEX, 3))
    assert calls == [{"backend": "inductor", "mode": "max-autotune"}]
