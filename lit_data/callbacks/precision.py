"""The parts of `AMP`: the precision plugin, submodules that stay in float32, and overflows.

Optimizer steps that overflowed and losses that were not finite are kept on the device, and read
many at a time.
"""

import difflib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lit_data.callbacks.wrapping import wrap
from lit_data.core.devices import has_fast_bf16
from lit_data.core.errors import ConfigError

log = logging.getLogger(__name__)

Precision = Literal["fp16", "bf16", "fp32"]

_FLAGS = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true"}
_SAFER: dict[Precision, tuple[Precision, ...]] = {
    "fp16": ("bf16", "fp32"),
    "bf16": ("fp32",),
    "fp32": (),
}
_AUTOCAST = ("cpu", "cuda", "mps")
_LOSS = -1  # counted like another optimizer
_LISTED_BATCHES = 20


class WatchedScaler(torch.amp.GradScaler):
    """torch's scaler, which also keeps the overflows of each update as an unread device scalar.

    Args:
        device_type: Type of the device that it scales for.
        init_scale: First loss scale.
        growth_interval: Steps without an overflow before the loss scale doubles.
    """

    def __init__(self, device_type: str, init_scale: float, growth_interval: int) -> None:
        super().__init__(device_type, init_scale=init_scale, growth_interval=growth_interval)
        self._overflows: list[tuple[int, Tensor]] = []

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        for optimizer_id, state in self._per_optimizer_states.items():
            overflows = list(state["found_inf_per_device"].values())
            if overflows:
                total = overflows[0].clone()  # torch adds to the first one in place
                for overflow in overflows[1:]:
                    total += overflow.to(total.device, non_blocking=True)
                self._overflows.append((optimizer_id, total))
        super().update(new_scale)

    def take_overflows(self) -> list[tuple[int, Tensor]]:
        """Return the overflows of the optimizer steps since the last call.

        Returns:
            For each step the ``id`` of its optimizer, and the number of devices with a gradient
            that is not finite ([] float32).
        """
        overflows, self._overflows = self._overflows, []
        return overflows

    def forget_failed_step(self) -> None:
        """Reset the scaler after a run that an error ended within a step."""
        self._overflows.clear()
        self._per_optimizer_states.clear()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scale and growth tracker, but keep this run's growth interval."""
        super().load_state_dict({**state_dict, "growth_interval": self._growth_interval})


class _Unread(NamedTuple):
    """A step or a loss that has not been read yet.

    Attributes:
        key: Index of the optimizer, or `_LOSS`.
        first: First batch of its window.
        last: Last batch of its window.
        value: [] on the device; for a step, 0 if nothing overflowed.
    """

    key: int
    first: int
    last: int
    value: Tensor


