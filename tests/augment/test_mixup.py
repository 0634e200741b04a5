import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from lit_data.augment import Layers, MixUp
from lit_data.augment.mixing import invert_beta
from lit_data.core.errors import ConfigError


def _layers(samples: int = 6) -> Layers:
    rows = torch.arange(samples).repeat_interleave(torch.arange(samples) % 3)
    boxes = torch.rand(len(rows), 6, generator=torch.Generator().manual_seed(0))
    boxes[:, 0] = rows
    return Layers(
        torch.rand(samples, 3, 5, 7, generator=torch.Generator().manual_seed(1)), boxes=boxes
    )


def test_images_are_blended_and_boxes_of_both_kept() -> None:
    mixup, layers = MixUp(probability=0.6, alpha=1.0), _layers(12)
    draws = mixup.draw(2, 3, np.arange(12), 3)
    result = mixup(layers, draws)
    assert result.boxes is not None
    assert layers.boxes is not None
    assert result.boxes[:, 0].tolist() == sorted(result.boxes[:, 0].tolist())
    blended = 0
    for row, (share, choice) in enumerate(draws["augment_mixup"].tolist()):
        partner = row if share == 1 else (row + 1 + int(choice * 11)) % 12
        blended += partner != row
        expected = share * layers.images[row] + (1 - share) * layers.images[partner]
        torch.testing.assert_close(result.images[row], expected)
        found = result.boxes[result.boxes[:, 0] == row]
        theirs = [box for box in layers.boxes.tolist() if box[0] in (row, partner)]
        assert sorted(box[1:] for box in found.tolist()) == sorted(box[1:] for box in theirs)
        if partner == row:
            assert torch.equal(result.images[row], layers.images[row])
    assert 2 < blended < 12


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 1.5, 32.0, 5000.0])
def test_shares_are_distributed_as_they_should(alpha: float) -> None:
    shares = invert_beta((np.arange(20_000, dtype=np.float32) + 0.5) / 20_000, alpha)
    assert shares.min() >= 0
    assert shares.max() <= 1
    assert (np.diff(shares) >= 0).all()
    assert_allclose(shares + shares[::-1], 1, atol=2e-3)
    assert_allclose(shares.var(), 0.25 / (2 * alpha + 1), rtol=2e-3)
    if alpha == 1:
        assert_allclose(shares, (np.arange(20_000) + 0.5) / 20_000, atol=1e-4)


def test_draws_are_those_of_the_sample_and_hold_the_share_that_was_asked_for() -> None:
    mixup = MixUp(probability=0.3)
    draws = mixup.draw(1, 2, np.arange(5000), 3)["augment_mixup"]
    assert abs(float((draws[:, 0] < 1).float().mean()) - 0.3) < 0.02
    assert torch.equal(mixup.draw(1, 2, [7, 4999], 3)["augment_mixup"], draws[[7, 4999]])
    for seed, epoch in ((0, 2), (1, 3)):
        assert not torch.equal(mixup.draw(seed, epoch, np.arange(5000), 3)["augment_mixup"], draws)


def test_nothing_changes_where_it_is_off_or_there_is_no_other_sample() -> None:
    off, layers, alone = MixUp(), _layers(), _layers(1)
    assert off.draw(0, 0, np.arange(6), 3) == {}
    assert off(layers, {}) is layers
    mixup = MixUp(probability=1.0)
    assert mixup(alone, mixup.draw(0, 0, [0], 3)) is alone


def test_masks_cannot_be_blended() -> None:
    mixup, layers = MixUp(probability=1.0), Layers(torch.rand(2, 3, 4, 4), torch.zeros(2, 1, 4, 4))
    with pytest.raises(ConfigError, match="MixUp is not defined for masks"):
        mixup(layers, mixup.draw(0, 0, [0, 1], 3))


@pytest.mark.parametrize(
    "options", [{"probability": -0.1}, {"probability": 1.1}, {"alpha": 0.0}, {"alpha": np.inf}]
)
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"need a probability in 0\.\.1 and alpha > 0"):
        MixUp(**options)
