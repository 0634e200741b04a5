"""`OnePassModule`: a frozen net, and a sample of its outputs for training images, from which it learns."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.batch_form import count_samples
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.models.anomaly.normality import Candidates
from lit_data.models.scored import ScoredModule, refuse_true_precision

_PENDING = "candidates"  # key of a checkpoint


class OnePassModule(ScoredModule):
    """Base of modules that learn from a sample of a frozen net's outputs, and train no weights.

    Training is one pass. An optimizer without weights counts the batches, because Lightning's
    checkpoints depend on its steps. Constructors call `freeze_net` at their end.
    """

    _has_news = False
    _is_last_batch = False

    @property
    def candidates(self) -> Candidates:
        """The sample."""
        raise NotImplementedError

    def sample(self, batch: Batch) -> None:
        """Add a training batch to the sample, without gradients."""
        raise NotImplementedError

    def learn(self) -> None:
        """Learn from the sample."""
        raise NotImplementedError

    def freeze_net(self) -> None:
        """Freeze the net, and create the parameter that counts batches."""
        self.net.requires_grad_(False)
        self.steps = nn.Parameter(torch.zeros(0))

    @override
    def setup(self, stage: str) -> None:
        """Refuse a Trainer with which the module cannot learn.

        Raises:
            ConfigError: Several processes would each have a sample of their own; or weights are not
                of float32.
        """
        refuse_true_precision(self)
        if stage in ("fit", "validate") and self.trainer.world_size > 1:
            raise ConfigError(
                f"{self.trainer.world_size} processes would each train on a part of the images "
                "and get different thresholds: set trainer.devices=1 trainer.num_nodes=1"
            )
        super().setup(stage)

    @override
    def train(self, mode: bool = True) -> "OnePassModule":
        """Set the training mode of everything but the net, which stays frozen."""
        super().train(mode)
        self.net.eval()
        return self

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return count_steps([self.steps])

    @override
    def on_train_start(self) -> None:
        # Lightning leaves the mode that a module was made in: batches would move the net's statistics.
        self.net.eval()

    @override
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 0:
            self.candidates.clear()  # those of the epoch before
        self._is_last_batch = batch_idx + 1 >= self.trainer.num_training_batches

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.sample(batch)
        self._has_news = True
        self.log("train/candidates", float(len(self.candidates)), batch_size=count_samples(batch))
        return self.steps.sum()

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        """Return 0, because no loss is minimized."""
        return self.steps.sum()

    @override
    def on_validation_epoch_start(self) -> None:
        self._learn_news()

    @override
    def on_train_epoch_end(self) -> None:
        self._learn_news()  # where there was no validation

    def _learn_news(self) -> None:
        if self._has_news:
            self.learn()
            self._has_news = False

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if len(self.candidates) and not self._is_last_batch:
            checkpoint[_PENDING] = self.candidates.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if _PENDING in checkpoint:
            self.candidates.load_state_dict(checkpoint[_PENDING])
            self._has_news = True


def count_steps(parameters: Any) -> torch.optim.Optimizer:  # noqa: ANN401 - see `OptimizerFactory`
    """Return an optimizer that counts steps and changes nothing."""
    return torch.optim.SGD(parameters, lr=0.0)
