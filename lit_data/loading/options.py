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
    each into its own rows. None of these options changes a sample, nor, but for `locality` and with
    the same batch size, a batch.

    Args:
        batch_size: Samples per batch, of each rank where there are several.
        global_batch_size: Samples per step of all ranks together, in place of `batch_size`: each
            takes its equal part.
        micro_batch_size: Samples that a worker writes at a time; one larger than a batch counts as
            the batch. For `auto` see `lit_data.loading.choice.Choice.count_rows`.
        num_workers: Workers; 0 is the main thread, for `auto` see
            `lit_data.loading.choice.choose_workers`.
        worker_kind: `inline` (the main thread), `thread`, `process`, or `auto`: as a short
            measurement says.
        start_method: How processes start; `auto` is the default of this Python.
        resizable: `loader.batch_size = n` takes effect with the next batch; such a loader has no
            length.
        prefetch_batches: Batches under way beside the one handed out.
        pin_memory: Page-locked batches, which copy to a GPU without blocking, where CUDA is present;
            `auto` says nothing where it is not.
        locality: `none` shuffles all samples; `image`, for sets larger than memory, as many images
            at a time as take `window_bytes`, so that each is read from the disk once in an epoch;
            `auto` does that for a set of shards that does not fit its local cache.
        window_bytes: See `locality`.
        seed: Seed of the order and of every random number of a sample, 0 <= seed < 2**64.
        drop_last: Leave out the last batch of an epoch when it is short.
        timeout_s: Longest wait for one micro-batch before the run ends with a message.

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
        """Return True if batches are page-locked here."""
        return self.pin_memory is not False and torch.cuda.is_available()

    def count_batch(self, world_size: int) -> int:
        """Return the samples per batch of each of so many ranks.

        Raises:
            ConfigError: They cannot share the global batch evenly.
        """
        if self.global_batch_size is None:
            return self.batch_size
        samples, rest = divmod(self.global_batch_size, world_size)
        if rest or not samples:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} cannot be shared evenly by "
                f"{world_size} ranks: choose a multiple of {world_size}, or set batch_size, which "
                "is that of each rank"
            )
        return samples
