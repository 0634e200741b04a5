import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

from lit_data.callbacks import ImageMetrics
from lit_data.core.errors import ConfigError
from lit_data.testing import QUIET
from tests.callbacks.painter import Album, Painter
from tests.helpers.notes import Notes

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


class Counting(nn.Module):
    """Features that are the mean colours and how far they spread; counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(len(images))
        return torch.cat((images.mean((2, 3)), images.std((2, 3))), 1)


def _make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    steps = {"max_epochs": 3, "num_sanity_val_steps": 1, "log_every_n_steps": 5}
    settings = QUIET | steps | {"default_root_dir": folder} | options
    return Trainer(**settings, callbacks=list(callbacks))


def _fit(folder: Path, model: LightningModule, *callbacks: Callback, **options: Any) -> Trainer:
    trainer = _make_trainer(folder, *callbacks, **options)
    torch.manual_seed(1)
    trainer.fit(model, datamodule=Album())
    return trainer


def test_it_measures_every_n_steps_in_validation_and_at_the_end(tmp_path: Path) -> None:
    notes, model = Notes("train/", "val/"), Painter()
    metrics = ImageMetrics(every_n_steps=4, count=8, batch_size=4)
    trainer = _fit(tmp_path, model, metrics, logger=notes, max_epochs=1)  # of 6 batches
    assert notes.steps == [3, 5, 6]
    assert [set(row) for row in notes.rows] == [
        {"train/fid_small", "train/kid_small"},
        {"val/fid_small", "val/kid_small"},
        {"train/fid_small", "train/kid_small"},
    ]
    assert notes.rows[2]["train/kid_small"] < notes.rows[0]["train/kid_small"]  # it has learned
    assert metrics.summary() == notes.rows[2]
    for row, name in enumerate(("train/kid_small", "val/kid_small")):
        assert float(trainer.callback_metrics[name]) == pytest.approx(notes.rows[row][name])
    assert model.calls == [(8, 0, 4)] * 3


@pytest.mark.filterwarnings(
    "ignore:Using ModelCheckpoint with manual optimization and every_n_train:UserWarning"
)
def test_a_checkpoint_can_be_chosen_by_it(tmp_path: Path) -> None:
    notes, metrics = Notes("val/"), ImageMetrics(every_n_steps=None)
    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="val/kid_small", mode="min")
    _fit(tmp_path, Painter(), metrics, best, enable_checkpointing=True, logger=notes)
    least = min(row["val/kid_small"] for row in notes.rows)
    assert float(best.best_model_score) == pytest.approx(least)


def test_test_and_validation_compare_with_their_own_split(tmp_path: Path) -> None:
    model, metrics = Painter(), ImageMetrics(extractor=Counting())
    model.brightness.data.fill_(0.8)
    trainer = _make_trainer(tmp_path, metrics)
    data = Album(test=0.2)
    (validated,) = trainer.validate(model, datamodule=data, verbose=False)
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    assert abs(validated["val/fid_counting"]) < 0.01
    # Three colours, 0.6 too bright.
    assert tested["test/fid_counting"] == pytest.approx(3 * 0.6**2, rel=0.05)
    assert set(tested) == {"test/fid_counting", "test/kid_counting"}
    (again,) = trainer.validate(model, datamodule=Album(val=0.2), verbose=False)  # of other data
    assert again["val/fid_counting"] == pytest.approx(tested["test/fid_counting"], rel=0.05)
    assert metrics.summary() == {}


def test_it_counts_on_after_a_resume(tmp_path: Path) -> None:
    first, second = Notes("train/"), Notes("train/")
    # It saves at the end of the epoch.
    saver = ModelCheckpoint(dirpath=tmp_path, filename="last", enable_version_counter=False)
    metrics, again = (ImageMetrics(every_n_steps=4) for _ in range(2))
    options = {"limit_val_batches": 0, "enable_checkpointing": True}
    _fit(tmp_path, Painter(), metrics, saver, logger=first, max_epochs=1, **options)
    trainer = _make_trainer(tmp_path, again, saver, logger=second, max_epochs=2, **options)
    trainer.fit(Painter(), datamodule=Album(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert (first.steps, second.steps) == ([3, 6], [7, 11])  # batches 4, 6, 8 and 12
    assert all(math.isfinite(row["train/kid_small"]) for row in second.rows)


def test_images_that_are_not_finite_are_told_and_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Painter):
        def sample_images(self, count: int, *, seed: int, batch_size: int) -> Tensor:
            return torch.full((count, 3, 8, 8), math.nan)

    metrics = ImageMetrics(every_n_steps=6)
    _fit(tmp_path, Broken(), metrics, max_epochs=1, limit_val_batches=0)
    assert math.isnan(float(metrics.summary()["train/kid_small"]))
    assert "generated images are not finite, or there are too few real ones" in caplog.text


def test_modules_and_batches_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ImageMetrics: BoringModel has no method sample_images"):
        _fit(tmp_path, BoringModel(), ImageMetrics())
    with pytest.raises(ConfigError, match="key='photo': the batch has no images"):
        _fit(tmp_path, Painter(), ImageMetrics(key="photo"))
