from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.wings.volumes import PointVoxelNet, QueryCounts, VectorQuantiser, VoxelModule
from lit_data.wings.volumes.voxel.module import VoxelScores
from tests.models.runs import (
    assert_plain_checkpoint,
    assert_trains_accumulated,
    count_weights,
    fit_unchanged,
    load_batches,
    make_trainer,
)

SIDE = 16


def _batch(volumes: int = 2) -> Batch:
    """A ball in each volume, bright in its middle."""
    grid = torch.cartesian_prod(*[torch.arange(SIDE)] * 3)
    coords, feats, counts = [], [], []
    for row in range(volumes):
        away = (grid - torch.tensor([5.0 + 3 * row, 7.0, 6.0 + 2 * row])).norm(dim=1)
        inside = grid[away < 4.5]
        coords.append(torch.cat((torch.full((len(inside), 1), row), inside), dim=1))
        feats.append(1 - away[away < 4.5] / 6)
        counts.append(len(inside))
    return {
        "coords": torch.cat(coords).int(),
        "feats": torch.cat(feats)[:, None],
        "coords_count": torch.tensor(counts),
        "shape": torch.full((volumes, 3), SIDE),
        "index": torch.arange(volumes),
    }


def _slice(batch: Batch, start: int) -> Batch:
    """The samples from one on, with the row numbers of the whole batch."""
    first = int(batch["coords_count"][:start].sum())
    return {
        key: value[first if key in ("coords", "feats") else start :] for key, value in batch.items()
    }


def _net(*, quantised: bool = True) -> PointVoxelNet:
    quantiser = VectorQuantiser(32, 4) if quantised else None
    return PointVoxelNet(grid=8, width=8, latent=4, hidden=16, quantiser=quantiser)


def _module(*, quantised: bool = True, **options: Any) -> VoxelModule:
    torch.manual_seed(0)
    return VoxelModule(
        _net(quantised=quantised), **({"queries": QueryCounts(128, 256, 128)} | options)
    )


def test_it_learns_two_volumes_by_heart(tmp_path: Path) -> None:
    model = _module(optimizer=partial(torch.optim.Adam, lr=2e-2))
    loader = load_batches(_batch())
    trainer = make_trainer(tmp_path, max_epochs=70, check_val_every_n_epoch=70)
    trainer.fit(model, loader, loader)
    assert trainer.callback_metrics["val/iou"] > 0.75
    assert trainer.callback_metrics["val/f1"] > 0.85
    assert trainer.callback_metrics["val/value_mae"] < 0.06
    tested = trainer.test(model, loader, verbose=False)[0]
    names = ("iou", "f1", "value_mae", "psnr", "perplexity")
    assert set(tested) == {f"test/{name}" for name in names}
    assert tested["test/perplexity"] > 3
    plain = _module(quantised=False)
    scores = trainer.validate(plain, loader, verbose=False)[0]
    assert set(scores) == {f"val/{name}" for name in names[:-1]}
    found = trainer.predict(model, loader)
    true = {tuple(place) for place in _batch(1)["coords"][:, 1:].tolist()}
    mine = {tuple(place) for place in found[0][0]["coords"].tolist()}
    assert len(true & mine) > 0.8 * len(true | mine)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_trains_in_any_precision_and_with_accumulated_gradients(
    precision: Any, tmp_path: Path
) -> None:
    model = _module(schedule="none")
    assert_trains_accumulated(model, (_batch(), _batch(1)), tmp_path, precision=precision)
    assert model.net.quantiser is not None
    assert int(model.net.quantiser.updates) == 2


def test_a_piece_of_a_batch_has_its_own_part_of_the_loss(tmp_path: Path) -> None:
    model, whole = _module(quantised=False), _batch(3)
    model.trainer = make_trainer(tmp_path)
    model.log = lambda *_, **__: None  # type: ignore[assignment,method-assign]
    losses = [float(model.training_step(part, 0).detach()) for part in (whole, _slice(whole, 1))]
    first = {key: value[: int(whole["coords_count"][0])] for key, value in whole.items()}
    first |= {key: whole[key][:1] for key in ("coords_count", "shape", "index")}
    alone = float(model.training_step(first, 0).detach())
    assert 3 * losses[0] == pytest.approx(alone + 2 * losses[1], rel=1e-5)
    rows = whole["coords"].clone()
    rows[:, 0] = 0  # where there are counts, rows are not read
    assert float(model.training_step(whole | {"coords": rows}, 0).detach()) == losses[0]


def test_each_validation_has_the_loss_of_the_same_places(tmp_path: Path) -> None:
    model = _module(optimizer=partial(torch.optim.SGD, lr=0), quantised=False)
    losses = fit_unchanged(model, _batch(), tmp_path)
    assert losses[0] == losses[1] > 0


def test_volumes_may_be_empty(tmp_path: Path) -> None:
    empty = _batch() | {
        "coords": torch.zeros(0, 4).int(),
        "feats": torch.zeros(0, 1),
        "coords_count": torch.zeros(2).long(),
    }
    trainer = make_trainer(tmp_path)
    trainer.fit(_module(), load_batches(empty), load_batches(empty))
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_checkpoints_hold_plain_data(tmp_path: Path) -> None:
    plain = {"schedule": "cosine", "seed": 3, "query_chunk": 500}
    plain |= {"value_weight": 1.5, "cell_weight": 0.5, "code_weight": 0.1}
    plain |= {"threshold": 0.4, "cell_threshold": 0.1, "score_voxels": 10000}
    model, trainer, path = _module(**plain), make_trainer(tmp_path), tmp_path / "a.ckpt"
    trainer.fit(model, load_batches(_batch(1)), load_batches(_batch(1)))
    expected = plain | {"num_parameters": count_weights(model.net)}
    assert_plain_checkpoint(model, VoxelModule(_net()), trainer, path, expected)
    loaded = VoxelModule.load_from_checkpoint(path, net=_net(), weights_only=True)
    assert (loaded.schedule, loaded.seed, loaded.decoding) == ("cosine", 3, model.decoding)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "linear"}, "schedule='linear' is unknown: choose one of one_cycle, cosine,"),
        ({"seed": -1}, "seed=-1 is not usable"),
        ({"threshold": 0.0}, "threshold=0.0, .*need 0 < threshold < 1"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _module(**options)


def _errors(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_scores_of_two_volumes() -> None:
    metric = VoxelScores()
    metric.update(torch.tensor([6]), torch.tensor([10]), torch.tensor([8]), _errors(3, 1, 10))
    metric.update(torch.zeros(1), torch.full((1,), 5.0), torch.full((1,), 5.0), _errors(0, 0, 0))
    found = {name: float(value) for name, value in metric.compute().items()}
    expected = {"iou": 6 / 12 / 2, "f1": 12 / 18 / 2, "value_mae": 0.3, "psnr": 10.0}
    assert found == pytest.approx(expected)
    exact = VoxelScores()
    exact.update(torch.ones(1), torch.ones(1), torch.ones(1), _errors(0, 0, 5))
    assert float(exact.compute()["psnr"]) == pytest.approx(120)  # it is finite


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_weights_of_another_dtype_are_refused(precision: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision=precision)
    with pytest.raises(ConfigError, match=rf"precision={precision}: VoxelModule needs float32"):
        trainer.fit(_module(), load_batches(_batch()), load_batches(_batch()))
