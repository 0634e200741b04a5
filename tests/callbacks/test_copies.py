"""All callbacks, and the module that they follow, can be copied at any time of a run."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_data import callbacks as public
from lit_data.testing import QUIET


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def sample_images(self, count: int, *, seed: int, batch_size: int) -> Tensor:
        return torch.zeros(count, 3, 8, 8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        moved = self.transfer_batch_to_device(batch, device=self.device, dataloader_idx=0)
        loss: Tensor = self.net(moved[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


# Those that a plain module cannot have in a run: they need a datamodule of images.
ONLY_NEW = {"ImageMetrics"}
OPTIONS: dict[str, dict[str, Any]] = {
    "GradientCheckpointing": {"modules": ["net.*"]},
    "EMA": {"decay": 0.9},
    "DataWaitMonitor": {"plot": False},
    "MemoryMonitor": {"plot": False},
    "AMP": {"precision": "bf16"},
}


def make(name: str, folder: Path) -> Callback:
    kind = getattr(public, name)
    options = dict(OPTIONS.get(name, {}))
    if name == "SaveOnSignal":
        options["path"] = folder / "interrupted.ckpt"
    callback: Callback = kind(**options)
    return callback


class Copy(Callback):
    """Copies something within a run."""

    def __init__(self, copy_it: Callable[[Trainer, LightningModule], Any]) -> None:
        self.copy_it = copy_it
        self.copies: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self.copies.append(self.copy_it(trainer, pl_module))


def fit(*callbacks: Callback) -> Net:
    torch.manual_seed(0)
    module = Net()
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.zeros(24)), 8)
    Trainer(**QUIET, max_epochs=1, callbacks=list(callbacks)).fit(module, loader)
    return module


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("name", public.__all__)
def test_a_callback_is_copied_before_within_and_after_a_run(
    name: str, how: Callable[[Any], Any], tmp_path: Path
) -> None:
    callback = make(name, tmp_path)
    assert type(how(callback)) is type(callback)
    if name in ONLY_NEW:
        return
    within = Copy(lambda trainer, pl_module: how(callback))
    fit(how(callback))
    module = fit(callback, within)
    for other in (*within.copies, how(callback)):
        assert torch.equal(fit(other).net[0].weight, module.net[0].weight)


@pytest.mark.parametrize("name", sorted(set(public.__all__) - ONLY_NEW))
def test_a_module_is_copied_within_a_run_without_what_follows_it(name: str, tmp_path: Path) -> None:
    def save(trainer: Trainer, pl_module: LightningModule) -> Any:
        file = io.BytesIO()
        torch.save(pl_module.net, file)
        file.seek(0)
        return torch.load(file, weights_only=False), copy.deepcopy(pl_module)

    within = Copy(save)
    fit(make(name, tmp_path), within)
    net, module = within.copies[0]
    inputs = torch.ones(2, 4)
    assert torch.equal(net(inputs), module.net(inputs))


@pytest.mark.slow
def test_ranks_are_spawned_with_all(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.zeros(24)), 8)
    options = QUIET | {"devices": 2, "strategy": "ddp_spawn", "max_epochs": 1}
    torch.manual_seed(0)
    module = Net()
    before = module.net[0].weight.detach().clone()
    callbacks = [make(name, tmp_path) for name in sorted(set(public.__all__) - ONLY_NEW)]
    Trainer(**options, callbacks=callbacks).fit(module, loader)
    assert not torch.equal(module.net[0].weight, before)
