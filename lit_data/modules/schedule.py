"""Learning rates over a run, for modules that take an optimizer and the name of a schedule."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import lightning as L
import torch
from torch import nn

from lit_data.checks import check_choice
from lit_data.errors import ConfigError

Schedule = Literal["one_cycle", "cosine", "none"]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def check_schedule(schedule: Schedule) -> None:
    """Refuse an unknown name.

    Raises:
        ConfigError: The schedule is unknown.
    """
    check_choice("schedule", schedule, get_args(Schedule))


def schedule_optimizer(
    optimizer: torch.optim.Optimizer, schedule: Schedule, trainer: L.Trainer, *, optimizers: int = 1
) -> Any:  # noqa: ANN401
    """What `configure_optimizers` returns for an optimizer whose learning rate follows a schedule.

    Args:
        optimizer: With the highest learning rate.
        schedule: Its name.
        trainer: Knows the length of the run.
        optimizers: How many step in each batch; with manual optimisation Lightning counts each of their steps.

    Raises:
        ConfigError: The run has no known end.
    """
    if schedule == "none":
        return optimizer
    length, interval = _find_length(schedule, trainer, optimizers)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda count: learning_rate_factor(schedule, (count + 0.5) / length)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


def learning_rate_factor(schedule: Schedule, progress: float) -> float:
    """Share of the highest learning rate at one point of the run.

    `one_cycle` rises for the first 30 % of the run and falls for the rest, both as half a cosine (Smith and Topin,
    "Super-convergence", 2018); `cosine` falls all the way (Loshchilov and Hutter, "SGDR", 2017); `none` is 1. A run
    that turns out longer than planned goes on at 0.

    Args:
        schedule: Its name.
        progress: Share of the run that is over.
    """
    rise = 0.3 if schedule == "one_cycle" else 0.0
    if schedule == "none":
        return 1.0
    if progress < rise:
        return 0.5 - 0.5 * math.cos(math.pi * progress / rise)
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (progress - rise) / (1 - rise)))


def _find_length(schedule: Schedule, trainer: L.Trainer, optimizers: int) -> tuple[int, str]:
    """Steps of the run; epochs where the loader has no length, for which Lightning answers -1 or infinity."""
    steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    if trainer.max_steps > 0:
        steps = min(steps, trainer.max_steps // optimizers)
    if 0 < steps < math.inf:
        return int(steps), "step"
    if epochs is not None and epochs > 0:
        return epochs, "epoch"
    raise ConfigError(
        f"schedule={schedule!r} needs the length of the run: set trainer.max_epochs or trainer.max_steps, "
        "or schedule=none"
    )
