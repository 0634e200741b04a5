"""Every private place of Lightning that `AdaptiveBatchSize` stands on; ``tests/callbacks/test_seam.py`` watches it."""

from collections.abc import Callable
from typing import Any, Final

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from packaging.version import Version

from lit_data.errors import ConfigError

LOWEST: Final = Version("2.6.6")
BELOW: Final = Version("2.7")


def check_version(version: str = L.__version__) -> None:
    """Refuse a Lightning whose insides may be different.

    Raises:
        ConfigError: It is too old or too new.
    """
    if not LOWEST <= Version(Version(version).base_version) < BELOW:
        raise ConfigError(
            f"AdaptiveBatchSize stands on parts of Lightning that may change, and lightning {version} was not tested: "
            f"install one from {LOWEST} to below {BELOW}, or train without this callback"
        )


def automatic_loop(trainer: L.Trainer) -> _AutomaticOptimization:
    """The loop that runs ``training_step``, backward and the optimizer: its ``_make_closure``, ``_optimizer_step``."""
    return trainer.fit_loop.epoch_loop.automatic_optimization


def manual_loop(trainer: L.Trainer) -> _ManualOptimization:
    """The loop that runs ``training_step`` of a module with manual optimisation: its ``advance``."""
    return trainer.fit_loop.epoch_loop.manual_optimization


def closure_parts(closure: Closure) -> tuple[Any, Any, Any]:
    """The step, backward and zero_grad functions of a closure."""
    return closure._step_fn, closure._backward_fn, closure._zero_grad_fn


def save_progress(trainer: L.Trainer) -> Callable[[], None]:
    """Keep Lightning's counts of optimizer steps and of gradients zeroed; the result puts them back."""
    found = automatic_loop(trainer).optim_progress.optimizer
    counts = [part for both in (found.step, found.zero_grad) for part in (both.total, both.current)]
    saved = [dict(vars(part)) for part in counts]

    def restore() -> None:
        for part, values in zip(counts, saved, strict=True):
            vars(part).update(values)

    return restore


def results_of(trainer: L.Trainer) -> _ResultCollection | None:
    """What was logged in the loop that runs."""
    return trainer._results


def number_batch(trainer: L.Trainer) -> int:
    """Which batch of its epoch arrives next."""
    loop: Any = trainer._active_loop
    loop = getattr(loop, "epoch_loop", loop)
    return int(loop.batch_progress.current.ready) if loop is not None else 0


def is_accumulating(trainer: L.Trainer) -> bool:
    """Whether the step under way only adds to the gradients."""
    return bool(trainer.fit_loop._should_accumulate())


def scalers_of(plugin: Any) -> list[torch.amp.GradScaler]:  # noqa: ANN401 - any precision plugin
    """The gradient scalers of a precision plugin, if it has any."""
    scaler = getattr(plugin, "scaler", None)
    return list(getattr(plugin, "scalers", None) or [scaler] * (scaler is not None))


def forget_scaling(plugin: Any, optimizer: torch.optim.Optimizer) -> None:  # noqa: ANN401 - any precision plugin
    """Let a gradient scaler forget that it has unscaled an optimizer's gradients in a step that failed."""
    for scaler in scalers_of(plugin):
        scaler._per_optimizer_states.pop(id(optimizer), None)
