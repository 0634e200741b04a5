"""What a run logs is the same whether its batches go through whole or in pieces."""

from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lit_data.callbacks.adaptive_batch_size import AdaptiveBatchSize
from lit_data.testing import QUIET
from tests.helpers.limited_memory import FaultPlan, install
from tests.helpers.tally import Rows

REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": max, "min": "min"}


class Logs(LightningModule):
    """Logs whole numbers, which add up exactly, in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_metric, self.val_metric = MeanMetric(), MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._log(batch, "train")
        return (self.weight * batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._log(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def _log(self, batch: Tensor, stage: str) -> None:
        for name, reduction in REDUCTIONS.items():
            value = getattr(torch, name)(batch)
            options = {"on_epoch": True, "reduce_fx": reduction}
            self.log(f"{stage}/{name}", value, on_step=True, **options)
            self.log(f"{stage}/{name}_epoch_only", value, on_step=False, **options)
        self.log(f"{stage}/given", batch.mean(), on_step=True, on_epoch=True, batch_size=len(batch))
        metric = getattr(self, f"{stage}_metric")
        metric(batch)
        self.log(f"{stage}/metric", metric, on_step=False, on_epoch=True)
        if batch[0] == 0:
            self.log(f"{stage}/seldom", batch[0] + 5, on_step=True, on_epoch=False)


class All(Rows):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        names = [name for name in metrics if not name.startswith("batch/")]
        self.rows.append({name: metrics[name] for name in names})


def _run(
    *callbacks: Callback, module: LightningModule | None = None
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    rows, module = All(), module or Logs()
    batches = torch.arange(28, dtype=torch.float32).split(8)  # the last has 4
    steps = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    trainer = Trainer(**(QUIET | steps | {"logger": rows}), callbacks=list(callbacks))
    loader = DataLoader(list(batches), batch_size=None)
    trainer.fit(module, loader, loader)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    found = {key: value for key, value in metrics.items() if not key.startswith("batch/")}
    return [row for row in rows.rows if set(row) - {"epoch"}], found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_pieces_log_what_whole_batches_log(size: int) -> None:
    assert _run(AdaptiveBatchSize(max_size=size)) == _run()


@pytest.mark.slow
def test_pieces_that_failed_leave_nothing_in_the_log() -> None:
    module, faults = Logs(), []
    for stage, inner in (("train", "train_metric"), ("validate", "val_metric")):
        options = {"stages": (stage,), "inner": inner}
        plan = FaultPlan("forward_middle", lambda n, step, micro: n > 2, **options)
        faults.append(install(module, plan))
    found = _run(AdaptiveBatchSize(grow_after=None), module=module)
    assert [fault.refused for fault in faults] == [[8, 4]] * 2
    assert found == _run(module=Logs())
