"""Which checkpoint counts as the best where scores are undefined, or nothing validates."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_data.app.monitor_guard import MonitorGuard, leave_undefined_empty
from lit_data.app.terminal import print_scores
from lit_data.callbacks.wrapping import wrap
from lit_data.core.types import Batch
from lit_data.models.scored import ScoredModule
from tests.models.runs import make_trainer

NAN = float("nan")


class Scores(ScoredModule):
    """Logs a score of its list after each epoch."""

    def __init__(self, scores: Sequence[float]) -> None:
        super().__init__(nn.Linear(1, 1), optimizer=torch.optim.SGD, schedule="none")
        self.values = scores

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.net(batch["image"]).sum()
        return loss

    @override
    def score(self, batch: Batch, stage: str) -> None:
        pass

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        return {"dice": torch.tensor(self.values[self.current_epoch])}


def fit(
    folder: Path,
    scores: Sequence[float],
    *callbacks: Callback,
    validates: bool = True,
    **options: Any,
) -> Any:
    loader = DataLoader([{"image": torch.zeros(1)}] * 2)  # type: ignore[arg-type]
    trainer = make_trainer(
        folder,
        max_epochs=len(scores),
        callbacks=[MonitorGuard(knows_names=True), *callbacks],
        enable_checkpointing=True,
        **options,
    )
    trainer.fit(Scores(scores), loader, loader if validates else [])
    return trainer


def best(folder: Path, mode: str = "max") -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, "best", monitor="val/dice", mode=mode, enable_version_counter=False
    )


@pytest.mark.parametrize(
    ("scores", "mode", "chosen"),
    [
        ([NAN, NAN, NAN], "max", 2),
        ([NAN, NAN, NAN], "min", 2),
        ([NAN, 0.2, NAN], "max", 1),
        ([0.3, 0.2, NAN], "max", 0),
        ([0.3, 0.2, NAN], "min", 1),
        ([0.0, 0.0, 0.0], "max", 0),
    ],
)
def test_the_last_of_undefined_scores_is_the_best_and_any_other_is_better(
    scores: Sequence[float], mode: str, chosen: int, tmp_path: Path
) -> None:
    fit(tmp_path, scores, best(tmp_path, mode))
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["best.ckpt"]
    content = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert content["epoch"] == chosen


@pytest.mark.filterwarnings("ignore:Total length of `list`")
def test_where_nothing_validates_the_last_checkpoint_is_the_best(tmp_path: Path) -> None:
    own = ModelCheckpoint(tmp_path, "own", monitor="train/loss", mode="max", save_top_k=-1)
    fit(tmp_path, [NAN, NAN], best(tmp_path), own, validates=False)
    content = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert content["epoch"] == 1
    assert own.monitor == "train/loss"


def test_a_validation_that_comes_later_still_chooses_the_best(tmp_path: Path) -> None:
    options = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    fit(tmp_path, [0.1, 0.9, 0.1, 0.2], best(tmp_path), **options)
    content = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert content["epoch"] == 1


def test_early_stopping_waits_for_a_score(tmp_path: Path) -> None:
    stopping = EarlyStopping("val/dice", mode="max", patience=2)
    trainer = fit(tmp_path, [NAN] * 3 + [0.5] * 4, stopping)
    assert trainer.current_epoch == 6  # two epochs no better than the first one with a score


def test_an_undefined_score_is_an_empty_cell_and_a_diverged_loss_is_not(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv", version="")
    wrap(logger, "log_metrics", leave_undefined_empty)
    nan = torch.tensor(torch.nan)
    logger.log_metrics({"val/dice": nan, "test/dice": torch.tensor(0.5), "train/loss": nan}, 3)
    logger.save()
    (row,) = csv.DictReader((tmp_path / "csv" / "metrics.csv").read_text().splitlines())
    assert row == {"val/dice": "", "test/dice": "0.5", "train/loss": "nan", "step": "3"}


def test_the_table_at_the_end_leaves_the_cell_empty(capsys: pytest.CaptureFixture[str]) -> None:
    print_scores({"val/dice": float("nan"), "test/dice": 0.5})
    printed = capsys.readouterr().out
    assert "0.5" in printed
    assert "nan" not in printed
