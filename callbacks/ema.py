"""`EMA`: the moving average of the weights is what is scored and kept."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lit_data.errors import ConfigError

_WARM_UP_STEPS = 10
_WEIGHTS_KEY = "weights_of_last_step"


class EMA(Callback):
    """Exponential moving average of the weights (Polyak and Juditsky, 1992), for any module.

    Weights of single steps jump: from one epoch to the next a net may lose most of what it finds.
    Their average does not, and is ahead of them by as much as a falling learning rate would bring.
    After optimizer step n it becomes ``d * average + (1 - d) * weights`` with ``d = min(decay, (1 +
    n) / (10 + n))``, so that it forgets the first steps of a short run too (as
    ``tf.train.ExponentialMovingAverage``). Running statistics of batch normalisation are averaged
    as the weights are; all other buffers are those of the module.

    Validation sees the average, checkpoints hold it as their weights, and after training the module
    has it. A resumed run goes on with the weights of its last step, which the checkpoint holds as
    well. Unlike Lightning's ``EMAWeightAveraging`` it leaves thresholds and counters alone, and
    checkpoints that are saved while validation runs are right.

    Args:
        decay: Part of the average that stays at each step; about ``1 / (1 - decay)`` steps count.

    Raises:
        ConfigError: The decay is not between 0 and 1; later, that the strategy spreads the weights
            over the ranks.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 < decay < 1:
            raise ConfigError(f"EMA: decay={decay} must lie between 0 and 1, such as 0.99")
        self.decay = decay
        self._step_count = 0
        self._global_step = 0
        # While validation runs, this holds the weights, and the module the average.
        self._average: dict[str, Tensor] = {}
        self._resumed_weights: Mapping[str, Tensor] = {}
        self._shows_average = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy):
            raise ConfigError(
                f"EMA: {type(trainer.strategy).__name__} spreads the weights over the ranks, and none of them could "
                "average them: set callbacks.ema=null"
            )
        self._step_count = 0
        self._resumed_weights = {}
        self._average = {}
        self._shows_average = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tensors = _list_averaged(pl_module)
        self._average = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._global_step = trainer.global_step
        if self._resumed_weights:  # what was loaded as weights is the average
            _copy(self._resumed_weights, tensors)
            self._resumed_weights = {}

    @override
    @torch.no_grad()
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._global_step:  # gradients are accumulated
            return
        self._global_step = trainer.global_step
        self._step_count += 1
        warm_up_decay = (1 + self._step_count) / (_WARM_UP_STEPS + self._step_count)
        decay = min(self.decay, warm_up_decay)
        for name, tensor in _list_averaged(pl_module).items():
            self._average[name].lerp_(tensor, 1 - decay)

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average and not self._shows_average:  # not before training has begun
            self._swap(pl_module)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._shows_average:
            self._swap(pl_module)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._shows_average:
            self._swap(pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _copy(self._average, _list_averaged(pl_module))
        self._average = {}

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._average:
            return
        if self._shows_average:  # validation runs, and what is kept aside are the weights
            checkpoint[_WEIGHTS_KEY] = self._average
            return
        checkpoint[_WEIGHTS_KEY] = {name: checkpoint["state_dict"][name] for name in self._average}
        checkpoint["state_dict"] = checkpoint["state_dict"] | self._average

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumed_weights = checkpoint.get(_WEIGHTS_KEY, {})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step_count": self._step_count}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step_count = state_dict["step_count"]

    def _swap(self, module: nn.Module) -> None:
        """Exchange the weights of the module with their average."""
        tensors = _list_averaged(module)
        weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        _copy(self._average, tensors)
        self._average = weights
        self._shows_average = not self._shows_average


def _list_averaged(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that are averaged, by their names in its `state_dict`."""
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        prefix = f"{name}." if name else ""
        # A layer without running statistics normalises by those of the batch.
        if layer.running_mean is not None and layer.running_var is not None:
            tensors[f"{prefix}running_mean"] = layer.running_mean
            tensors[f"{prefix}running_var"] = layer.running_var
    return tensors


@torch.no_grad()
def _copy(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])
