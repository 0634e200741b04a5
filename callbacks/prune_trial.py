"""`PruneTrial`: ends a training whose results so far are worse than those of others."""

import logging
import math
from typing import Any, Protocol

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lit_data.checks import check_saved_counts
from lit_data.errors import ConfigError

log = logging.getLogger(__name__)


class Trial(Protocol):
    """The part of ``optuna.Trial`` that is used."""

    def report(self, value: float, step: int) -> None:
        """Take a value of the metric."""

    def should_prune(self) -> bool:
        """Return True if the pruner gives the trial up."""


class PruneTrial(Callback):
    """Reports a metric to a trial of Optuna after each validation, and stops where it is given up.

    Training then ends as by early stopping; nothing is raised. Steps of the trial are the
    validations, from 0, and are counted on where training goes on from a checkpoint. All ranks
    stop together. A metric that is NaN is not compared.

    Args:
        trial: An ``optuna.Trial``, on the first rank; None on the others.
        monitor: Name of the metric, as the model logs it.

    Raises:
        ConfigError: (after the first validation) the model logs no such metric.
    """

    def __init__(self, trial: Trial | None, monitor: str | None = None) -> None:
        self.trial = trial
        self.monitor = monitor
        self._validations = 0
        self._pruned_after: int | None = None
        self._value = 0.0

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn is not TrainerFn.FITTING:
            return
        step = self._validations
        self._validations += 1
        should_prune = self.trial is not None and self._report(trainer, self.trial, step)
        # The first rank alone knows the trial.
        if trainer.strategy.broadcast(should_prune):
            self._pruned_after = self._validations
            trainer.should_stop = True
            if trainer.is_global_zero:
                log.info(
                    "pruned after validation %d: %s is %g, worse than other jobs had by then",
                    self._validations,
                    self.monitor,
                    self._value,
                )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_saved_counts("PruneTrial", state_dict, ["validations"])
        self._validations = state_dict["validations"]

    def summary(self) -> dict[str, float | int | str]:
        """Return ``pruned_after`` in validations, and the last value of the metric.

        Empty for a training that was not given up.
        """
        if self._pruned_after is None:
            return {}
        return {"pruned_after": self._pruned_after, str(self.monitor): self._value}

    def _report(self, trainer: Trainer, trial: Trial, step: int) -> bool:
        values = trainer.callback_metrics
        if self.monitor not in values:
            raise ConfigError(
                f"sweep.metric={self.monitor} cannot prune jobs, for it is not logged in "
                f"validation: choose one of {', '.join(sorted(values)) or 'none'}, or "
                "hydra/sweeper/pruner=null"
            )
        self._value = float(values[self.monitor])
        if math.isnan(self._value):  # nothing to compare
            return False
        trial.report(self._value, step)
        return trial.should_prune()
