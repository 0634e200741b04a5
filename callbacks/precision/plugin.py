"""Mixed precision that can change while a run goes on: what `AMP` puts in place of the strategy's precision plugin."""

import difflib
import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lit_data.callbacks.precision.history import WatchedScaler
from lit_data.callbacks.wrapping import wrap
from lit_data.devices import has_fast_bf16
from lit_data.errors import ConfigError

log = logging.getLogger(__name__)


KeepFp32 = tuple[str, ...] | Callable[[str, nn.Module], bool]
"""Names of submodules, each with all below it, or of methods; or a predicate of a submodule's name and itself."""


def keep_in_float32(model: nn.Module, keep: KeepFp32, device_type: str) -> list[Callable[[], None]]:
    """Let some submodules and methods run without autocast, with what is float16 or bfloat16 given
    as float32.

    Of a submodule it is the ``forward``. It can still be copied, pickled and compiled, and its
    state dict does not change.

    Args:
        model: Whose submodules and methods.
        keep: Which.
        device_type: Where autocast works.

    Returns:
        Functions that undo it.

    Raises:
        ConfigError: If there is nothing of a name.
    """
    around = functools.partial(_run_in_float32, device_type)
    return [wrap(owner, method, around) for owner, method in _find_methods(model, keep)]


def _find_methods(model: nn.Module, keep: KeepFp32) -> list[tuple[nn.Module, str]]:
    named = {
        ".".join(
            part for part in name.split(".") if part != "_orig_mod"
        ): module  # torch.compile puts it in between
        for name, module in model.named_modules(remove_duplicate=False)
    }
    if callable(keep):
        return _unique(
            [(module, "forward") for name, module in named.items() if name and keep(name, module)]
        )
    found = []
    for name in keep:
        owner, _, method = name.rpartition(".")
        if name and name in named:
            found += [
                (m, "forward") for other, m in named.items() if f"{other}.".startswith(f"{name}.")
            ]
        elif method and owner in named and callable(getattr(type(named[owner]), method, None)):
            found.append((named[owner], method))
        else:
            raise _explain_unknown(model, name, [other for other in named if other])
    return _unique(found)


