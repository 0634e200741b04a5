"""A module that counts what it learned from, and a log that a test can read."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from lit_data.callbacks.events import Event


class Tally(LightningModule):
    """Batches {"index" [B]}; ``learned[i]`` is the sum of learning rate / B over the steps that
    sample i was part of.

    It comes from the gradients, so a sample that was lost, repeated or weighted wrongly shows,
    whatever was replayed.

    Args:
        samples: In the set.
        configure: Makes the optimizers; by default SGD with a rate of 1.
    """

    def __init__(
        self, samples: int, configure: Callable[[list[torch.nn.Parameter]], Any] | None = None
    ) -> None:
        super().__init__()
        self.learned = torch.nn.Parameter(torch.zeros(samples, dtype=torch.float64))
        self.configure = configure or (lambda parameters: torch.optim.SGD(parameters, lr=1.0))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return -self.learned[batch["index"]].mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/mean", batch["index"].double().mean(), batch_size=len(batch["index"]))

    def configure_optimizers(self) -> Any:
        return self.configure(list(self.parameters()))


class Rows(Logger):
    """Keeps what `AdaptiveBatchSize` logs, a row for each step."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows += [metrics] if "batch/size" in metrics else []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def sizes(self) -> list[int]:
        """Samples at once."""
        return [int(row["batch/size"]) for row in self.rows]

    def pieces(self) -> list[int]:
        """Pieces of each batch."""
        return [int(row["batch/pieces"]) for row in self.rows]


class Meanwhile(Callback):
    """Notes batches and events, and lets something happen before some steps.

    Args:
        events: What happens, by the number of the step.
    """

    def __init__(self, events: Mapping[int, Callable[[], None]] | None = None) -> None:
        self.events = events or {}
        self.batches = []
        self.told = []
        self.validated = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.events.get(trainer.global_step, lambda: None)()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        self.batches.append(batch["index"].tolist())

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.validated += not trainer.sanity_checking

    def on_event(self, trainer: Trainer, event: Event, error: BaseException | None) -> None:
        self.told.append(event)
