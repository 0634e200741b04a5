import copy
import pickle

import kornia.augmentation as ka
import numpy as np
import pytest
import torch

from lit_data.augment import (
    ColourJitter,
    Compiled,
    ExternalTransform,
    Geometry,
    Layers,
    Photometry,
    Pipeline,
    StripeAugment,
    stage_augmentations,
)
from lit_data.core.errors import ConfigError


def test_steps_run_in_their_order_with_their_own_numbers() -> None:
    steps = [Geometry(turn=True, rotate_deg=20), ColourJitter(), Photometry(gamma=0.3)]
    pipeline = Pipeline([*steps, ka.RandomHorizontalFlip()])
    layers = Layers(torch.rand(5, 3, 9, 9))
    draws = pipeline.draw(1, 2, np.arange(5), 3)
    assert isinstance(pipeline.steps[3], ExternalTransform)
    names = ["geometry", "colour", "photometry", "external"]
    assert list(draws) == [f"augment_{name}" for name in names]
    expected = layers
    for step in [*steps, pipeline.steps[3]]:
        assert isinstance(step, Geometry | ColourJitter | Photometry | ExternalTransform)
        expected = step(expected, step.draw(1, 2, np.arange(5), 3))
    assert torch.equal(pipeline(layers, draws).images, expected.images)


@pytest.mark.parametrize("kind", [Geometry, Photometry, ColourJitter])
def test_two_of_a_kind_would_draw_the_same_numbers(kind: type) -> None:
    with pytest.raises(ConfigError, match="two steps of the pipeline draw 'augment_"):
        Pipeline([kind(), Pipeline([kind()])])


def test_a_step_must_be_an_augmentation() -> None:
    with pytest.raises(ConfigError, match="3 is not an augmentation"):
        Pipeline([3])  # type: ignore[list-item]


def test_one_augmentation_is_for_training_and_each_stage_may_have_its_own() -> None:
    stripe, crop = StripeAugment(), Geometry(crop_px=8)
    assert stage_augmentations(None, ["image"]) == {}
    assert stage_augmentations(stripe, ["image"]) == {"train": stripe}
    found = stage_augmentations({"train": stripe, "val": crop, "test": None}, ["image", "mask"])
    assert found == {"train": stripe, "val": crop}


@pytest.mark.parametrize(
    ("stage", "match"),
    [
        ("trian", "stage of augment='trian' is unknown: choose one of train, val, test, predict"),
        (7, "stage of augment=7 is unknown"),
    ],
)
def test_unknown_stages(stage: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        stage_augmentations({stage: StripeAugment()}, ["image"])


IMAGES = torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"images": IMAGES.double()}, r"5\] float64: they must be \[B, C, H, W\] float32"),
        ({"images": IMAGES[0]}, r"images are \[3, 4, 5\] float32"),
        ({"masks": torch.zeros(2, 1, 5, 4)}, r"5, 4\] float32 with images \[2, 3, 4, 5\]"),
        ({"masks": torch.zeros(1, 1, 4, 5)}, r"must be \[B, K, H, W\]"),
        ({"boxes": torch.zeros(3, 5)}, r"boxes are \[3, 5\] float32: they must be \[N, 6\]"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, torch.Tensor], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Layers(**({"images": IMAGES} | given))


INDEX = np.arange(6)


def _layers() -> Layers:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6, 3, 40, 40, generator=generator)
    return Layers(images, (images[:, :1] > 0.8).float())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_result_is_that_of_the_augmentation() -> None:
    plain = Pipeline([Geometry(rotate_deg=10, shift_px=3, crop_px=32), Photometry(gamma=0.2)])
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
    calls = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: calls.append(options) or function
    )
    compiled = Compiled(StripeAugment(), backend="inductor", mode="max-autotune")
    for _ in range(2):
        compiled(_layers(), compiled.draw(0, 0, INDEX, 3))
    assert calls == [{"backend": "inductor", "mode": "max-autotune"}]
