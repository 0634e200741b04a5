"""Learning rate schedules, for modules that take an optimizer and the name of a schedule."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Timer
from torch import nn
from torch.optim.optimizer import ParamsT

from lit_data.core.errors import ConfigError

Schedule = Literal["one_cycle", "cosine", "warmup_cosine", "steps", "plateau", "none"]
OptimizerFactory = Callable[[ParamsT], torch.optim.Optimizer]
_RISE = {"one_cycle": 0.3, "warmup_cosine": 0.05}
_PATIENCE = 5


def make_optimizer(factory: OptimizerFactory, net: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer in which parts of a net have their own learning rates; on a CPU a fused one.

    Pretrained parts need smaller steps than parts with random weights. The attribute
    ``learning_rate_factor`` of a part sets this; its weights are then a separate group after the
    others.

    Args:
        factory: Makes the optimizer from parameters, or from groups of them if there are such
            parts.
        net: The net; such parts must not be nested.
    """
    factors = []
    groups: list[dict[str, Any]] = []
    for part in net.modules():
        factor = getattr(part, "learning_rate_factor", 1.0)
        if factor != 1:
            factors.append(factor)
            groups.append({"params": list(part.parameters())})
    if not groups:
        return _fuse_on_cpu(factory(net.parameters()))
    apart = {weight for group in groups for weight in group["params"]}
    others = [weight for weight in net.parameters() if weight not in apart]
    optimizer = factory([{"params": others}, *groups])
    for factor, group in zip(factors, optimizer.param_groups[1:], strict=True):
        group["lr"] *= factor
    return _fuse_on_cpu(optimizer)


def _fuse_on_cpu(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let a step on a CPU update all weights in one pass, unless the optimizer was told how to.

    On a GPU torch chooses well by itself.
    """
    options = optimizer.defaults
    is_free = options.get("fused", False) is None and options["foreach"] is None
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    if is_free and on_cpu and not options["differentiable"]:
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


def schedule_optimizer(
    optimizer: torch.optim.Optimizer, schedule: Schedule, trainer: Trainer, *, optimizers: int = 1
) -> Any:  # noqa: ANN401
    """Return an optimizer and its schedule in the form of `configure_optimizers`.

    A run that ``trainer.max_time`` ends before its last step follows the clock, so that it also
    reaches the lowest rate.

    Args:
        optimizer: With the highest learning rate.
        schedule: Name of the schedule.
        trainer: Knows the length of the run.
        optimizers: Number of optimizers that step in each batch; with manual optimization, Lightning
            counts each of their steps.

    Raises:
        ConfigError: The length of the run is unknown; or for `plateau`, no checkpoint monitors a
            metric.
    """
    if schedule == "none":
        return optimizer
    if schedule == "plateau":
        return {"optimizer": optimizer, "lr_scheduler": _follow_metric(optimizer, trainer)}
    length, interval = _find_length(schedule, trainer, optimizers)
    progress = _RunProgress(trainer, length)

    # A plain function, as LambdaLR would write an object into each checkpoint.
    def factor_at(count: int) -> float:
        return learning_rate_factor(schedule, progress.at(count))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor_at)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


class _RunProgress:
    """Fraction of a run that is over: by steps or epochs, or by the clock where that is further.

    Args:
        trainer: Has the clock, if it was given a `max_time`.
        length: Steps or epochs of the run; infinite if only the clock ends it.
    """

    def __init__(self, trainer: Trainer, length: float) -> None:
        self._trainer = trainer
        self._length = length
        self._timer = _find_timer(trainer)
        self._clock_count = -1  # steps or epochs when the clock was read
        self._clock_fraction = 0.0

    def at(self, count: int) -> float:
        """Return the fraction after `count` steps or epochs, at the middle of the next one."""
        by_count = (count + 0.5) / self._length
        if self._timer is None:
            return by_count
        if count != self._clock_count:  # once for all groups of parameters
            self._clock_count = count
            self._clock_fraction = self._read_clock(self._timer)
        return max(by_count, self._clock_fraction)

    def _read_clock(self, timer: Timer) -> float:
        elapsed_s = timer.time_elapsed()
        left_s = timer.time_remaining()
        assert left_s is not None  # `_find_timer` takes timers with an end only
        fraction = 1.0 if left_s <= 0 else elapsed_s / (elapsed_s + left_s)
        if self._trainer.world_size > 1:  # each rank has a clock, but all need the same rate
            fraction = float(self._trainer.strategy.broadcast(fraction))
        return fraction


def _find_timer(trainer: Trainer) -> Timer | None:
    """Return the callback that stands for ``trainer.max_time``; none if the run has no such end."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer) and callback.time_remaining() is not None:
            return callback
    return None


def learning_rate_factor(schedule: Schedule, progress: float) -> float:
    """Return the fraction of the highest learning rate at one point of the run.

    `one_cycle` rises for the first 30 % of the run and falls for the rest, both as half a cosine
    (Smith and Topin, "Super-convergence", 2018); `cosine` falls all the way (Loshchilov and Hutter,
    "SGDR", 2017), in `warmup_cosine` after a straight rise over 5 % (Goyal et al., "Accurate, large
    minibatch SGD", 2017); `steps` is a tenth after half of the run and a hundredth after three
    quarters (He et al., "Deep residual learning", 2016). `none` is 1. `plateau` starts at 1 and
    follows the metric of the best checkpoint: it falls to a tenth after 5 validations without
    improvement. A run that takes longer than planned continues at the last value.

    Args:
        schedule: Name of the schedule.
        progress: Completed fraction of the run.
    """
    if schedule in ("none", "plateau"):
        return 1.0
    if schedule == "steps":
        if progress < 0.5:
            return 1.0
        return 0.1 if progress < 0.75 else 0.01
    rise = _RISE.get(schedule, 0.0)
    if progress < rise:
        risen = progress / rise
        return risen if schedule == "warmup_cosine" else 0.5 - 0.5 * math.cos(math.pi * risen)
    fallen = min(1.0, (progress - rise) / (1 - rise))
    return 0.5 + 0.5 * math.cos(math.pi * fallen)


def _follow_metric(optimizer: torch.optim.Optimizer, trainer: Trainer) -> dict[str, Any]:
    chosen: Any = trainer.checkpoint_callback
    if getattr(chosen, "monitor", None) is None:
        raise ConfigError(
            "schedule='plateau' uses the metric of the best checkpoint: set "
            "callbacks.checkpoint.monitor"
        )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=chosen.mode, patience=_PATIENCE
    )
    return {"scheduler": scheduler, "interval": "epoch", "monitor": chosen.monitor, "strict": False}


def _find_length(schedule: Schedule, trainer: Trainer, optimizers: int) -> tuple[float, str]:
    """Return the number of steps of the run.

    Counted from epochs where the loader has no length: Lightning answers -1 or infinity there.

    They are infinite where `max_time` alone ends the run.
    """
    steps = trainer.estimated_stepping_batches
    epochs = trainer.max_epochs
    if trainer.max_steps > 0:
        steps = min(steps, trainer.max_steps // optimizers)
    if 0 < steps < math.inf:
        return int(steps), "step"
    if epochs is not None and epochs > 0:
        return epochs, "epoch"
    if _find_timer(trainer) is not None:
        return math.inf, "step"
    raise ConfigError(
        f"schedule={schedule!r} needs the length of the run: set trainer.max_epochs, "
        "trainer.max_steps or trainer.max_time, or schedule=none"
    )
