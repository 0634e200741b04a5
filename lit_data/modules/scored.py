"""`ScoredModule`: the hooks that our modules share."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor, nn
from typing_extensions import override

from lit_data.batch_form import count_samples
from lit_data.modules.schedule import OptimizerFactory, Schedule, check_schedule, schedule_optimizer
from lit_data.types import Batch


class ScoredModule(L.LightningModule):
    """A net that learns by one loss and is scored on whole stages.

    Logs ``train/loss`` in each step, and what `take_scores` gives after validation and test, with ``val/`` or ``test/``
    before it; names that end in ``_baseline`` stay out of the progress bar.

    Args:
        net: The net.
        optimizer: Makes the optimizer from the parameters.
        schedule: Learning rate over the run, see `learning_rate_factor`.

    Raises:
        ConfigError: The schedule is unknown.
    """

    def __init__(self, net: nn.Module, *, optimizer: OptimizerFactory, schedule: Schedule) -> None:
        super().__init__()
        check_schedule(schedule)
        self.net = net
        self.optimizer_factory, self.schedule = optimizer, schedule
        self.save_hyperparameters({"num_parameters": sum(weight.numel() for weight in net.parameters())})

    @abstractmethod
    def find_loss(self, batch: Batch) -> Tensor:
        """The loss of a batch, a scalar."""

    @abstractmethod
    def score(self, batch: Batch, stage: str) -> None:
        """Add a batch to the scores of ``val`` or ``test``."""

    @abstractmethod
    def take_scores(self, stage: str) -> Mapping[str, Tensor]:
        """The scores of a stage, the same on all ranks; the next ones begin anew."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.find_loss(batch)
        # Not in the progress bar, which would wait for the device after each step.
        self.log("train/loss", loss, batch_size=count_samples(batch))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.score(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.score(batch, "test")

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_scores("val")

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test")

    @override
    def configure_optimizers(self) -> Any:
        return schedule_optimizer(self.optimizer_factory(self.parameters()), self.schedule, self.trainer)

    def _log_scores(self, stage: str) -> None:
        for name, value in self.take_scores(stage).items():
            shown = not name.endswith("_baseline")
            self.log(f"{stage}/{name}", value, prog_bar=shown, batch_size=1, sync_dist=True)
