"""The ranks that share the samples of a loader."""

import logging
import os
from functools import cache
from typing import NamedTuple

import torch.distributed as dist

from lit_data.errors import ConfigError

log = logging.getLogger(__name__)


class Ranks(NamedTuple):
    """This process among those that share the samples.

    Attributes:
        rank: Of this process, 0 <= rank < world_size.
        world_size: Number of processes.
    """

    rank: int
    world_size: int


def find_ranks(rank: int | None, world_size: int | None) -> Ranks:
    """Return the ranks that somebody gave, else those of `torch.distributed` if its group is up.

    Args:
        rank: Of this process, if given.
        world_size: Number of processes, if given.
    """
    found = Ranks(0, 1)
    if _has_group():
        found = Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks(
        found.rank if rank is None else rank,
        found.world_size if world_size is None else world_size,
    )


def check_ranks_known(rank: int | None, world_size: int | None) -> None:
    """Check that processes which do not know of each other were told which they are.

    A launcher that started several is a reason to warn: nothing else says that they belong together.

    Raises:
        ConfigError: There are several, and this one has no number.
    """
    if rank is not None or _has_group():
        return
    if world_size is not None and world_size > 1:
        raise ConfigError(
            f"world_size={world_size} without rank, and torch.distributed has no process group: "
            "give rank= too, or each process reads the same part"
        )
    started = os.environ.get("WORLD_SIZE", "")
    if world_size is None and started.isdigit() and int(started) > 1:
        warn_without_group(int(started))


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


@cache
def warn_without_group(processes: int) -> None:
    """Warn once that each of several processes reads all samples."""
    log.warning(
        "WORLD_SIZE=%d, but torch.distributed has no process group: this process reads all samples, "
        "as do the others. Call torch.distributed.init_process_group before, or give "
        "MicroBatchLoader rank= and world_size=",
        processes,
    )
