"""Checkpoints that are damaged, diverged or of another run end in one line that names them."""

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lit_data import callbacks as ours
from lit_data.app.checkpoints import find_start, load_weights, restoring
from lit_data.core.errors import StoreError
from lit_data.testing import QUIET

MUTANTS = 30
pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed", "ignore:Checkpoint directory"
)
VALUES = ["x", None, -5, [1, 2], {"a": 1}, float("nan"), 2**70, torch.zeros(3), b"q", 10.5]


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("unset", torch.tensor(float("nan")))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def _trainer(folder: Path, epochs: int) -> Trainer:
    callbacks = [ours.AdaptiveBatchSize(), ours.DataWaitMonitor(), ours.MemoryMonitor()]
    callbacks += [ours.SampleDigest(), ours.EmptyCache(), ModelCheckpoint(folder, save_last=True)]
    settings = QUIET | {"max_epochs": epochs, "enable_checkpointing": True}
    return Trainer(**settings, callbacks=callbacks, default_root_dir=folder)


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2)


def _leaves(node: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            yield from _leaves(value, (*path, key))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    _trainer(folder, 1).fit(_Module(), _loader())
    return folder / "last.ckpt"


def _go_on(path: Path, epochs: int = 2) -> Trainer:
    model, trainer = _Module(), _trainer(path.parent / "next", epochs)
    with restoring(path, trainer, model):
        trainer.fit(model, _loader(), ckpt_path=path, weights_only=True)
    return trainer


def test_a_whole_checkpoint_is_gone_on_from(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _go_on(trained).global_step == 6
    assert "nothing was trained" not in caplog.text


def test_a_run_that_was_over_already_says_that_nothing_was_trained(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _go_on(trained, epochs=1).global_step == 3
    line = f"nothing was trained: {trained} has finished trainer.max_epochs=1: set trainer.max_epochs=2"
    assert line in caplog.text


@pytest.mark.parametrize("resume", ["latest", "auto", "runs/one"])
def test_a_pipe_or_a_folder_in_the_place_of_a_checkpoint_is_refused(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/one")
    path = run / "checkpoints/last.ckpt"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(
        StoreError, match=r"last\.ckpt is not a readable checkpoint: not a regular file"
    ):
        find_start(None, None, resume, Path("runs"), run, tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=r"last\.ckpt is a folder but not a sharded checkpoint"):
        find_start(None, None, resume, Path("runs"), run, tmp_path)
    (path / ".metadata").write_bytes(b"")
    assert find_start(None, None, resume, Path("runs"), run, tmp_path) == path
    with pytest.raises(StoreError, match=r"last\.ckpt does not fit this run: IsADirectoryError"):
        _go_on(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning and torch remark on what they are given
def test_a_damaged_state_is_taken_or_refused_in_one_line(trained: Path, tmp_path: Path) -> None:
    whole, draws, refused = torch.load(trained, weights_only=True), random.Random(0), list[str]()
    path = tmp_path / "mutant.ckpt"
    for _ in range(MUTANTS):
        mutant = copy.deepcopy(whole)
        part = draws.choice(["callbacks", "callbacks", "loops"])
        place = draws.choice(list(_leaves(whole[part], (part,))))
        node = mutant
        for key in place[:-1]:
            node = node[key]
        if draws.random() < 0.15:
            del node[place[-1]]
        else:
            node[place[-1]] = draws.choice(VALUES)
        torch.save(mutant, path)
        try:
            _go_on(path)
        except StoreError as error:
            refused.append(str(error))
    assert len(refused) > MUTANTS // 4
    assert all(str(path) in message and "\n" not in message for message in refused)


def test_weights_of_nan_are_refused_and_buffers_may_hold_what_they_like(
    trained: Path, tmp_path: Path
) -> None:
    whole = torch.load(trained, weights_only=True)
    assert whole["state_dict"]["unset"].isnan()
    load_weights(_Module(), trained)
    whole["state_dict"]["layer.weight"][0, 1] = float("nan")
    path = tmp_path / "diverged.ckpt"
    torch.save(whole, path)
    message = r"diverged.ckpt holds NaN in 1 of 2 weights, first in layer.weight: training diverged"
    with pytest.raises(StoreError, match=message):
        load_weights(_Module(), path)
    with pytest.raises(StoreError, match=message):
        _go_on(path)


def test_an_error_of_training_stays_what_it_is(trained: Path) -> None:
    model, trainer = _Module(), _trainer(trained.parent / "next", 2)

    def fail(*_: object) -> Tensor:
        raise KeyError("of the user")

    model.training_step = fail  # type: ignore[assignment]
    with pytest.raises(KeyError, match="of the user"), restoring(trained, trainer, model):
        trainer.fit(model, _loader(), ckpt_path=trained, weights_only=True)
