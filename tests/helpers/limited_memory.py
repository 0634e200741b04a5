"""Out-of-memory errors where and when a test wants them, and a simulated device with a limit, for
runs on the CPU.

    device = SimulatedDevice(1000, 100, 10)  # 90 samples fit
    faults = install(module, device.plan())  # or FaultPlan("backward", lambda n, step, micro: step == 2, times=1)
    trainer.fit(module, loader)
    assert faults.refused == [128]

`SimulatedDevice` is a `MemoryGauge`: put it where a callback opens its own.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal

import torch
from lightning import LightningModule
from torch import nn

from lit_data.callbacks.device_memory import MemoryReading
from lit_data.core.batch_form import count_samples

Point = Literal[
    "transfer",  # the batch goes to the device
    "augment",  # on_after_batch_transfer
    "forward_start",  # before the training, validation, test or predict step
    "forward_middle",  # after the inner module's forward pass
    "backward",  # the gradient reaches the inner module's output: later parameters have theirs, earlier ones not yet
    "optimizer",  # after forward and backward, before a parameter changed
    "optimizer_middle",  # after half of the parameters changed, and the optimizer's state for them
]
POINTS = Point.__args__  # type: ignore[attr-defined]
STAGES = ("train", "sanity_check", "validate", "test", "predict")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_ENDS = (
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_test_batch_end",
    "on_predict_batch_end",
)
_GIB = 2**30


def out_of_memory(
    asked_bytes: int = 2 * _GIB, total_bytes: int = 8 * _GIB, free_bytes: int = _GIB
) -> Exception:
    """The error that CUDA's allocator raises."""
    asked, total, free = (
        f"{size / _GIB:.2f} GiB" for size in (asked_bytes, total_bytes, free_bytes)
    )
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which {free} is free."
    )


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """When a point raises.

    Attributes:
        point: Where.
        when: Asked as ``when(n, step, micro)`` each time the point is reached: samples of the
            piece, batches that the stages finished before, and the piece's place in its batch, from
            0; after an error it begins at 0 again.
        times: Raise so often at most.
        error: Makes the error for a piece of n samples.
        stages: Where the plan holds; names of `trainer.state.stage`.
        inner: Name of the inner module; by default the middle one of those that hold parameters
            themselves.
    """

    point: Point
    when: Callable[[int, int, int], bool]
    times: int | None = None
    error: Callable[[int], Exception] = lambda n: out_of_memory()
    stages: tuple[str, ...] = ("train",)
    inner: str | None = None


@dataclass(slots=True)
class SimulatedDevice:
    """Memory that a piece of n samples fills with ``fixed_bytes + n * sample_bytes`` while it is
    worked on.

    Attributes:
        limit_bytes: What there is; may be changed at any time.
        fixed_bytes: Parameters, gradients, the optimizer's state.
        sample_bytes: Of each sample of the piece.
        pressure_bytes: Others take 0 to so many bytes, drawn anew for each piece.
        seed: Of the pressure.
        pieces: Sizes that fitted, in order.
    """

    limit_bytes: int
    fixed_bytes: int
    sample_bytes: int
    pressure_bytes: int = 0
    seed: InitVar[int] = 0
    pieces: list[int] = field(default_factory=list, init=False)
    _random: random.Random = field(init=False)
    _taken_bytes: int = field(default=0, init=False)
    _peak_bytes: int = field(default=0, init=False)

    def __post_init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.reset_peak()

    def plan(self, point: Point = "forward_start", *, inner: str | None = None) -> FaultPlan:
        """Errors for pieces that do not fit, in every stage."""
        return FaultPlan(point, self._refuse, error=self._explain, stages=STAGES, inner=inner)

    def read(self) -> MemoryReading:
        """Memory now, that is between two pieces."""
        free_bytes = self.limit_bytes - self._taken_bytes
        return MemoryReading(self.fixed_bytes, self._peak_bytes, self._peak_bytes, free_bytes)

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._peak_bytes = self.fixed_bytes

    def _refuse(self, n: int, step: int, micro: int) -> bool:
        self._taken_bytes = self._random.randint(0, self.pressure_bytes)
        need_bytes, free_bytes = (
            self.fixed_bytes + n * self.sample_bytes,
            self.limit_bytes - self._taken_bytes,
        )
        self._peak_bytes = max(self._peak_bytes, min(need_bytes, free_bytes))
        if need_bytes <= free_bytes:
            self.pieces.append(n)
        return need_bytes > free_bytes

    def _explain(self, n: int) -> Exception:
        free_bytes = self.limit_bytes - self._taken_bytes - self.fixed_bytes
        return out_of_memory(n * self.sample_bytes, self.limit_bytes, max(0, free_bytes))


