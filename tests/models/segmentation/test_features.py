"""`FeatureDifferenceModule` and `LiteDifference`: nothing is trained, and what differs is found."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.models import CompareNet, FeatureDifferenceModule, LiteDifference
from tests.models.runs import assert_plain_checkpoint, load_batches, make_trainer


def _draw(seed: int, *, shift_px: int = 0) -> Batch:
    """Targets, every second one with a spot, and two references, moved and without it."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(6, 1, 12, 12, generator=generator)
    part = 0.3 + 0.4 * F.interpolate(coarse, scale_factor=8.0, mode="bilinear")
    target, mask = part.clone(), torch.zeros_like(part)
    target[::2, :, 40:52, 36:48] = 1.0
    mask[::2, :, 40:52, 36:48] = 1.0
    noise = 0.01 * torch.randn(6, 2, 96, 96, generator=generator)
    references = part.roll(shift_px, dims=3) + noise
    numbers = torch.arange(6)
    places = {"image_index": numbers, "index": numbers, "position": torch.zeros(6, 2).long()}
    return {"image": torch.cat((target, references), 1), "mask": mask, **places}


def _make(**options: Any) -> FeatureDifferenceModule:
    return FeatureDifferenceModule(LiteDifference(), **{"places": 2000, **options})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> FeatureDifferenceModule:
    """A module that was fitted once; the tests change nothing of it."""
    model = _make()
    trainer = make_trainer(tmp_path_factory.mktemp("features"), max_epochs=3)
    trainer.fit(model, load_batches(_draw(0), _draw(1)), load_batches(_draw(2)))
    assert trainer.global_step == 2  # one pass ends it
    return model


def test_nothing_is_trained_but_what_is_usual_and_thresholds_are_taken(
    fitted: FeatureDifferenceModule,
) -> None:
    fresh = _make()
    changed = set()
    for name, value in fresh.state_dict().items():
        if not torch.equal(value, fitted.state_dict()[name]):
            changed.add(name)
    thresholds = {"predict_threshold", "image_threshold", "image_threshold_fraction"}
    assert changed == {"net.usual", "net.high", *thresholds}
    assert (fitted.net.usual < 1).all()


@pytest.mark.parametrize("shift_px", [0, 2])
def test_what_the_target_alone_shows_scores_highest(
    fitted: FeatureDifferenceModule, shift_px: int
) -> None:
    batch = _draw(7, shift_px=shift_px)
    with torch.no_grad():
        probability = fitted.predict_step(batch, 0)["probability"]
    inside, outside = probability[batch["mask"] > 0], probability[batch["mask"] == 0]
    assert inside.median() > 0.5
    assert outside.median() < 0.2
    highest = probability.flatten(1).amax(1)
    assert highest[::2].amin() > highest[1::2].amax()


def test_neighbourhoods_of_marks_are_no_part_of_the_sample() -> None:
    model, batch = _make(places=10_000).eval(), _draw(0)
    model.sample(batch)
    of_marks = 3 * 2 * (16 // 4) ** 2  # each spot touches two places of the coarsest stride
    assert len(model.candidates) == 6 * (96 // 4) ** 2 - of_marks
    del batch["mask"]
    model.candidates.clear()
    model.sample(batch)
    assert len(model.candidates) == 6 * (96 // 4) ** 2


@torch.no_grad()
def test_the_distance_is_that_to_the_nearer_reference() -> None:
    images = torch.rand(2, 3, 64, 48)
    both = LiteDifference().eval()
    distances = []
    for number in (1, 2):
        alone = LiteDifference(references=1).eval()
        distances.append(alone.find_distances(images[:, [0, number]]))
    # Of the finest stride: others are interpolated after the choice.
    torch.testing.assert_close(
        both.find_distances(images)[:, 0], torch.minimum(*distances)[:, 0], rtol=1e-4, atol=1e-4
    )
    assert (both.find_distances(images[:, [0, 1, 0]]) < 1e-3).all()


@pytest.mark.parametrize("size", [(96, 96), (33, 70), (7, 5)])
def test_any_size_goes_through(size: tuple[int, int]) -> None:
    assert LiteDifference().eval()(torch.rand(2, 3, *size)).shape == (2, 1, *size)


def test_a_checkpoint_holds_all_that_was_found(
    fitted: FeatureDifferenceModule, tmp_path: Path
) -> None:
    plain = dict(fitted.hparams)
    assert plain["places"] == 2000
    assert_plain_checkpoint(fitted, _make(), fitted.trainer, tmp_path / "a.ckpt", plain)


def test_a_mask_over_everything_leaves_nothing_to_go_by(tmp_path: Path) -> None:
    batch = _draw(0)
    marked: dict[str, Tensor] = {**batch, "mask": torch.ones_like(batch["mask"])}
    with pytest.raises(ConfigError, match="masks mark every pixel"):
        make_trainer(tmp_path).fit(_make(), load_batches(marked), load_batches(batch))


def test_a_net_that_has_to_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="and FeatureDifferenceModule needs a LiteDifference"):
        FeatureDifferenceModule(CompareNet())