def _unique(found: list[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    return list({(id(owner), method): (owner, method) for owner, method in found}.values())


def _explain_unknown(model: nn.Module, name: str, known: list[str]) -> ConfigError:
    nearest = (
        ", ".join(difflib.get_close_matches(name, known, cutoff=0.3) or known[:3]) or "no submodule"
    )
    return ConfigError(
        f"AMP: keep_fp32 has {name!r}, which is no submodule or method of {type(model).__name__} - allowed: names as in"
        f" its named_modules(), or of its methods - the nearest: {nearest}"
    )


def _run_in_float32(device_type: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    if not torch.is_autocast_enabled(device_type):
        return call(*args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        args, kwargs = tree_map_only(Tensor, _cast, (args, kwargs))
        return call(*args, **kwargs)


def _cast(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


Precision = Literal["fp16", "bf16", "fp32"]

_FLAGS: Final = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true"}
_SAFER: Final[dict[Precision, tuple[Precision, ...]]] = {
    "fp16": ("bf16", "fp32"),
    "bf16": ("fp32",),
    "fp32": (),
}
_AUTOCAST: Final = ("cpu", "cuda", "mps")


def choose_precision(wanted: Precision | Literal["auto"], device_type: str) -> Precision:
    """The precision for a device; ``auto`` is bf16 where that is fast, else fp16 on CUDA and fp32
    elsewhere.

    Raises:
        ConfigError: If the device knows no autocast.
    """
    if wanted == "auto":
        wanted = "fp16" if device_type == "cuda" else "fp32"
        return "bf16" if has_fast_bf16(device_type) else wanted
    if wanted != "fp32" and device_type not in _AUTOCAST:
        raise ConfigError(
            f"AMP: precision is {wanted!r} on the device {device_type!r} - allowed: there 'auto' and 'fp32', others on"
            f" {', '.join(_AUTOCAST)} - use 'auto'"
        )
    if (wanted, device_type) == ("fp16", "cpu"):
        log.warning(
            "AMP: fp16 is for tests on a CPU: convolutions took 35 times as long as in fp32"
        )
    return wanted


class MixedPrecision(LightningMixedPrecision):
    """Lightning's plugin, with a precision that can change between steps, and if asked a scaler for
    each optimizer.

    It has the name of Lightning's class because Lightning keeps the scaler's state under that name
    in checkpoints: a run can go on with Lightning's own plugin, and the other way round.

    Args:
        precision: Or ``auto``.
        device_type: Where autocast works.
        make_scaler: Makes a scaler for fp16.
        keep_fp32: Submodules that stay in float32.
        watch_loss: Called with each loss before its backward while there is no scaler, which would
            see it.
        per_optimizer: A scaler for each optimizer.

    Attributes:
        in_use: The precision.
        scalers: All scalers; none but with fp16.
        scaler: The first one, or that of the optimizer that steps.
    """

    def __init__(
        self,
        precision: Precision | Literal["auto"],
        device_type: str,
        make_scaler: Callable[[], WatchedScaler],
        keep_fp32: KeepFp32,
        watch_loss: Callable[[Tensor], None],
        *,
        per_optimizer: bool,
    ) -> None:
        super().__init__("bf16-mixed", device_type)
        self._watch_loss = watch_loss
        self._make_scaler, self._per_optimizer, self._keep_fp32 = (
            make_scaler,
            per_optimizer,
            keep_fp32,
        )
        self._optimizers: list[Optimizer] = []
        self._stepping: Optimizer | None = None
        self._unwraps: list[Callable[[], None]] = []
        self.switch(choose_precision(precision, device_type))

    def switch(self, precision: Precision) -> None:
        """Use another precision from the next step on."""
        self.in_use = precision
        self.precision = _FLAGS[precision]  # type: ignore[assignment]  # Lightning's class knows two of them
        self.scalers: tuple[WatchedScaler, ...] = (
            (self._make_scaler(),) if precision == "fp16" else ()
        )
        self.scaler = self.scalers[0] if self.scalers else None

    def choose_safer(self, wanted: Precision | Literal["auto", "raise"]) -> Precision | None:
        """The precision to fall back to, if one is left; ``auto`` is bf16 where that is fast, else fp32."""
        if wanted == "auto":
            wanted = "bf16" if self.in_use == "fp16" and has_fast_bf16(self.device) else "fp32"
        return next((precision for precision in _SAFER[self.in_use] if precision == wanted), None)

    def make_safer(self, precision: Precision | None) -> None:
        """Use a precision that a run fell back to, unless the one in use is safer."""
        if precision in _SAFER[self.in_use]:
            self.switch(precision)

    def forget_failed_step(self) -> None:
        """Begin anew after a run that an error ended within a step."""
        self.take_found()
        for scaler in self.scalers:
            scaler._per_optimizer_states.clear()

    def take_found(self) -> list[tuple[int, Tensor]]:
        """Index of the optimizer and what was found, for each step since the last time; see `WatchedScaler`."""
        return [
            (self._index_of(key), found) for scaler in self.scalers for key, found in scaler.take()
        ]

    def measure_norm(self, optimizer: Optimizer) -> Tensor:
        """L2 norm ([] float32) of an optimizer's gradients just before its step, unscaled."""
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(
            [g.coalesce().values() if g.is_sparse else g for g in grads]
        )
        scale = self.scaler._get_scale_async() if self.scaler is not None else None
        handles_unscaling = getattr(
            optimizer, "_step_supports_amp_scaling", False
        )  # fused: they are still scaled
        return norm / scale if handles_unscaling and scale is not None else norm

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        self._optimizers = list(optimizers)
        if self._per_optimizer and self.scalers:
            self.scalers += tuple(
                self._make_scaler() for _ in self._optimizers[len(self.scalers) :]
            )
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._unwraps += keep_in_float32(module, self._keep_fp32, self.device)
        return super().convert_module(module)

    @override
    def teardown(self) -> None:
        for unwrap in self._unwraps:
            unwrap()
        self._unwraps, self._optimizers = [], []

    @override
    def autocast_context_manager(self) -> AbstractContextManager[None]:  # type: ignore[override]
        if self.in_use == "fp32":
            is_on = torch.is_autocast_enabled(self.device)
            return torch.autocast(self.device, enabled=False) if is_on else nullcontext()
        return super().autocast_context_manager()

    @override
    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.autocast_context_manager()

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.autocast_context_manager()  # in Lightning's class a context within two others

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if not self.scalers:
            self._watch_loss(tensor)
        if len(self.scalers) < 2:
            return super().pre_backward(tensor, module)
        return LightningPrecision.pre_backward(
            self, tensor, module
        )  # scaled once the optimizer is known

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Optimizer | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if len(self.scalers) > 1:
            tensor = self._scaler_of(
                optimizer or self._stepping or self._find_toggled(model)
            ).scale(tensor)
        super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if len(self.scalers) < 2:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        before = self._stepping, self.scaler
        self._stepping, self.scaler = optimizer, self._scaler_of(optimizer)
        try:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        finally:
            self._stepping, self.scaler = before

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Lightning's class refuses fused optimizers in every precision: with fp16 alone they get
        # gradients with the loss scale, and to clip these at as many times the limit is to clip the
        # gradients.
        still_scaled = self.scaler is not None and getattr(
            optimizer, "_step_supports_amp_scaling", False
        )
        scale = self.scaler.get_scale() if self.scaler is not None and still_scaled else 1.0
        LightningPrecision.clip_gradients(
            self, optimizer, clip_val * scale, gradient_clip_algorithm
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        states = [scaler.state_dict() for scaler in self.scalers]
        return {**states[0], "scalers": states} if len(states) > 1 else super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = state_dict.get("scalers", [])
        for index, scaler in enumerate(self.scalers):
            scaler.load_state_dict(states[index] if index < len(states) else state_dict)

    def _index_of(self, optimizer_id: int) -> int:
        return next(
            (index for index, known in enumerate(self._optimizers) if id(known) == optimizer_id), 0
        )

    def _scaler_of(self, optimizer: Optimizer) -> WatchedScaler:
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self.scalers[self._index_of(id(inner))]

    def _find_toggled(self, model: LightningModule) -> Optimizer:
        before: Mapping[Any, bool] = (
            model._param_requires_grad_state
        )  # empty unless an optimizer is toggled
        toggled = [known for known in self._optimizers if before and _is_toggled(known, before)]
        if len(toggled) != 1:
            raise ConfigError(
                f"AMP(scaler_per_optimizer=True) cannot tell which of {len(self._optimizers)} optimizers a loss is for"
                " - call manual_backward between toggle_optimizer(optimizer) and untoggle_optimizer(optimizer), or in"
                " the closure of optimizer.step(closure), or call self.trainer.strategy.backward(loss, optimizer);"
                " or set scaler_per_optimizer=False"
            )
        return toggled[0]


def _is_toggled(optimizer: Optimizer, before: Mapping[nn.Parameter, bool]) -> bool:
    states = [
        (p.requires_grad, before[p]) for group in optimizer.param_groups for p in group["params"]
    ]
    return any(now for now, _ in states) and all(now == then for now, then in states)