class Faults:
    """What went through a module since `install`.

    Attributes:
        entered: Sizes of the pieces, in order: of those that reached the point, for "transfer" and
            "augment", else of those for which a step of the module began.
        refused: Sizes of the pieces at which the error was raised.
    """

    def __init__(self, module: LightningModule, plan: FaultPlan) -> None:
        self.entered = []
        self.refused = []
        self._module, self._plan = module, plan
        self._step, self._micro = 0, -1

    def _enter(self, batch: Any, *rest: Any) -> None:
        if self._is_on():
            self._micro += 1
            self.entered.append(count_samples(batch, stacked=True))

    def _enter_and_check(self, batch: Any, *rest: Any) -> None:
        self._enter(batch)
        self._check()

    def _check(self) -> None:
        if not self._is_on() or len(self.refused) == self._plan.times:
            return
        size = self.entered[-1]
        if self._plan.when(size, self._step, self._micro):
            self.refused.append(size)
            self._micro = -1
            raise self._plan.error(size)

    def _is_on(self) -> bool:
        stage = self._module.trainer.state.stage
        return stage is not None and stage.value in self._plan.stages

    def _finish_batch(self, *args: Any) -> None:
        if self._is_on():
            self._step, self._micro = self._step + 1, -1

    def _watch_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._check()

    def _watch_backward(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._check())

    def _watch_optimizers(self) -> None:
        for optimizer in self._module.trainer.optimizers:
            _replace(optimizer, "step", functools.partial(self._step_optimizer, optimizer))

    def _step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        call: Callable[..., Any],
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        loss = closure() if closure else None
        done = (lambda: loss) if closure else None
        try:
            self._check()
        except Exception:
            if self._plan.point == "optimizer_middle":
                _step_half(optimizer, call, done)
            raise
        return call(done)


def install(module: LightningModule, plan: FaultPlan) -> Faults:
    """Let a module fail as planned, from its next run on; its class is left alone, several plans may be installed."""
    faults, point = Faults(module, plan), plan.point
    for name in _ENDS:
        _before(module, name, faults._finish_batch)
    if point in ("transfer", "augment"):
        name = "transfer_batch_to_device" if point == "transfer" else "on_after_batch_transfer"
        _before(module, name, faults._enter_and_check)
        return faults
    for name in _STEPS:
        _before(
            module, name, faults._enter_and_check if point == "forward_start" else faults._enter
        )
    if point in ("forward_middle", "backward"):
        owners = [part for part in module.modules() if list(part.parameters(recurse=False))]
        inner = module.get_submodule(plan.inner) if plan.inner else owners[len(owners) // 2]
        inner.register_forward_hook(
            faults._watch_forward if point == "forward_middle" else faults._watch_backward
        )
    elif point in ("optimizer", "optimizer_middle"):
        _before(module, "on_fit_start", faults._watch_optimizers)
    return faults


def _before(owner: Any, name: str, look: Callable[..., None]) -> None:
    def around(call: Callable[..., Any], *args: Any) -> Any:
        look(*args)
        return call(*args)

    _replace(owner, name, around)


def _replace(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Lightning and torch's schedules look at attributes of what they find, hence `wraps`."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    setattr(owner, name, replaced)


def _step_half(
    optimizer: torch.optim.Optimizer, call: Callable[..., Any], closure: Callable[[], Any] | None
) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    later = parameters[(len(parameters) + 1) // 2 :]
    gradients = [parameter.grad for parameter in later]
    for parameter in later:
        parameter.grad = None
    call(closure)
    for parameter, gradient in zip(later, gradients, strict=True):
        parameter.grad = gradient
