from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_data.callbacks import DataWaitMonitor, data_wait_monitor


class Clock:
    """Time passes in the loader and in the step alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Slow:
    """Eight batches of 4 samples, each of which takes 3 s to load."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(8):
            self.clock.now_s += 3
            yield torch.ones(4, 32)


class Model(BoringModel):
    """A step takes 1 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.logged: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.now_s += 1
        return self.layer(batch).sum()

    def log_dict(self, dictionary: Any, **options: Any) -> None:
        self.logged.append(dict(dictionary))


def test_waiting_is_told_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, monitor = Clock(), DataWaitMonitor()
    monkeypatch.setattr(data_wait_monitor, "time", clock)
    model = Model(clock)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        limit_val_batches=0,
        log_every_n_steps=4,
        logger=False,
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Slow(clock))
    # Each step after the first of its epoch: 3 s of 4 s waiting, 4 samples.
    assert model.logged == [{"data/wait_fraction": 0.75, "data/samples_per_s": 1.0}] * 4
    assert monitor.summary() == {"data_wait_fraction": 0.75, "samples_per_s": 1.0}


def test_nothing_trained_is_nothing_to_say() -> None:
    assert DataWaitMonitor().summary() == {}