class StepHistory:
    """Counts steps skipped for an overflow, and batches with a loss that is not finite.

    They are counted once they are read.

    Attributes:
        skipped: Number of skipped steps of each optimizer, by its index.
        rows: Number of steps that each optimizer skipped since its last one that was not skipped;
            under -1, the same for losses.
    """

    def __init__(self) -> None:
        self.skipped: Counter[int] = Counter()
        self.rows: Counter[int] = Counter()
        self._bad_windows: list[str] = []
        self._window_starts: dict[int, int] = {}
        self._losses: list[Tensor] = []
        self._unread: list[_Unread] = []

    def forget_windows(self) -> None:
        """End all windows, because none extends past the end of an epoch or a run."""
        self._window_starts.clear()
        self._losses.clear()

    def add_steps(
        self,
        batch_idx: int,
        optimizers: Sequence[Optimizer],
        overflows: Sequence[tuple[int, Tensor]],
    ) -> None:
        """Note the steps of a batch.

        The batch starts a new window for each optimizer that stepped in the batch before.

        Args:
            batch_idx: Index of the batch that ends.
            optimizers: All optimizers of the Trainer.
            overflows: Result of `WatchedScaler.take_overflows`; a step was skipped if its number is
                not 0.
        """
        indices = {id(optimizer): index for index, optimizer in enumerate(optimizers)}
        for index in indices.values():
            self._window_starts.setdefault(index, batch_idx)
        for optimizer_id, overflow in overflows:
            index = indices.get(optimizer_id, 0)
            # A second step within the batch has a window of this batch alone.
            first = self._window_starts.pop(index, batch_idx)
            self._unread.append(_Unread(index, first, batch_idx, overflow))

    def add_loss(self, loss: Tensor) -> None:
        """Note a loss of the current batch, of which one number is kept."""
        loss = loss.detach()
        # A copy of one number costs half as much as a product.
        self._losses.append(loss.clone() if loss.ndim == 0 else (loss * 0).sum())

    def add_losses(self, batch_idx: int) -> None:
        """Note the losses of a batch that ends as one value, which is finite only if all are."""
        if not self._losses:
            return
        loss = self._losses[0]
        if len(self._losses) > 1:
            loss = (torch.stack(self._losses) * 0).sum()  # 0, or NaN
        self._unread.append(_Unread(_LOSS, batch_idx, batch_idx, loss))
        self._losses.clear()

    def read(self) -> None:
        """Wait for the device and count what was noted."""
        if not self._unread:
            return
        values = torch.stack([unread.value for unread in self._unread]).tolist()
        for unread, value in zip(self._unread, values, strict=True):
            is_loss = unread.key == _LOSS
            is_good = math.isfinite(value) if is_loss else value == 0
            if is_good:
                self.rows[unread.key] = 0
                continue
            self.rows[unread.key] += 1
            if unread.first == unread.last:
                self._bad_windows.append(f"{unread.last}")
            else:
                self._bad_windows.append(f"{unread.first}-{unread.last}")
            if not is_loss:
                self.skipped[unread.key] += 1
        self._unread.clear()

    def describe_bad(self) -> str:
        """Return a list of the bad batches since the last call; empty if there are none."""
        listed = ", ".join(self._bad_windows[:_LISTED_BATCHES])
        more = len(self._bad_windows) - _LISTED_BATCHES
        self._bad_windows.clear()
        return f"{listed} and {more} more" if more > 0 else listed

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain types."""
        self.read()
        state: dict[str, Any] = {}
        for name, counts in self._counts().items():
            state[name] = {str(key): count for key, count in counts.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count from a saved state."""
        for name, counts in self._counts().items():
            counts.clear()
            counts.update({int(key): count for key, count in state[name].items()})

    def _counts(self) -> dict[str, Counter[int]]:
        return {"skipped_steps": self.skipped, "in_a_row": self.rows}


def keep_in_float32(model: nn.Module, names: Sequence[str], device_type: str) -> Callable[[], None]:
    """Run some submodules without autocast, with float16 and bfloat16 inputs given as float32.

    The submodules can still be copied, pickled and compiled, and their state dict does not change.

    Args:
        model: Model that has the submodules.
        names: Names of submodules, as in ``named_modules()``; all modules below them stay in
            float32 too.
        device_type: Type of the device that autocast is for.

    Returns:
        A function that undoes the change.

    Raises:
        ConfigError: A name matches no submodule.
    """
    run_in_float32 = functools.partial(_run_in_float32, device_type)
    undo = ExitStack()
    for submodule in _find_submodules(model, names):
        undo.callback(wrap(submodule, "forward", run_in_float32, lasting=True))
    return undo.close


