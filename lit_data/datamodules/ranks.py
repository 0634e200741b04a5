"""Whether all ranks are about to do the same work."""

from typing import Any, Final

import lightning as L
import torch.distributed as dist

from lit_data.errors import RankMismatchError
from lit_data.loading import MicroBatchLoader

_OF_TRAINER: Final = ("max_epochs", "max_steps", "accumulate_grad_batches", "val_check_interval")


def check_ranks_agree(loader: MicroBatchLoader, trainer: L.Trainer | None = None) -> None:
    """Compare what decides the number of steps, before a rank waits for ever for another.

    Args:
        loader: This rank's loader; every rank calls this at the same time.
        trainer: This rank's Trainer.

    Raises:
        RankMismatchError: The ranks see sets of different sizes, or have other options.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    options = loader.options
    mine: dict[str, Any] = {
        "samples": loader.order.length,
        "batch_size": loader.batch_size,
        "seed": options.seed,
        "drop_last": options.drop_last,
        "resizable": options.resizable,
    }
    mine |= {f"trainer.{name}": getattr(trainer, name, None) for name in _OF_TRAINER}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name in mine:
        values = [other[name] for other in everyone]
        if len(set(values)) > 1:
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise RankMismatchError(
                f"the ranks disagree on {name} ({each}): give all of them the same data and options"
            )
