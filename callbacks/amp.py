"""`AMP`: mixed precision that suits the hardware, is watched for overflow and given up when it does not work."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_data.callbacks.events import Event, announce, log_metrics
from lit_data.callbacks.precision.history import StepHistory, WatchedScaler
from lit_data.callbacks.precision.plugin import MixedPrecision, Precision
from lit_data.errors import ConfigError, LitDataError
from lit_data.lightning_internals import logs_now

log = logging.getLogger(__name__)


def check_replaceable(trainer: L.Trainer) -> LightningPrecision:
    """The Trainer's plugin, if it is the plain one.

    Raises:
        ConfigError: It mixes precisions itself, or belongs to ``pytorch_lightning``, the other
            package of that name.
    """
    plugin = trainer.strategy.precision_plugin
    if type(plugin).__module__.startswith("pytorch_lightning."):
        raise ConfigError(
            "AMP: this Trainer is that of pytorch_lightning, and lightning's plugin does not clip the gradients of its "
            "modules - write `import lightning.pytorch as pl`, the same release under the other name, or leave AMP out "
            "and set Trainer(precision='bf16-mixed')"
        )
    if type(plugin) is not LightningPrecision:
        raise ConfigError(
            f"AMP: Trainer(precision={trainer.precision!r}) sets the precision by {type(plugin).__name__} already"
            " - allowed: '32-true', which is the default, and no other plugin - leave that out, or this callback"
        )
    return plugin


def _sets_precision(trainer: L.Trainer) -> bool:
    """Return True if a Trainer of this package mixes precisions, or its strategy must."""
    plugin_type = type(trainer.strategy.precision_plugin)
    return plugin_type is not LightningPrecision and not plugin_type.__module__.startswith(
        "pytorch_lightning."
    )


_PRECISIONS: Final = ("auto", "bf16", "fp16", "fp32")
_FALL_BACKS: Final = ("auto", "bf16", "fp32", "raise")
_REMEDY: Final = (
    "lower the learning rate, look for bad samples, or name the module that overflows in keep_fp32"
)


class AMP(L.Callback):
    """Mixed precision for a plain ``Trainer()``: bf16, fp16 with a loss scale, or fp32.

    ``auto`` is bf16 where that is fast (see `lit_data.devices.has_fast_bf16`), else fp16 on CUDA
    and fp32 elsewhere; a Trainer that sets the precision itself keeps it. Only the steps of
    training, validation, test and prediction run under autocast. At the end the Trainer gets its
    own plugin back.

    Logged when the Trainer logs, if an optimizer stepped in that batch:

    - ``amp/scale``: the loss scale, a factor; 1 without fp16.
    - ``amp/skipped_steps``: how many optimizer steps torch's GradScaler skipped so far, because a
      gradient was not finite. Without fp16 no step is skipped.
    - ``amp/grad_norm``: L2 norm of the gradients over all parameters of the optimizers that stepped
      in this batch (where one stepped more than once: of its last step), unscaled, before clipping;
      not finite in a skipped step.
    - ``amp/scale_<i>``, ``amp/skipped_steps_<i>``: of optimizer i where each has a scaler;
      ``amp/scale`` is then the smallest and ``amp/skipped_steps`` the sum.

    What the steps found stays on the device until the Trainer logs, or the epoch ends. Then skipped
    steps are told with their batches (when gradients are accumulated, the whole window), and it is
    decided whether to fall back.

    For a gradient penalty name the method that computes it in `keep_fp32`, or compute it from
    float32 inputs under ``torch.autocast(device_type, enabled=False)``: ``torch.autograd.grad``
    itself is subject to autocast, too.

    With several scalers (`scaler_per_optimizer`, for manual optimisation) a loss is scaled for the
    optimizer given to ``self.trainer.strategy.backward(loss, optimizer)``, or else the one whose
    ``step(closure)`` runs, or else the one that is toggled; any other loss is an error. The hook
    ``on_before_backward`` gets these losses unscaled.

    A checkpoint holds the loss scale (under Lightning's key: a run can go on with
    ``Trainer(precision="16-mixed")`` and the other way round), the counts, and the precision the
    run fell back to, in which it goes on.

    Args:
        precision: ``auto``, ``bf16``, ``fp16`` or ``fp32``.
        keep_fp32: What runs in float32 with float32 inputs: names of submodules as in
            ``named_modules`` (their ``forward``, and all modules below) and of methods, or a
            predicate of a submodule's name and itself.
        init_scale: First loss scale (fp16).
        growth_interval: The loss scale doubles after so many steps without overflow (fp16).
        fall_back_after: Give a precision up once so many steps of one optimizer in a row were
            skipped (fp16), or the loss of so many batches in a row was not finite (bf16, fp32), and
            the row still lasts when it is read.
        fall_back_to: ``auto``: bf16 where that is fast, else fp32; ``bf16`` or ``fp32``: that one;
            ``raise``: stop with an error. If none of these is left, this is told and training goes
            on.
        scaler_per_optimizer: Each optimizer has a loss scale of its own.
    """

    def __init__(
        self,
        precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
        *,
        keep_fp32: Sequence[str] | Callable[[str, nn.Module], bool] = (),
        init_scale: float = 65536.0,
        growth_interval: int = 2000,
        fall_back_after: int = 20,
        fall_back_to: Literal["auto", "bf16", "fp32", "raise"] = "auto",
        scaler_per_optimizer: bool = False,
    ) -> None:
        _check("precision", precision, ", ".join(_PRECISIONS), precision in _PRECISIONS)
        _check(
            "keep_fp32", keep_fp32, "a list of names, or a function", not isinstance(keep_fp32, str)
        )
        _check("init_scale", init_scale, "above 0 and finite", 0 < init_scale < math.inf)
        _check("growth_interval", growth_interval, "1 or more", growth_interval >= 1)
        _check("fall_back_after", fall_back_after, "1 or more", fall_back_after >= 1)
        _check("fall_back_to", fall_back_to, ", ".join(_FALL_BACKS), fall_back_to in _FALL_BACKS)
        self.precision, self.fall_back_to, self.fall_back_after = (
            precision,
            fall_back_to,
            fall_back_after,
        )
        self.keep_fp32 = keep_fp32 if callable(keep_fp32) else tuple(keep_fp32)
        self.init_scale, self.growth_interval, self.scaler_per_optimizer = (
            init_scale,
            growth_interval,
            scaler_per_optimizer,
        )
        self._history = StepHistory()
        self._fallen_to: Precision | None = None
        self._norms: dict[
            int, Tensor | None
        ] = {}  # of steps that are to be logged; none without a logger
        self._plugin: MixedPrecision | None = None
        self._told: Precision | None = None
        self._replaced: LightningPrecision | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        is_float32_already = (
            self.precision == "fp32" and trainer.precision == "32-true"
        )  # as FSDP's own plugin is
        if (self.precision == "auto" or is_float32_already) and _sets_precision(trainer):
            self._plugin = None
            rank_zero_info(f"AMP: left to Trainer(precision={trainer.precision!r})")
            return
        replaced, device_type = check_replaceable(trainer), trainer.strategy.root_device.type
        if self._plugin is None or self._plugin.device != device_type:
            scaler = functools.partial(
                WatchedScaler, device_type, self.init_scale, self.growth_interval
            )
            note = self._history.add_loss
            self._plugin = MixedPrecision(
                self.precision,
                device_type,
                scaler,
                self.keep_fp32,
                note,
                per_optimizer=self.scaler_per_optimizer,
            )
        self._plugin.forget_failed_step()
        self._history.forget_windows()
        self._norms.clear()
        self._plugin.make_safer(self._fallen_to)
        if self._told != self._plugin.in_use and trainer.is_global_zero:
            self._told, why = (
                self._plugin.in_use,
                "chosen for it" if self.precision == "auto" else "as configured",
            )
            log.info(
                "AMP: %s on %s, %s",
                self._told,
                device_type,
                "fallen back to" if self._fallen_to else why,
            )
        self._replaced, trainer.strategy.precision_plugin = replaced, self._plugin

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._put_back(trainer)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._put_back(trainer)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._history.forget_windows()

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._is_on and logs_now(trainer):
            self._norms[id(optimizer)] = (
                self._active.measure_norm(optimizer) if trainer.loggers else None
            )

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._is_on:
            return
        if self._active.scalers:
            self._history.add_steps(batch_idx, len(trainer.optimizers), self._active.take_found())
        else:
            self._history.add_losses(batch_idx)
        if self._norms:
            self._judge(trainer, pl_module)
            if trainer.loggers:
                log_metrics(trainer, self._metrics())
            self._norms.clear()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._is_on:
            self._judge(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"fallen_to": self._fallen_to, **self._history.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._fallen_to = state_dict["fallen_to"]
        self._history.load_state_dict(state_dict)
        if self._plugin is not None:
            self._plugin.make_safer(self._fallen_to)

    @override
    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if (
            self._replaced is None and self._plugin is not None and self._plugin.scalers
        ):  # saved after the run
            checkpoint[type(self._plugin).__qualname__] = self._plugin.state_dict()

    def summary(self) -> dict[str, float | int | str]:
        """``amp/precision``, the last one, and ``amp/skipped_steps``; empty before the first run."""
        if self._plugin is None:
            return {}
        self._history.read()
        return {
            "amp/precision": self._plugin.in_use,
            "amp/skipped_steps": self._history.skipped.total(),
        }

    @property
    def _is_on(self) -> bool:
        """False where the Trainer sets the precision."""
        return self._replaced is not None

    @property
    def _active(self) -> MixedPrecision:
        assert self._plugin is not None  # setup is the first hook
        return self._plugin

    def _put_back(self, trainer: L.Trainer) -> None:
        if self._replaced is not None:
            self._active.teardown()
            self._replaced, trainer.strategy.precision_plugin = None, self._replaced

    def _metrics(self) -> dict[str, float]:
        scales, skipped = (
            [scaler.get_scale() for scaler in self._active.scalers],
            self._history.skipped,
        )
        norms = torch.stack([norm for norm in self._norms.values() if norm is not None])
        values = {"amp/grad_norm": norms.norm().item()}
        values |= {
            "amp/scale": min(scales, default=1.0),
            "amp/skipped_steps": float(skipped.total()),
        }
        if len(scales) > 1:
            values |= {f"amp/scale_{index}": scale for index, scale in enumerate(scales)}
            values |= {
                f"amp/skipped_steps_{index}": float(skipped[index]) for index in range(len(scales))
            }
        return values

    def _judge(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read what happened and tell it; fall back on all ranks if it was too much on one."""
        self._history.read()
        if where := self._history.describe_bad():
            self._tell(trainer, f"batch {where} of epoch {trainer.current_epoch}")
        too_many = max(self._history.rows.values(), default=0) >= self.fall_back_after
        if trainer.strategy.reduce_boolean_decision(too_many, all=False):
            self._fall_back(trainer, pl_module)

    def _tell(self, trainer: L.Trainer, where: str) -> None:
        scale = min((scaler.get_scale() for scaler in self._active.scalers), default=None)
        if scale is None:
            log.warning("AMP: the loss is not finite in %s", where)
            return
        text = f"AMP: gradients overflowed and optimizer steps were skipped in {where}; the loss scale is {scale:g} now"
        if trainer.is_global_zero:  # all ranks have the same gradients
            log.warning(text)
        announce(trainer, Event("precision", text, {"scale": scale}))

    def _fall_back(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        before, target = self._active.in_use, self._active.choose_safer(self.fall_back_to)
        self._history.rows.clear()
        what = (
            "optimizer steps in a row were skipped"
            if before == "fp16"
            else "batches in a row had no finite loss"
        )
        spoilt = (
            ""
            if _has_finite_weights(pl_module)
            else " and the weights are not finite: go on from a checkpoint"
        )
        text = f"AMP: {self.fall_back_after} or more {what} in {before}{spoilt}"
        if self.fall_back_to == "raise":
            raise LitDataError(f"{text} - allowed: fewer than fall_back_after - {_REMEDY}")
        if target is None:
            log.warning("%s; nothing is left to fall back to: %s", text, _REMEDY)
            return
        if before == "fp16":  # what was accumulated with a loss scale would count too much without
            pl_module.zero_grad(set_to_none=False)
        self._fallen_to = target
        self._active.switch(target)
        log.warning("%s; going on in %s. To avoid it, %s", text, target, _REMEDY)
        announce(trainer, Event("precision", f"{text}; going on in {target}", {"scale": 1.0}))


def _has_finite_weights(pl_module: L.LightningModule) -> bool:
    weights = [
        parameter.detach() for parameter in pl_module.parameters() if parameter.is_floating_point()
    ]
    return bool(torch.nn.utils.get_total_norm(weights).isfinite())


def _check(option: str, value: object, allowed: str, holds: bool) -> None:
    if not holds:
        raise ConfigError(f"AMP: {option} is {value!r} - allowed: {allowed} - change {option}")