def _find_submodules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the named submodules and all below them, each once."""
    named = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parts = [part for part in name.split(".") if part != "_orig_mod"]  # torch.compile adds it
        named[".".join(parts)] = module
    chosen = {}  # by id: torchmetrics compares its modules by their content
    for name in names:
        if not name or name not in named:
            known_names = list(named)[1:]
            nearest = difflib.get_close_matches(name, known_names, cutoff=0.3) or known_names[:3]
            raise ConfigError(
                f"AMP: keep_fp32 has {name!r}, which is not a submodule of "
                f"{type(model).__name__} - allowed: names as in its named_modules() - the "
                f"nearest: {', '.join(nearest) or 'no submodule'}"
            )
        for other, module in named.items():
            if f"{other}.".startswith(f"{name}."):
                chosen[id(module)] = module
    return list(chosen.values())


def _run_in_float32(device_type: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    if not torch.is_autocast_enabled(device_type):
        return call(*args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        args, kwargs = tree_map_only(Tensor, _cast_to_float32, (args, kwargs))
        return call(*args, **kwargs)


def _cast_to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def choose_precision(precision: Precision | Literal["auto"], device_type: str) -> Precision:
    """Return the precision for a device.

    ``auto`` is bf16 if that is fast, else fp16 on CUDA and fp32 elsewhere.

    Raises:
        ConfigError: The device does not support autocast.
    """
    if precision == "auto":
        if has_fast_bf16(device_type):
            return "bf16"
        return "fp16" if device_type == "cuda" else "fp32"
    if precision != "fp32" and device_type not in _AUTOCAST:
        raise ConfigError(
            f"AMP: precision is {precision!r} on the device {device_type!r} - allowed there: "
            f"'auto' and 'fp32', others on {', '.join(_AUTOCAST)} - use 'auto'"
        )
    if (precision, device_type) == ("fp16", "cpu"):
        log.warning(
            "AMP: fp16 is for tests on a CPU: convolutions took 35 times as long as in fp32"
        )
    return precision


class MixedPrecision(LightningMixedPrecision):
    """Lightning's plugin, with a precision and scaler that can change between steps.

    It has the name of Lightning's class, because Lightning stores the scaler's state under that
    name in checkpoints. A run can therefore resume with Lightning's own plugin, and vice versa.

    Args:
        precision: ``auto``, or the precision to start with.
        device_type: Type of the device that autocast is for.
        make_scaler: Function that makes a scaler for fp16.
        keep_fp32: Names of submodules that stay in float32.

    Attributes:
        in_use: The current precision.
        scaler: The scaler for fp16; None with any other precision.
    """

    scaler: WatchedScaler | None

    def __init__(
        self,
        precision: Precision | Literal["auto"],
        device_type: str,
        make_scaler: Callable[[], WatchedScaler],
        keep_fp32: Sequence[str],
    ) -> None:
        super().__init__("bf16-mixed", device_type)
        self._make_scaler = make_scaler
        self._keep_fp32 = keep_fp32
        self._undo = ExitStack()
        self.switch(choose_precision(precision, device_type))

    def switch(self, precision: Precision) -> None:
        """Use another precision from the next step on."""
        self.in_use = precision
        self.precision = _FLAGS[precision]  # type: ignore[assignment]  # Lightning's class knows two of them
        self.scaler = self._make_scaler() if precision == "fp16" else None

    def choose_safer(self, target: Precision | Literal["auto", "raise"]) -> Precision | None:
        """Return the precision to fall back to, if one is left.

        Args:
            target: Precision to fall back to; ``auto`` is bf16 if that is fast, else fp32.
        """
        if target == "auto":
            can_use_bf16 = self.in_use == "fp16" and has_fast_bf16(self.device)
            target = "bf16" if can_use_bf16 else "fp32"
        for precision in _SAFER[self.in_use]:
            if precision == target:
                return precision
        return None

    def make_safer(self, precision: Precision | None) -> None:
        """Switch to a precision that a run fell back to, unless the current one is safer."""
        if precision in _SAFER[self.in_use]:
            self.switch(precision)

    def measure_norm(self, optimizer: Optimizer) -> Tensor:
        """Return the L2 norm ([] float32) of an optimizer's unscaled gradients before its step."""
        gradients = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    is_sparse = gradient.is_sparse
                    gradients.append(gradient.coalesce().values() if is_sparse else gradient)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.scaler is not None and _unscales_itself(optimizer):
            scale: Any = self.scaler._get_scale_async()  # there since the first loss was scaled
            norm = norm / scale
        return norm

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._undo.callback(keep_in_float32(module, self._keep_fp32, self.device))
        return super().convert_module(module)

    @override
    def teardown(self) -> None:
        self._undo.close()

    @override
    def autocast_context_manager(self) -> AbstractContextManager[None]:  # type: ignore[override]
        if self.in_use != "fp32":
            return super().autocast_context_manager()
        if torch.is_autocast_enabled(self.device):
            return torch.autocast(self.device, enabled=False)
        return nullcontext()

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Lightning's class refuses fused optimizers in every precision. Only with fp16 do they get
        # scaled gradients, and clipping those at the scaled limit is the same as clipping the
        # gradients.
        if self.scaler is not None and _unscales_itself(optimizer):
            clip_val = clip_val * self.scaler.get_scale()
        LightningPrecision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


def _unscales_itself(optimizer: Optimizer) -> bool:
    """Return True if a fused optimizer gets gradients that are still scaled."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
