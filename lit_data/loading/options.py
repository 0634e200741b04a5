"""Options of a loader."""

from dataclasses import dataclass, fields
from typing import Literal

import torch

from lit_data.core.checks import check_count, check_types
from lit_data.core.errors import ConfigError
from lit_data.core.rng import check_seed

WorkerKind = Literal["auto", "inline", "thread", "process"]
Locality = Literal["auto", "none", "image"]
StartMethod = Literal["auto", "fork", "forkserver", "spawn"]

_LEAST = {
    "batch_size": 1,
    "micro_batch_size": 1,
    "prefetch_batches": 1,
    "window_bytes": 1,
    "num_workers": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options of a `MicroBatchLoader`, validated when they are created.

    For example, a batch of 32 with micro-batches of 8 is written by up to four workers at once,
    each into its own rows. Only `seed` changes samples. With the same seed and batch size, only
    `locality` and `drop_last` change batches.

    Args:
        batch_size: Samples per batch and rank.
        global_batch_size: Samples per step of all ranks together, instead of `batch_size`: each
            rank takes an equal part.
        micro_batch_size: Samples that a worker writes at a time; at most a whole batch. For `auto`
            see `lit_data.loading.choice.Choice.count_rows`.
        num_workers: Number of workers; 0 reads in the main thread, for `auto` see
            `lit_data.loading.choice.choose_workers`.
        worker_kind: `inline` (the main thread), `thread`, `process`, or `auto`, which measures
            briefly and chooses.
        start_method: Start method of worker processes; `auto` is the default of this Python.
        resizable: `loader.batch_size = n` takes effect with the next batch; such a loader has no
            length.
        prefetch_batches: Batches prepared ahead of the one in use.
        pin_memory: Page-lock batches if CUDA is available, so that copies to the GPU do not block;
            `True` warns if it is not available, `auto` does not.
        locality: `none` shuffles all samples; `image`, for datasets larger than memory, shuffles as
            many images at a time as fit into `window_bytes`, so each is read from disk once per
            epoch; `auto` is `image` for shards that do not fit into their local cache, else `none`.
        window_bytes: See `locality`.
        seed: Seed of the order and of every random number of a sample, 0 <= seed < 2**64.
        drop_last: Drop the last batch of an epoch if it is short.
        timeout_s: Longest wait for one micro-batch before the run ends with an error.

    Raises:
        ConfigError: A value is out of its range.
    """

    batch_size: int = 32
    global_batch_size: int | None = None
    micro_batch_size: int | Literal["auto"] = "auto"
    num_workers: int | Literal["auto"] = "auto"
    worker_kind: WorkerKind = "auto"
    start_method: StartMethod = "auto"
    resizable: bool = False
    prefetch_batches: int = 2
    pin_memory: bool | Literal["auto"] = "auto"
    locality: Locality = "auto"
    window_bytes: int = 2**30
    seed: int = 0
    drop_last: bool = False
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Check every range."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            may_be_auto = name in ("micro_batch_size", "num_workers")
            if not (may_be_auto and value == "auto"):
                check_count(name, value, least)
        if self.global_batch_size is not None:
            check_count("global_batch_size", self.global_batch_size, 1)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check_types(LoaderOptions, values)
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s!r} must be greater than 0")
        check_seed(self.seed)

    @property
    def pins_memory(self) -> bool:
        """Return True if batches are page-locked in this process."""
        return self.pin_memory is not False and torch.cuda.is_available()

    def count_batch(self, world_size: int) -> int:
        """Return the samples per batch and rank.

        Raises:
            ConfigError: The ranks cannot share the global batch evenly.
        """
        if self.global_batch_size is None:
            return self.batch_size
        samples, rest = divmod(self.global_batch_size, world_size)
        if rest or not samples:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} cannot be shared evenly by "
                f"{world_size} ranks: choose a multiple of {world_size}, or set batch_size, "
                "which is the size per rank"
            )
        return samples
