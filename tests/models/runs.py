"""Short runs of example modules, and what all of them must keep to."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lit_data.app.checkpoints import load_weights
from lit_data.core.types import Batch
from lit_data.testing import QUIET


def make_trainer(folder: Path, **options: Any) -> Trainer:
    """Return a quiet Trainer of one epoch on the CPU."""
    return Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": folder, **options})


def load_batches(*batches: Batch) -> DataLoader[Any]:
    """Return a loader that gives batches as they are."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


class ValidationLosses(Callback):
    """Keeps the loss of each validation."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.values.append(trainer.callback_metrics["val/loss"].item())


def fit_unchanged(model: LightningModule, batch: Batch, folder: Path) -> list[float]:
    """Return the losses of two validations of a model whose optimizer changes nothing."""
    losses, loader = ValidationLosses(), load_batches(batch)
    options = {"max_epochs": 2, "callbacks": [losses], "num_sanity_val_steps": 0}
    make_trainer(folder, **options).fit(model, loader, loader)
    return losses.values


def assert_plain_checkpoint(
    model: LightningModule,
    fresh: LightningModule,
    trainer: Trainer,
    path: Path,
    plain: dict[str, Any],
) -> None:
    """Check that a checkpoint gives another module the same state, and holds these plain options alone."""
    trainer.save_checkpoint(path)
    load_weights(fresh, path)
    assert model.state_dict().keys() == fresh.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    assert torch.load(path, weights_only=True)["hyper_parameters"] == plain


def assert_trains_accumulated(
    model: LightningModule, batches: tuple[Batch, Batch], folder: Path, **options: Any
) -> Trainer:
    """Check that two batches are one step, which changes all weights and logs a loss in float32."""
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer = make_trainer(folder, accumulate_grad_batches=2, **options)
    trainer.fit(model, load_batches(*batches), load_batches(batches[0]))
    assert trainer.global_step == 1
    loss = trainer.callback_metrics["train/loss"]
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert all(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
    return trainer


def count_weights(net: torch.nn.Module) -> int:
    """Return the number of trained values."""
    return sum(weight.numel() for weight in net.parameters())
