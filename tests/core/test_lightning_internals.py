"""Fails where Lightning moves what `AdaptiveBatchSize` stands on."""

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
)
from packaging.version import Version
from torch import Tensor

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.core.errors import ConfigError
from lit_data.core.lightning_internals import (
    BELOW,
    LOWEST,
    automatic_loop,
    check_version,
    is_accumulating,
    keep_earlier_rows,
    number_batch,
    results_of,
    save_progress,
)
from lit_data.testing import QUIET
from tests.helpers.stock_modules import STOCK

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"
)


def test_versions_that_are_known_and_others() -> None:
    for version in ("2.6.6", "2.6.6rc1", "2.6.6+cpu", "2.6.7", "2.6.10.dev20260101"):
        check_version(version)
    for version in ("1.9.5", "2.6.5", "2.6.5.post1", "2.7.0", "2.7.0.dev1", "2.7.0rc1", "3.0"):
        text = rf"lightning {version} was not tested: install a version from 2\.6\.6 to below 2\.7"
        with pytest.raises(ConfigError, match=text):
            check_version(version)


def test_the_installed_version_is_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Version(L.__version__) >= LOWEST
    assert Version(L.__version__) < BELOW
    monkeypatch.setattr("lit_data.core.lightning_internals.LOWEST", Version("9"))
    stock = STOCK["classifier"]
    with pytest.raises(ConfigError, match=r"to below 2\.7"):
        L.Trainer(**QUIET, callbacks=[AdaptiveBatchSize()]).fit(stock.build(), stock.loader())


STEP = _AutomaticOptimization._optimizer_step


# What is wrapped or called, and with which arguments.
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (_AutomaticOptimization._make_closure, ["self", "kwargs", "optimizer", "batch_idx"]),
        (STEP, ["self", "batch_idx", "train_step_and_backward_closure"]),
        (_AutomaticOptimization.run, ["self", "optimizer", "batch_idx", "kwargs"]),
        (Strategy.batch_to_device, ["self", "batch", "device", "dataloader_idx"]),
        (Strategy.validation_step, ["self", "args", "kwargs"]),
        (Strategy.test_step, ["self", "args", "kwargs"]),
        (Strategy.predict_step, ["self", "args", "kwargs"]),
        (DDPStrategy.block_backward_sync, ["self"]),
        (Closure.__init__, ["self", "step_fn", "backward_fn", "zero_grad_fn"]),
        (Closure.closure, ["self", "args", "kwargs"]),
        (ClosureResult.__init__, ["self", "closure_loss", "extra"]),
        (_ResultCollection._extract_batch_size, ["self", "value", "batch_size", "meta"]),
        (_ResultMetric.update, ["self", "value", "batch_size"]),
        (torch.amp.GradScaler.unscale_, ["self", "optimizer"]),
    ],
)
def test_signatures(function: Any, arguments: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == arguments


def test_what_is_read_within_a_step() -> None:
    stock, seen = STOCK["classifier"], []
    module = stock.build()
    trainer = L.Trainer(**QUIET, max_epochs=1, accumulate_grad_batches=2, limit_val_batches=0)
    step = module.training_step

    def look(batch: Any, batch_idx: int) -> Tensor:
        results = results_of(trainer)
        assert isinstance(results, _ResultCollection)
        assert results.batch[0] is batch[0]
        assert results.batch_size is None
        seen.append((number_batch(trainer), is_accumulating(trainer)))
        assert module._current_fx_name == "training_step"
        loss = step(batch, batch_idx)
        metric = results["training_step.train/loss"]
        assert metric.is_tensor
        assert isinstance(metric.meta, _Metadata)
        assert (metric.meta.on_step, metric.meta.is_mean_reduction) == (True, True)
        assert torch.equal(metric._forward_cache, loss)
        assert not results["training_step.train/accuracy"].is_tensor
        return loss

    module.training_step = look
    trainer.fit(module, stock.loader(24))
    assert seen == [(1, True), (2, False), (3, False)]


def test_progress_is_put_back() -> None:
    trainer = L.Trainer(**QUIET)
    progress = automatic_loop(trainer).optim_progress.optimizer
    progress.zero_grad.increment_ready()
    before, restore = progress.state_dict(), save_progress(trainer)
    progress.zero_grad.increment_ready()
    progress.zero_grad.increment_started()
    assert progress.state_dict() != before
    restore()
    assert progress.state_dict() == before


def test_a_log_goes_on_behind_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "csv" / "metrics.csv"
    logger = CSVLogger(tmp_path, name="csv", version="")
    for step in (1, 3, 5):
        logger.log_metrics({"loss": -0.5}, step)
    logger.save()
    with path.open("a") as file:
        file.write("-0.2,1")  # of step 13, and a kill
    again = CSVLogger(tmp_path, name="csv", version="")
    keep_earlier_rows(again)
    again.log_metrics({"loss": 0.25, "map,50": 1.0}, 4)  # step 5 is trained again
    again.save()
    rows = ['loss,"map,50",step', "-0.5,,1", "-0.5,,3", "0.25,1.0,4"]
    assert path.read_text().splitlines() == rows
