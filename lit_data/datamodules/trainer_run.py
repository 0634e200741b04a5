"""`TrainerRun`: the state of a datamodule for one run of a Trainer."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_data.core.errors import ConfigError, RankMismatchError
from lit_data.core.lightning_internals import count_trained, find_epoch, reopen_epoch
from lit_data.core.types import Stage
from lit_data.loading import MicroBatchLoader

_UNUSED = (
    "the state that load_state_dict gave the datamodule is not used: a Trainer begins at the first "
    "batch, unless fit(ckpt_path=...) restores its own progress too"
)


_LIMITS: dict[Stage, tuple[str, ...]] = {
    "train": ("overfit_batches", "limit_train_batches", "val_check_interval"),
    "val": ("overfit_batches", "limit_val_batches"),
    "test": ("limit_test_batches",),
    "predict": ("limit_predict_batches",),
}
"""Options of a Trainer that may be fractions of the length of a loader."""
_TRAINER_OPTIONS = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "val_check_interval",
)
NO_LENGTH = "data.loader.resizable=true loaders have no length"


def check_fractions(trainer: Trainer, stage: Stage) -> None:
    """Refuse fractions of a resizable loader's length; Lightning's message is about IterableDataset.

    Raises:
        ConfigError: The Trainer has a fraction for this stage.
    """
    for name in _LIMITS[stage]:
        value = getattr(trainer, name)
        if isinstance(value, float) and value not in (0.0, 1.0):
            raise ConfigError(
                f"trainer.{name}={value}: {NO_LENGTH}: give a whole number of batches, or set "
                "data.loader.resizable=false"
            )


def check_ranks_agree(loader: MicroBatchLoader, trainer: Trainer | None = None) -> None:
    """Check that ranks agree on the number of steps, before one waits forever for another.

    Args:
        loader: This rank's loader; every rank calls this at the same time.
        trainer: This rank's Trainer.

    Raises:
        RankMismatchError: The ranks have datasets of different sizes or different options.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    own_values = _list_step_options(loader, trainer)
    # Every rank sends its values even if they agree, because a single rank would wait forever.
    values_of_ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(values_of_ranks, own_values)
    for name in own_values:
        values = [of_rank[name] for of_rank in values_of_ranks]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise RankMismatchError(
                f"the ranks disagree on {name} ({listed}): "
                "give all of them the same data and options"
            )


def _list_step_options(loader: MicroBatchLoader, trainer: Trainer | None) -> dict[str, Any]:
    """Return everything that determines the number of steps of a rank, by name."""
    options = loader.options
    values: dict[str, Any] = {
        "samples": loader.order.length,
        "batch_size": loader.batch_size,
        "seed": options.seed,
        "drop_last": options.drop_last,
        "resizable": options.resizable,
    }
    for name in _TRAINER_OPTIONS:
        values[f"trainer.{name}"] = getattr(trainer, name, None)
    return values


class TrainerRun:
    """The loaders of one run, and the position in the data from which it resumes.

    A Trainer may run a datamodule while another one trains with it, such as in a callback that
    validates. Each Trainer has its own `TrainerRun`.

    Args:
        trainer: Trainer that runs the datamodule; None for use without one.

    Attributes:
        loaders: The last loader of each stage.
        resumed: State of the training loader in a checkpoint, until that loader is made.
    """

    def __init__(self, trainer: Trainer | None) -> None:
        self.trainer = trainer
        self.loaders: dict[Stage, MicroBatchLoader] = {}
        self.resumed: Mapping[str, Any] | None = None

    def follow(self, earlier: Sequence[Self]) -> list[Self]:
        """Return the enclosing runs that have not ended, followed by this one."""
        around = []
        for run in earlier:
            if run.trainer is self.trainer:
                self.loaders = run.loaders  # a checkpoint of this Trainer holds their progress
            elif run.is_under_way:
                around.append(run)
            if run.resumed is not None and not run.is_under_way:
                rank_zero_warn(_UNUSED)
        return [*around, self]

    @property
    def is_under_way(self) -> bool:
        """True from the call of the Trainer to its return."""
        return self.trainer is not None and self.trainer.state.stage is not None

    def read_state(self) -> Mapping[str, Any] | None:
        """Return the position in the training data; None before there is one."""
        loader = self.loaders.get("train")
        return self.resumed if loader is None else loader.state_dict()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Keep a state for the training loader, unless the run only scores a checkpoint."""
        trainer = self.trainer
        trains = trainer is None or not self.is_under_way or trainer.state.fn == "fit"
        self.resumed = state if trains else None

    def start_training(self, loader: MicroBatchLoader) -> None:
        """Let a new training loader begin at the run's position."""
        state, self.resumed = self.resumed, None
        trainer = self.trainer
        if trainer is not None and self.is_under_way:
            loader.count_trained = partial(count_trained, trainer)
            if not loader.repeats:
                loader.set_epoch(find_epoch(trainer))
        if state is None:
            return
        loader.load_state_dict(state)
        if trainer is not None and state["batches"]:
            reopen_epoch(trainer, state["epoch"])

    def close(self) -> None:
        """Stop the workers, and drop a state for which no loader was made."""
        self.resumed = None
        for loader in self.loaders.values():
            loader.close()
