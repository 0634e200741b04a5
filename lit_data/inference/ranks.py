"""Prediction by several processes: who takes which image, and how the answers come together in order."""

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from lit_data.errors import ConfigError, RankMismatchError

T = TypeVar("T")


def rank_share(length: int, rank: int, world_size: int) -> range:
    """Images of one rank: every world_size-th from the rank-th on, as in evaluation. Each belongs
    to one rank.

    Args:
        length: Images of all ranks together; may be fewer than ranks.
        rank: 0 <= rank < world_size.
        world_size: Processes.

    Raises:
        ConfigError: The rank is out of range.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is out of range for world_size={world_size}")
    return range(rank, length, world_size)


def merge_shares(shares: Sequence[Sequence[T]], length: int) -> list[T]:
    """What the ranks found for their shares, in the order of the images.

    Args:
        shares: For each rank one entry for each image of its `rank_share`.
        length: Images of all ranks together.

    Raises:
        RankMismatchError: A rank has another number of entries than images.
    """
    wanted = [len(rank_share(length, rank, len(shares))) for rank in range(len(shares))]
    given = [len(share) for share in shares]
    if given != wanted:
        raise RankMismatchError(
            f"the ranks predicted {given} of {length} images, and their shares are {wanted}"
        )
    return [shares[image % len(shares)][image // len(shares)] for image in range(length)]


def gather_in_order(found: Sequence[T], length: int) -> list[T]:
    """Exchange what every rank found for its share; without a process group there is nothing to
    exchange.

    Args:
        found: One entry for each image of this rank's `rank_share`; anything that can be pickled,
            small rather than whole maps.
        length: Images of all ranks together.

    Returns:
        On every rank the entries of all images in order.

    Raises:
        RankMismatchError: A rank has another number of entries than images.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return merge_shares([found], length)
    shares: list[Sequence[T]] = [()] * dist.get_world_size()
    dist.all_gather_object(shares, list(found))
    return merge_shares(shares, length)
