import kornia.augmentation as ka
import numpy as np
import pytest
import torch

from lit_data.augment import ColourJitter, ExternalTransform, Geometry, Layers, Photometry, Pipeline
from lit_data.errors import ConfigError


def test_steps_run_in_their_order_with_their_own_numbers() -> None:
    steps = [Geometry(turn=True, rotate_deg=20), ColourJitter(), Photometry(gamma=0.3)]
    pipeline = Pipeline([*steps, ka.RandomHorizontalFlip()])
    layers = Layers(torch.rand(5, 3, 9, 9))
    draws = pipeline.draw(1, 2, np.arange(5), 3)
    assert isinstance(pipeline.steps[3], ExternalTransform)
    assert tuple(draws) == (
        "augment_geometry",
        "augment_colour",
        "augment_photometry",
        "augment_external",
    )
    expected = layers
    for step in [*steps, pipeline.steps[3]]:
        assert isinstance(step, Geometry | ColourJitter | Photometry | ExternalTransform)
        expected = step(expected, step.draw(1, 2, np.arange(5), 3))
    assert torch.equal(pipeline(layers, draws).images, expected.images)


def test_pipelines_nest_and_an_empty_one_does_nothing() -> None:
    layers = Layers(torch.rand(2, 1, 4, 4))
    nested = Pipeline([Pipeline([Geometry(turn=True)]), Pipeline([])])
    flat = Geometry(turn=True)
    draws = nested.draw(0, 0, [0, 1], 1)
    assert torch.equal(nested(layers, draws).images, flat(layers, draws).images)
    assert Pipeline([])(layers, {}) is layers


@pytest.mark.parametrize("kind", [Geometry, Photometry, ColourJitter])
def test_two_of_a_kind_would_draw_the_same_numbers(kind: type) -> None:
    with pytest.raises(ConfigError, match="two steps of the pipeline draw 'augment_"):
        Pipeline([kind(), Pipeline([kind()])])


def test_a_step_must_be_an_augmentation() -> None:
    with pytest.raises(ConfigError, match="3 is not an augmentation"):
        Pipeline([3])  # type: ignore[list-item]
