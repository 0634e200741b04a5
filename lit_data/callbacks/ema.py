"""`EMA`: a moving average of the weights, used for validation and checkpoints."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lit_data.callbacks.wrapping import SAVE, UndoneCallback, wrap
from lit_data.core.errors import ConfigError

log = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_WARM_UP_STEPS = 10
_WEIGHTS_KEY = "weights_of_last_step"
_AVERAGE_KEY = "average_of_weights"

_Tensors = Mapping[str, Tensor]


class EMA(UndoneCallback):
    """Exponential moving average of the weights (Polyak and Juditsky, 1992), for any module.

    Weights of single steps vary: from one epoch to the next, the scores of a net may drop sharply.
    Their average is stable, and helps about as much as a falling learning rate would. After
    optimizer step n it becomes ``d * average + (1 - d) * weights`` with ``d = min(decay, (1 + n) /
    (10 + n))``, so it also forgets the first steps of a short run (as
    ``tf.train.ExponentialMovingAverage`` does). Running statistics of batch normalization are
    averaged like the weights; all other buffers are those of the module. The average is kept in
    float32 or better, because small steps would be lost in bfloat16.

    The module holds the average in all hooks of validation, while the Trainer saves a checkpoint of
    any kind, and after training, even if an error or Ctrl-C ended it. At all other times it holds
    the weights of the last step. A resumed run continues with these weights, which a checkpoint
    also holds unless it holds only weights. Unlike Lightning's ``EMAWeightAveraging``, this callback
    leaves thresholds and counters alone, and tied weights stay tied.

    Args:
        decay: Fraction of the average kept at each step; about ``1 / (1 - decay)`` steps are
            averaged.

    Raises:
        ConfigError: The decay is not between 0 and 1; later, the strategy shards the weights across
            ranks, or another callback averages them too.
    """

    of_run = MappingProxyType({"_undo": ExitStack})

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 < decay < 1:
            raise ConfigError(f"EMA: decay={decay} must be between 0 and 1, such as 0.99")
        self.decay = decay
        self._step_count = 0
        self._global_step = 0
        self._average: dict[str, Tensor] = {}
        # While the module holds the average, these are the weights of the last step.
        self._weights: dict[str, Tensor] = {}
        self._undo = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _refuse_spread(trainer)
        _refuse_others(self, trainer)
        if stage != "fit":
            return
        self._step_count = 0
        self._average, self._weights = {}, {}
        validation = trainer.fit_loop.epoch_loop.val_loop
        for owner, method in ((validation, "run"), (trainer, SAVE)):
            self._undo.callback(wrap(owner, method, self._make_around(trainer, pl_module)))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step = trainer.global_step
        tensors = _list_averaged(pl_module)
        if not self._weights:
            self._average = _copy_precisely(tensors)
            return
        for name, tensor in tensors.items():
            if name in self._average:  # loaded on the host
                self._average[name] = self._average[name].to(tensor.device)
        self._hide(pl_module)  # the weights that were loaded are the average

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._follow(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(pl_module)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        try:
            if self._is_training:
                self._follow(trainer, pl_module)
                self._show(pl_module, device=_HOST)
            self.undo(trainer)
        except Exception as problem:  # a device that failed repeats its error
            self._undo.close()
            log.warning(
                "EMA: the module keeps the weights of its last step, because the average cannot "
                "be read: %s: %s",
                type(problem).__name__,
                problem,
            )

    @override
    def undo(self, trainer: Trainer) -> None:
        self._undo.close()
        # A checkpoint may still be saved; until then the device has its memory back.
        self._average = {name: tensor.cpu() for name, tensor in self._average.items()}
        self._weights = {name: tensor.cpu() for name, tensor in self._weights.items()}

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        tensors = _list_averaged(pl_module)
        if not self._weights or not _is_shown(self._average, tensors):
            return  # the module has been given other weights since
        # A frozen part, which a module may leave out of its checkpoints, is its own average.
        checkpoint[_WEIGHTS_KEY] = {
            name: weights
            for name, weights in self._weights.items()
            if name in tensors and not torch.equal(weights.to(tensors[name]), tensors[name])
        }
        checkpoint[_AVERAGE_KEY] = {
            name: average
            for name, average in self._average.items()
            if name in tensors and average.dtype != tensors[name].dtype
        }

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        is_training = self._is_training
        self._average, self._weights = {}, {}
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if _WEIGHTS_KEY in checkpoint:
            tensors = _list_averaged(pl_module)
            self._average = _copy_precisely(tensors) | checkpoint[_AVERAGE_KEY]
            self._weights = _copy(tensors) | checkpoint[_WEIGHTS_KEY]
        if is_training:  # a search for a learning rate returns to its start
            self.on_train_start(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step_count": self._step_count}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step_count = state_dict["step_count"]

    def _make_around(self, trainer: Trainer, module: nn.Module) -> Callable[..., Any]:
        """Return a wrapper that lets the module hold the average during a method."""

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any method
            with self._showing(trainer, module):
                return call(*args, **kwargs)

        return around

    @contextmanager
    def _showing(self, trainer: Trainer, module: nn.Module) -> Iterator[None]:
        if not self._is_training:
            yield
            return
        self._follow(trainer, module)  # a callback before this one may save the finished step
        self._show(module)
        try:
            yield
        finally:
            self._hide(module)

    @property
    def _is_training(self) -> bool:
        """True while the module holds the weights of the last step beside an average."""
        return bool(self._average) and not self._weights

    def _show(self, module: nn.Module, device: torch.device | None = None) -> None:
        tensors = _list_averaged(module)
        self._weights = _copy(tensors, device)
        _fill(tensors, self._average)

    def _hide(self, module: nn.Module) -> None:
        _fill(_list_averaged(module), self._weights)
        self._weights = {}

    @torch.no_grad()
    def _follow(self, trainer: Trainer, module: nn.Module) -> None:
        """Move the average toward the weights of a new step, if there was one."""
        if trainer.global_step == self._global_step:  # gradients are accumulated
            return
        self._global_step = trainer.global_step
        self._step_count += 1
        warm_up_decay = (1 + self._step_count) / (_WARM_UP_STEPS + self._step_count)
        decay = min(self.decay, warm_up_decay)
        tensors = _list_averaged(module)
        for name, weights in tensors.items():
            average = self._average.get(name)
            if average is None or average.shape != weights.shape:  # a new layer
                self._average |= _copy_precisely({name: weights})
            else:
                average.lerp_(weights.to(average.dtype), 1 - decay)


def _refuse_spread(trainer: Trainer) -> None:
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy):
        raise ConfigError(
            f"EMA: {type(trainer.strategy).__name__} shards the weights across the ranks, so no "
            "rank can average them: set callbacks.ema=null"
        )


def _refuse_others(callback: Callback, trainer: Trainer) -> None:
    for other in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
        averages = isinstance(other, EMA | WeightAveraging | StochasticWeightAveraging)
        if averages and other is not callback:
            raise ConfigError(
                f"EMA: {type(other).__name__} averages the weights too, and each would overwrite "
                "the other's average: remove one of them"
            )


def _list_averaged(module: nn.Module) -> dict[str, Tensor]:
    """Return the averaged tensors of a module by name, without the prefixes of torch.compile."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not is_lazy(parameter):
            tensors[name] = parameter
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        prefix = f"{name}." if name else ""
        # A layer without running statistics normalizes by those of the batch.
        for statistic in ("running_mean", "running_var"):
            buffer = getattr(layer, statistic)
            if buffer is not None and not is_lazy(buffer):
                tensors[f"{prefix}{statistic}"] = buffer
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}


def _copy(tensors: _Tensors, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return copies on `device`; None leaves each on its own device."""
    return {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}


def _copy_precisely(tensors: _Tensors) -> dict[str, Tensor]:
    """Return copies in float32, or in their own dtype if that is more precise."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        copies[name] = tensor.detach().to(dtype, copy=True)
    return copies


@torch.no_grad()
def _fill(tensors: _Tensors, sources: _Tensors) -> None:
    for name, tensor in tensors.items():
        if name in sources:  # a layer may be newer
            tensor.copy_(sources[name])


def _is_shown(average: _Tensors, tensors: _Tensors) -> bool:
    """Return True if the tensors equal the average."""
    for name, tensor in tensors.items():
        if name in average and not torch.equal(average[name].to(tensor), tensor):
            return False
    return True
