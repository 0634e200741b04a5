"""`AMP`: mixed precision chosen for the hardware, with a fallback if steps overflow too often."""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lit_data.callbacks.events import Event, announce, log_metrics
from lit_data.callbacks.precision import MixedPrecision, Precision, StepHistory, WatchedScaler
from lit_data.callbacks.wrapping import UndoneCallback
from lit_data.core.errors import ConfigError, LitDataError
from lit_data.core.lightning_internals import logs_now

log = logging.getLogger(__name__)


_PRECISIONS = ("auto", "bf16", "fp16", "fp32")
_FALL_BACKS = ("auto", "bf16", "fp32", "raise")
_REMEDY = (
    "lower the learning rate, look for bad samples, or name the module that overflows in keep_fp32"
)


class AMP(UndoneCallback):
    """Mixed precision for a plain ``Trainer()``: bf16, fp16 with a loss scale, or fp32.

    ``auto`` is bf16 if that is fast (see `lit_data.core.devices.has_fast_bf16`), else fp16 on CUDA
    and fp32 elsewhere; a Trainer that sets the precision itself keeps it. A module that trains
    without an optimizer, such as one that fits a Gaussian, gets fp32: its statistics need it. Only the steps of
    training, validation, test and prediction run under autocast. At the end the Trainer gets its
    own plugin back.

    Logged when the Trainer logs, if an optimizer stepped in that batch:

    - ``amp/scale``: the loss scale, a factor; 1 without fp16.
    - ``amp/skipped_steps``: number of optimizer steps that torch's GradScaler has skipped so far
      because a gradient was not finite. Without fp16 no step is skipped.
    - ``amp/grad_norm``: L2 norm of the gradients over all parameters of the optimizers that stepped
      in this batch (the last step, if one stepped more than once), unscaled, before clipping; not
      finite in a skipped step.

    Results of the steps stay on the device until the Trainer logs, or the epoch ends. Then skipped
    steps are logged with their batches (with gradient accumulation, the whole window), and the
    callback decides whether to fall back.

    Compute a gradient penalty from float32 inputs under ``torch.autocast(device_type,
    enabled=False)``: ``torch.autograd.grad`` itself is subject to autocast, too.

    Several optimizers (manual optimization) share one loss scale, which may change at each of their
    steps: call ``manual_backward`` for one of them after the step of the one before.

    A checkpoint holds the loss scale (under Lightning's key: a run can resume with
    ``Trainer(precision="16-mixed")`` and vice versa), the counts, and the precision the run fell
    back to, in which it resumes unless another `precision` is configured now.

    Args:
        precision: ``auto``, ``bf16``, ``fp16`` or ``fp32``.
        keep_fp32: Names of submodules, as in ``named_modules``, that run in float32 with float32
            inputs, and all modules below them.
        init_scale: First loss scale (fp16).
        growth_interval: Steps without overflow after which the loss scale doubles (fp16).
        fall_back_after: Fall back after this many consecutive skipped steps of one optimizer
            (fp16), or consecutive batches without a finite loss (bf16, fp32), if the series has not
            ended when it is read.
        fall_back_to: ``auto`` falls back to bf16 if that is fast, else to fp32; ``bf16`` and
            ``fp32`` name the precision; ``raise`` stops with an error. If no precision is left,
            this is logged and training continues.

    Raises:
        ConfigError: A value is out of range; in `setup` and later: the Trainer mixes precisions
            itself, the device has no autocast, or a submodule does not exist.
        LitDataError: `fall_back_to` is ``raise``, and a fallback is needed.
    """

    of_run = MappingProxyType(
        {"_plugin": type(None), "_replaced_plugin": type(None), "_norms": dict}
    )

    def __init__(
        self,
        precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
        *,
        keep_fp32: Sequence[str] = (),
        init_scale: float = 65536.0,
        growth_interval: int = 2000,
        fall_back_after: int = 20,
        fall_back_to: Literal["auto", "bf16", "fp32", "raise"] = "auto",
    ) -> None:
        is_list = not isinstance(keep_fp32, str)
        _check("precision", precision, ", ".join(_PRECISIONS), precision in _PRECISIONS)
        _check("keep_fp32", keep_fp32, "a list of names", is_list)
        _check("init_scale", init_scale, "above 0 and finite", 0 < init_scale < math.inf)
        _check("growth_interval", growth_interval, "1 or more", growth_interval >= 1)
        _check("fall_back_after", fall_back_after, "1 or more", fall_back_after >= 1)
        _check("fall_back_to", fall_back_to, ", ".join(_FALL_BACKS), fall_back_to in _FALL_BACKS)
        self.precision = precision
        self.keep_fp32 = tuple(keep_fp32)
        self.init_scale = init_scale
        self.growth_interval = growth_interval
        self.fall_back_after = fall_back_after
        self.fall_back_to = fall_back_to
        self._history = StepHistory()
        self._fallen_to: Precision | None = None
        # Of the steps that are to be logged, by the id of the optimizer; none without a logger.
        self._norms: dict[int, Tensor | None] = {}
        self._plugin: MixedPrecision | None = None
        self._logged_precision: Precision | None = None
        self._replaced_plugin: LightningPrecision | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        # After a run the plugin has the loss scale that checkpoints need.
        return super().__getstate__() if self._is_on else dict(vars(self))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # FSDP has a plugin of its own for float32.
        is_float32_already = self.precision == "fp32" and trainer.precision == "32-true"
        if (self.precision == "auto" or is_float32_already) and _sets_precision(trainer):
            self._plugin = None
            rank_zero_info(
                f"AMP: the precision is that of Trainer(precision={trainer.precision!r})"
            )
            return
        replaced_plugin = _find_replaceable(trainer)
        device_type = trainer.strategy.root_device.type
        if self._plugin is None or self._plugin.device != device_type:
            make_scaler = functools.partial(
                WatchedScaler, device_type, self.init_scale, self.growth_interval
            )
            self._plugin = MixedPrecision(self.precision, device_type, make_scaler, self.keep_fp32)
        if self._plugin.scaler is not None:
            self._plugin.scaler.forget_failed_step()
        self._history.forget_windows()
        self._norms.clear()
        self._plugin.make_safer(self._fallen_to)
        self._log_precision(trainer)
        self._replaced_plugin = replaced_plugin
        trainer.strategy.precision_plugin = self._plugin

    @override
    def undo(self, trainer: Trainer) -> None:
        if self._replaced_plugin is not None:
            self._active.teardown()
            trainer.strategy.precision_plugin = self._replaced_plugin
            self._replaced_plugin = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        # Lightning's stand-in for an optimizer that a module does not have has no parameters.
        has_optimizer = any(optimizer.param_groups for optimizer in trainer.optimizers)
        if self.precision == "auto" and self._active.in_use != "fp32" and not has_optimizer:
            self._fallen_to = "fp32"
            self._active.switch("fp32")
            name = type(pl_module).__name__
            rank_zero_info(f"AMP: {name} has no optimizer, and what it learns otherwise needs fp32")
        self._log_precision(trainer)  # a checkpoint may have changed it as well

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._history.forget_windows()

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        if self._is_on and self._active.scaler is None:  # which sees overflows by itself
            self._history.add_loss(loss)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._is_on and logs_now(trainer):
            norm = self._active.measure_norm(optimizer) if trainer.loggers else None
            self._norms[id(optimizer)] = norm

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._is_on:
            return
        scaler = self._active.scaler
        if scaler is not None:
            self._history.add_steps(batch_idx, trainer.optimizers, scaler.take_overflows())
        else:
            self._history.add_losses(batch_idx)
        if self._norms:  # an optimizer stepped, and the Trainer logs
            self._judge(trainer, pl_module)
            if trainer.loggers:
                log_metrics(trainer, self._metrics())
            self._norms.clear()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on:
            self._judge(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {"precision": self.precision, "fallen_to": self._fallen_to}
        return state | self._history.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.take_fallback(state_dict)
        self._history.load_state_dict(state_dict)

    def take_fallback(self, state_dict: Mapping[str, Any]) -> None:
        """Use the precision that a run fell back to, unless another one is configured now.

        Args:
            state_dict: State of the run's `AMP`.
        """
        self._fallen_to = state_dict["fallen_to"]
        if self._fallen_to and state_dict["precision"] != self.precision:
            log.info(
                "AMP: precision=%s as configured now; the run fell back to %s with %s",
                self.precision,
                self._fallen_to,
                state_dict["precision"],
            )
            self._fallen_to = None
        if self._plugin is not None:
            self._plugin.make_safer(self._fallen_to)

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        is_after_run = self._replaced_plugin is None
        if is_after_run and self._plugin is not None and self._plugin.scaler is not None:
            # As Lightning does while the plugin is in place.
            checkpoint[type(self._plugin).__qualname__] = self._plugin.state_dict()

    def summary(self) -> dict[str, float | int | str]:
        """Return the last ``amp/precision`` and ``amp/skipped_steps``; empty before the first run."""
        if self._plugin is None:
            return {}
        self._history.read()
        return {
            "amp/precision": self._plugin.in_use,
            "amp/skipped_steps": self._history.skipped.total(),
        }

    @property
    def has_fallen_back(self) -> bool:
        """True if the precision is another one than at the start, because that did not serve."""
        return self._fallen_to is not None

    @property
    def _is_on(self) -> bool:
        """False if the Trainer sets the precision."""
        return self._replaced_plugin is not None

    @property
    def _active(self) -> MixedPrecision:
        assert self._plugin is not None  # setup is the first hook
        return self._plugin

    def _log_precision(self, trainer: Trainer) -> None:
        """Log the precision in use, once for each change."""
        precision = self._active.in_use
        if precision == self._logged_precision or not trainer.is_global_zero:
            return
        self._logged_precision = precision
        reason = "chosen automatically" if self.precision == "auto" else "as configured"
        if self._fallen_to:
            reason = "as a fallback"
        log.info("AMP: %s on %s, %s", precision, self._active.device, reason)

    def _metrics(self) -> dict[str, float]:
        scaler = self._active.scaler
        norms = [norm for norm in self._norms.values() if norm is not None]
        return {
            "amp/grad_norm": torch.stack(norms).norm().item(),
            "amp/scale": scaler.get_scale() if scaler is not None else 1.0,
            "amp/skipped_steps": float(self._history.skipped.total()),
        }

    def _judge(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the results of the steps and log them; fall back on all ranks if one rank needs it."""
        self._history.read()
        bad_batches = self._history.describe_bad()
        if bad_batches:
            self._warn(trainer, f"batch {bad_batches} of epoch {trainer.current_epoch}")
        longest_row = max(self._history.rows.values(), default=0)
        too_many = longest_row >= self.fall_back_after
        if trainer.strategy.reduce_boolean_decision(too_many, all=False):
            self._fall_back(trainer, pl_module)

    def _warn(self, trainer: Trainer, batches: str) -> None:
        scaler = self._active.scaler
        if scaler is None:
            log.warning("AMP: the loss is not finite in %s", batches)
            return
        scale = scaler.get_scale()
        text = (
            f"AMP: gradients overflowed and optimizer steps were skipped in {batches}; the loss "
            f"scale is {scale:g} now"
        )
        if trainer.is_global_zero:  # all ranks have the same gradients
            log.warning(text)
        announce(trainer, Event("precision", text, {"scale": scale}))

    def _fall_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        before = self._active.in_use
        target = self._active.choose_safer(self.fall_back_to)
        self._history.rows.clear()
        text = self._describe_row(before, pl_module)
        if self.fall_back_to == "raise":
            raise LitDataError(f"{text} - allowed: fewer than fall_back_after - {_REMEDY}")
        if target is None:
            log.warning("%s; nothing is left to fall back to: %s", text, _REMEDY)
            return
        if before == "fp16":  # gradients accumulated with a loss scale would count too much
            pl_module.zero_grad(set_to_none=False)
        self._fallen_to = target
        self._active.switch(target)
        log.warning("%s; continuing in %s. To avoid it, %s", text, target, _REMEDY)
        announce(trainer, Event("precision", f"{text}; continuing in {target}", {"scale": 1.0}))

    def _describe_row(self, precision: Precision, pl_module: LightningModule) -> str:
        if precision == "fp16":
            problem = "optimizer steps in a row were skipped"
        else:
            problem = "batches in a row had no finite loss"
        text = f"AMP: {self.fall_back_after} or more {problem} in {precision}"
        if _has_finite_weights(pl_module):
            return text
        return f"{text} and the weights are not finite: resume from a checkpoint"


def _find_replaceable(trainer: Trainer) -> LightningPrecision:
    """Return the Trainer's precision plugin if it is the plain one.

    Raises:
        ConfigError: The plugin mixes precisions itself, or belongs to ``pytorch_lightning``, the
            other package of Lightning.
    """
    plugin = trainer.strategy.precision_plugin
    if type(plugin).__module__.startswith("pytorch_lightning."):
        raise ConfigError(
            "AMP: this Trainer is that of pytorch_lightning, and lightning's plugin does not "
            "clip the gradients of its modules - write `import lightning.pytorch as pl`, the "
            "same release under the other name, or remove AMP and set "
            "Trainer(precision='bf16-mixed')"
        )
    if type(plugin) is not LightningPrecision:
        raise ConfigError(
            f"AMP: Trainer(precision={trainer.precision!r}) sets the precision by "
            f"{type(plugin).__name__} already - allowed: '32-true', which is the default, and no "
            "other plugin - remove that, or this callback (callbacks.amp=null)"
        )
    return plugin


def _sets_precision(trainer: Trainer) -> bool:
    """Return True if a Trainer of this package mixes precisions, or its strategy must."""
    plugin_type = type(trainer.strategy.precision_plugin)
    is_of_this_package = not plugin_type.__module__.startswith("pytorch_lightning.")
    return is_of_this_package and plugin_type is not LightningPrecision


def _has_finite_weights(pl_module: LightningModule) -> bool:
    parameters = [parameter.detach() for parameter in pl_module.parameters()]
    weights = [parameter for parameter in parameters if parameter.is_floating_point()]
    return bool(torch.nn.utils.get_total_norm(weights).isfinite())


def _check(option: str, value: object, allowed: str, holds: bool) -> None:
    if not holds:
        raise ConfigError(f"AMP: {option} is {value!r} - allowed: {allowed} - change {option}")
