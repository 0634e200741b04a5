"""Steps of a run are written down in a few bytes."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer

from lit_data.callbacks import SampleDigest, StepRecord, step_record
from lit_data.callbacks.step_record import DIGEST, DIGEST_FILE, ORDER_FILE, STEP, STEP_FILE
from lit_data.commands.replay import Record
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.testing import QUIET

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*"),
]


class Model(LightningModule):
    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.losses = losses

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        unchanged = self.layer(batch).sum() * 0
        return unchanged + self.losses[self.global_step]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(folder: Path, loader: Any, *callbacks: Callback, epochs: int = 2) -> Trainer:
    callback_list = [*callbacks, StepRecord(folder)]
    trainer = Trainer(**QUIET, max_epochs=epochs, callbacks=callback_list)
    trainer.fit(Model([step + 0.5 for step in range(30)]), loader)
    return trainer


def _open(batch_size: int = 4) -> MicroBatchLoader:
    samples = torch.arange(10.0)[:, None]
    return MicroBatchLoader(
        samples, LoaderOptions(batch_size=batch_size, num_workers=0), shuffle=True
    )


def test_each_batch_has_its_place_in_the_order_its_loss_and_its_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_record, "WAITING", 4)
    digest = SampleDigest(14)
    _fit(tmp_path / "run", _open(), digest)
    record = Record.read(tmp_path / "run")
    assert record.steps["epoch"].tolist() == [0, 0, 0, 1, 1, 1]
    assert record.steps["position"].tolist() == [0, 4, 8] * 2
    assert record.steps["samples"].tolist() == [4, 4, 2] * 2
    assert record.steps["ranks"].tolist() == [1] * 6
    assert record.steps["loss"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert record.digests["step"].tolist() == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 4
    assert digest.listener is None
    assert record.order["length"] == 10
    assert (STEP.itemsize, DIGEST.itemsize) == (22, 12)


def test_a_run_that_goes_on_counts_on_and_drops_what_a_killed_one_wrote(tmp_path: Path) -> None:
    trainer = _fit(tmp_path / "run", _open(), SampleDigest(), epochs=1)
    path = tmp_path / "epoch.ckpt"
    trainer.save_checkpoint(path)
    before = Record.read(tmp_path / "run")
    stale = np.full(3, 7, STEP)
    with (tmp_path / "run" / STEP_FILE).open("ab") as file:
        file.write(stale.tobytes()[:-5])
    with (tmp_path / "run" / DIGEST_FILE).open("ab") as file:
        file.write(np.full(2, 3, DIGEST).tobytes())
    for folder in (tmp_path / "run", tmp_path / "other"):
        callbacks = [SampleDigest(), StepRecord(folder)]
        goes_on = Trainer(**QUIET, max_epochs=2, callbacks=callbacks)
        goes_on.fit(Model([float(step) for step in range(30)]), _open(5), ckpt_path=path)
    record, other = Record.read(tmp_path / "run"), Record.read(tmp_path / "other")
    assert record.steps[:3].tolist() == before.steps.tolist()
    assert record.steps["samples"].tolist() == [4, 4, 2, 5, 5]
    assert record.digests["step"].tolist() == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 5 + [4] * 5
    assert other.steps["samples"].tolist() == [0, 0, 0, 5, 5]
    assert other.steps[3:].tolist() == record.steps[3:].tolist()


def test_other_loaders_and_lost_disks_end_the_record_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = torch.arange(10.0)[:, None]
    loader = torch.utils.data.DataLoader[Any](samples, batch_size=5)
    _fit(tmp_path / "foreign", loader)
    assert not (tmp_path / "foreign" / ORDER_FILE).exists()

    class Unplug(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)

    with caplog.at_level(logging.WARNING):
        assert _fit(tmp_path / "gone", _open(), Unplug()).global_step == 6
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("steps.bin ends here: [Errno 2]")
