"""What steps of a GAN take: time, memory, and the gradients that they find."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_data.callbacks.wrapping import wrap
from lit_data.commands.benchmarks.gan_ways import Way
from lit_data.inference.memory import measure_peak_bytes
from lit_data.inference.quiet import without_noise
from lit_data.loading.device_timer import read_clock
from lit_data.modules import GANModule
from lit_data.types import Batch


@dataclass(slots=True)
class Bench:
    """Runs steps of a module, in which nothing but the way to make them differs.

    Attributes:
        module: Left as it is; each run has a copy.
        device: Where to train.
    """

    module: GANModule
    device: torch.device
    _seconds: list[float] = field(default_factory=list)
    _peaks: list[int] = field(default_factory=list)

    def time_step(self, way: Way, batch: Batch, steps: int) -> float:
        """Mean seconds of a step, after one for warming up, which has no part in it."""
        self._run(way, batch, steps + 1, around=self._time)
        return sum(self._seconds[1:]) / steps

    def measure_peak(self, way: Way, batch: Batch) -> int:
        """Most bytes of tensors in a step with a penalty: weights, optimizers, batch, and what the step makes."""
        self._run(way, batch, 2, around=self._measure, r1_every=1)
        return self._peaks[-1]

    def find_gradients(self, way: Way, batch: Batch) -> Tensor:
        """Gradients [N] of both nets, each before its step of plain descent; with a penalty."""
        keep = _KeepGradients()
        self._run(way, batch, 1, callback=keep, r1_every=1, descent=True)
        return torch.cat(keep.gradients).cpu().double()

    def _run(
        self,
        way: Way,
        batch: Batch,
        steps: int,
        *,
        around: Callable[..., Any] | None = None,
        callback: L.Callback | None = None,
        r1_every: int | None = None,
        descent: bool = False,
    ) -> None:
        module = copy.deepcopy(self.module)
        module.micro_batch_size = module.r1_micro_batch_size = way.part
        module.r1_every = r1_every or module.r1_every
        if descent:  # Adam's first step is as large for gradients that are rounding errors as for any other
            module.optimizer_factories = (partial(torch.optim.SGD, lr=1e-3),) * 2
        if way.step is not None:
            replaced = way.step
            wrap(module, "training_step", lambda _, some, batch_idx: replaced(module, some))
        self._seconds.clear()
        self._peaks.clear()
        if around is not None:
            wrap(module, "training_step", partial(around, module))
        callbacks = [*way.make_callbacks(module), *([callback] if callback else [])]
        loader: Any = DataLoader([batch] * steps, batch_size=None)  # type: ignore[arg-type]
        with without_noise():
            self._make_trainer(callbacks).fit(module, loader)

    def _make_trainer(self, callbacks: list[L.Callback]) -> L.Trainer:
        return L.Trainer(
            accelerator="gpu" if self.device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )

    def _time(self, module: GANModule, call: Callable[..., Any], batch: Batch, batch_idx: int) -> None:
        began_s = read_clock(self.device)
        call(batch, batch_idx)
        self._seconds.append(read_clock(self.device) - began_s)

    def _measure(self, module: GANModule, call: Callable[..., Any], batch: Batch, batch_idx: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            call(batch, batch_idx)
            self._peaks.append(torch.cuda.max_memory_allocated(self.device))
            return
        held_bytes = _count_held_bytes(module, batch)
        self._peaks.append(held_bytes + measure_peak_bytes(lambda: call(batch, batch_idx)))


class _KeepGradients(L.Callback):
    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self.gradients += [weight.grad.flatten().clone() for weight in weights if weight.grad is not None]


def _count_held_bytes(module: GANModule, batch: Batch) -> int:
    """Bytes of weights, buffers, gradients, optimizers' states and batch before a step."""
    weights = list(module.parameters())
    held = [*weights, *module.buffers(), *batch.values(), *(weight.grad for weight in weights)]
    for optimizer in module.trainer.optimizers:
        held += chain.from_iterable(state.values() for state in optimizer.state.values())
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))
