"""Augmentation of windows of volumes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.wings.volumes import VolumeAugment

STILL = {"rotate_deg": 0.0, "scale": (1.0, 1.0), "gain": 0.0, "offset": 0.0}
STILL |= {"gamma": 0.0}


def _batch(count: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    image = torch.rand(count, 1, 5, 8, 6)
    return {"image": image, "mask": (image * 4).int(), "occupied": image > 0.5}


def test_flips_move_voxels_labels_and_occupied_ones_alike() -> None:
    batch = _batch()
    augment = VolumeAugment(flip=(True, True, True), **STILL)
    draws = augment.draw(3, 1, np.arange(6))
    flipped = augment(batch, draws)
    assert len({tuple(row) for row in draws[:, :3].tolist()}) > 1
    for row, signs in enumerate(draws[:, :3].tolist()):
        axes = [axis + 1 for axis, sign in enumerate(signs) if sign < 0]
        for name, values in batch.items():
            expected = values[row].flip(axes)
            assert flipped[name].dtype == values.dtype
            assert_close(flipped[name][row], expected, rtol=0, atol=1e-6)


def test_numbers_are_those_of_the_sample_and_no_new_label_appears() -> None:
    augment, batch = VolumeAugment(probability=1.0), _batch()
    draws = augment.draw(3, 1, np.arange(6))
    assert torch.equal(augment.draw(3, 1, [4, 2]), draws[[4, 2]])
    assert not torch.equal(augment.draw(3, 2, [4, 2]), draws[[4, 2]])
    alone = augment({name: values[4:5] for name, values in batch.items()}, draws[4:5])
    together = augment(batch, draws)
    for name, values in together.items():
        assert_close(values[4:5], alone[name], rtol=0, atol=1e-6)
        assert not torch.equal(values, batch[name])
    assert set(together["mask"].flatten().tolist()) <= set(batch["mask"].flatten().tolist())
    assert 0 <= together["image"].min() <= together["image"].max() <= 1


@pytest.mark.parametrize(
    "options", [{"flip": [True]}, {"scale": [0, 1]}, {"scale": [1.2, 1]}, {"gain": 1.0}]
)
def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        VolumeAugment(**options)
