"""Options of a measurement: `conf/benchmark.yaml`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lit_data.app.benchmarks.table import METHODS
from lit_data.core.checks import check_choice, check_count
from lit_data.core.errors import ConfigError, first_line

MODES = ("loaders", "headroom")
_LEAST: Mapping[str, int] = {
    "micro_batch_sizes": 1,
    "batch_sizes": 1,
    "repeats": 1,
    "warmup_batches": 1,
    "steps": 1,
    "cached_batches": 1,
    "workers": 0,
    "samples_per_row": 1,
}
"""Least value of each option that holds whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    """Options of the command, validated at birth.

    Args:
        mode: `loaders` compares ways to load an experiment's samples, `headroom` training with and
            without the work of loading.
        methods: Rows to measure, of `lit_data.app.benchmarks.table.METHODS`; `copy` comes by
            itself.
        workers: Numbers of workers to try; None for one number, that of the cores.
        micro_batch_sizes: Sizes to try, for the methods that have micro-batches.
        batch_sizes: Sizes to try; the first is the one that is recommended for.
        repeats: How often each row is measured, in turn with the others.
        seconds_per_row: Time of one measurement, without start and warm-up.
        samples_per_row: A measurement ends after this many samples too, or at the end of its time
            only.
        warmup_batches: Batches before each measurement, beside the first; their transfer is timed.
        defects: Draw the experiment's defects; otherwise batches stay as stored and a bare copy is
            measured too.
        finish: Measure until a batch is what the model sees; otherwise until it leaves the host,
            drawn by the workers; `both` measures the one and the other.
        device: Where batches go: `auto`, or a device of torch.
        steps: Mode `headroom`: training steps of each run.
        cached_batches: Mode `headroom`: batches that are replayed.

    Raises:
        ConfigError: A value is out of its range.
    """

    mode: str
    methods: Sequence[str]
    workers: Sequence[int] | None
    micro_batch_sizes: Sequence[int]
    batch_sizes: Sequence[int]
    repeats: int
    seconds_per_row: float
    samples_per_row: int | None
    warmup_batches: int
    defects: bool
    finish: bool | str
    device: str
    steps: int
    cached_batches: int

    def __post_init__(self) -> None:
        """Check every range."""
        check_choice("benchmark.mode", self.mode, MODES)
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown or not self.methods:
            raise ConfigError(
                f"benchmark.methods={list(self.methods)} must name some of {', '.join(METHODS)}"
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            counts = [*value] if isinstance(value, list | tuple) else [value]
            if not counts:
                raise ConfigError(f"benchmark.{name}=[] is empty: give at least one number")
            for count in counts:
                if count is not None:  # where null is none of the kinds, it is refused as such
                    check_count(f"benchmark.{name}", count, least)
        if not self.seconds_per_row > 0:
            raise ConfigError(
                f"benchmark.seconds_per_row={self.seconds_per_row!r} must be greater than 0"
            )
        check_choice("benchmark.finish", self.finish, (True, False, "both"))


def choose_device(name: str, key: str = "benchmark.device") -> torch.device:
    """Return the device that batches go to.

    Args:
        name: `auto`, or a device of torch.
        key: Its key in the configuration, for the message.

    Raises:
        ConfigError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # A device may be known by name and not be there: it is asked for memory.
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{key}={name!r} cannot be used ({first_line(error)}): choose auto or cpu"
        ) from error
