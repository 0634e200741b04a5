"""Sums over training steps, and a sentence on what limits a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from lit_data.callbacks.device_memory import MemoryReading
from lit_data.callbacks.timeline import Timeline, add_rows
from lit_data.callbacks.timing.step_clock import PARTS, Part, Seconds

_ENOUGH_STEPS = 5
"""Number of steps at a batch size after which its speed counts."""

_WORTH_NAMING = 0.2
"""Smallest fraction of the time at which something other than the model is said to limit a run."""

_MUCH_MEMORY = 0.3
"""Fraction of the memory that must be free for a larger batch to be advised."""

_SOME_GAIN = 1.05
"""Smallest ratio worth naming of the speed at the largest batch size to that at the next smaller one."""

_MUCH_READ = 0.5
"""Smallest ratio of bytes read from disks to bytes of the samples at which the disk is said to limit."""

_PartGroup = tuple[Part, ...]
_DATA: _PartGroup = ("wait", "assemble")
_MODEL: _PartGroup = ("forward", "backward")
_LIMITS: dict[_PartGroup, tuple[str, str]] = {
    _DATA: (
        "waiting for data",
        "more workers (num_workers), a cache of decoded images, in memory or on the device, "
        "or a faster disk",
    ),
    ("transfer",): (
        "the copy to the device",
        "page-locked memory (pin_memory), images that stay uint8 until they are on the device, "
        "or a cache on the device",
    ),
    ("augment",): (
        "augmentation",
        "fewer or cheaper operations, or some of them in the loader's workers",
    ),
    ("optimizer",): (
        "the optimizer",
        "fused=True, or fewer steps by larger batches or gradient accumulation",
    ),
    ("other",): (
        "what is neither data nor model (callbacks, loggers, the Trainer)",
        "fewer callbacks, a larger log_every_n_steps or larger batches",
    ),
}
"""Parts that can limit a run, their names and what to try."""

_ASSEMBLY_CURE = (
    "fewer or smaller fields of a sample: most of it is the loader's own work in the main process"
)
_DISK_CURE = (
    "memory for the whole set, a faster disk for paths.cache, or, for patches of wide images, "
    "data.store.band_px=64 (32 for small ones)"
)


class Hardware(NamedTuple):
    """The device that a model runs on.

    Attributes:
        on_cpu: True for the CPU.
        precision: Lightning's name of the model's precision, such as ``bf16-mixed``.
        has_bf16: True if the device is faster in bf16 than in float32.
        is_chosen: True if the precision was requested, so that no other one is advised.
    """

    on_cpu: bool = True
    precision: str = ""
    has_bf16: bool = False
    is_chosen: bool = False


class EndedBatch(NamedTuple):
    """A training batch that ended.

    Attributes:
        number: Number of the batch in the training.
        samples: Number of samples in the batch; 0 if they could not be counted.
        seconds_s: Time of the batch; None if it was not timed.
        size: Number of samples that went through the model at once.
        failed: True if the batch ran out of memory at first.
        is_rest: True if the batch is the last one of its epoch.
    """

    number: int
    samples: int
    seconds_s: float | None
    size: int
    failed: bool
    is_rest: bool


@dataclass
class Tally:
    """Sums over training batches.

    Attributes:
        batches: Number of all batches.
        failed: Number of batches that ran out of memory at first.
        steps: Number of timed batches.
        samples: Samples of the timed batches, of those that could be counted.
        counted_s: Time of those.
        seconds: Time of the timed batches.
        measured: Number of batches whose parts are known.
        parts: Seconds of each of `PARTS` in the measured batches.
    """

    batches: int = 0
    failed: int = 0
    steps: int = 0
    samples: int = 0
    counted_s: float = 0.0
    seconds: float = 0.0
    measured: int = 0
    parts: Seconds = (0.0,) * len(PARTS)

    def add(self, ended: Sequence[EndedBatch], parts: Sequence[Seconds]) -> None:
        """Count batches that ended, and steps whose parts became known."""
        for batch in ended:
            self.batches += 1
            self.failed += batch.failed
            if batch.seconds_s is not None:
                self.steps += 1
                self.seconds += batch.seconds_s
                if batch.samples:
                    self.samples += batch.samples
                    self.counted_s += batch.seconds_s
        # On a device, the parts are known only for some steps, and later than their batches.
        self.measured += len(parts)
        self.parts = tuple(map(sum, zip(self.parts, *parts, strict=True)))

    def mean_parts(self) -> dict[Part, float]:
        """Return the mean seconds of each part of a step."""
        return {
            part: seconds_s / self.measured
            for part, seconds_s in zip(PARTS, self.parts, strict=True)
        }

    def rate(self) -> dict[str, float]:
        """Return the values of ``data/`` that `lit_data.callbacks.DataWaitMonitor` logs."""
        data_s = sum(self.parts[PARTS.index(part)] for part in _DATA)
        rates = {
            "wait_fraction": data_s / sum(self.parts),
            "success_rate": 1 - self.failed / self.batches,
        }
        if self.samples:
            rates["samples_per_s"] = self.samples / self.counted_s
        return rates


@dataclass
class StepTotals:
    """Sums over a whole training: its steps, the speed at each batch size, and memory.

    Attributes:
        tally: Sums over the steps.
        sizes: Steps, samples and seconds at each batch size.
        readings: Number of memory readings.
        allocated_bytes: Sum of the allocated bytes over the readings.
        peak_bytes: The largest peak.
        limit_bytes: The last limit.
        disk_bytes: Bytes read from disks.
        sample_bytes: Bytes of the samples trained in the same time.
    """

    tally: Tally = field(default_factory=Tally)
    sizes: dict[int, list[float]] = field(default_factory=dict)
    readings: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    limit_bytes: int = 0
    disk_bytes: int = 0
    sample_bytes: int = 0

    def add(self, ended: Sequence[EndedBatch], parts: Sequence[Seconds]) -> None:
        """Count batches that ended, and steps whose parts became known."""
        self.tally.add(ended, parts)
        for batch in ended:
            # the last batch of an epoch may be incomplete, and its speed says little
            if batch.seconds_s is None or not batch.samples or (batch.is_rest and self.sizes):
                continue
            steps, samples, seconds_s = self.sizes.get(batch.size, (0, 0, 0.0))
            self.sizes[batch.size] = [
                steps + 1,
                samples + batch.samples,
                seconds_s + batch.seconds_s,
            ]

    def add_memory(self, reading: MemoryReading) -> None:
        """Add a reading."""
        self.readings += 1
        self.allocated_bytes += reading.allocated_bytes
        self.peak_bytes = max(self.peak_bytes, reading.peak_bytes)
        self.limit_bytes = reading.limit_bytes

    def summarise(self, hardware: Hardware) -> dict[str, float | int | str]:
        """Return the values of `lit_data.callbacks.DataWaitMonitor.summary`."""
        tally = self.tally
        if not tally.measured:
            return {}
        rates = tally.rate()
        speeds = self._rate_sizes()
        counted: dict[str, float] = {}
        if speeds:
            counted["samples_per_s"] = rates["samples_per_s"]
            counted["train/best_batch_size"] = max(speeds, key=speeds.__getitem__)
        return {
            "data_wait_fraction": rates["wait_fraction"],
            **counted,
            "train/mean_step_s": tally.seconds / tally.steps,
            **{f"train/mean_{part}_s": seconds_s for part, seconds_s in tally.mean_parts().items()},
            "train/batch_success_rate": rates["success_rate"],
            "train/memory_mean_bytes": self.allocated_bytes // max(self.readings, 1),
            "train/memory_max_bytes": self.peak_bytes,
            "train/disk_read_bytes": self.disk_bytes,
            "train/limited_by": self.describe(hardware),
        }

    def describe(self, hardware: Hardware) -> str:
        """Return one sentence on what limits the run; see `describe_limit`."""
        gain = None  # stays if all batches had one size
        speeds = self._rate_sizes()
        if len(speeds) > 1:
            smaller, largest = sorted(speeds)[-2:]
            gain = speeds[largest] / speeds[smaller]
        return describe_limit(
            self.tally.mean_parts(),
            hardware,
            free_memory=1 - self.peak_bytes / self.limit_bytes if self.limit_bytes else 0.0,
            gain=gain,
            disk_ratio=self.disk_bytes / self.sample_bytes if self.sample_bytes else 0.0,
        )

    def to_plain(self) -> dict[str, Any]:
        """Return plain numbers, for a checkpoint."""
        plain = asdict(self)
        plain["tally"]["parts"] = list(self.tally.parts)
        plain["sizes"] = [[size, *counts] for size, counts in self.sizes.items()]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "StepTotals":
        """Return the totals from the numbers of `to_plain`.

        Raises:
            ValueError: The numbers are not those of `to_plain`.
        """
        sums = {"counted_s": plain["tally"]["seconds"], **plain["tally"]}  # earlier: all seconds
        tally = Tally(**{**sums, "parts": tuple(sums["parts"])})
        sizes = {}
        for size, steps, samples, seconds_s in plain["sizes"]:
            sizes[int(size)] = [steps, samples, seconds_s]
        numbers = [*vars(tally).values(), *tally.parts, *chain(*sizes.values()), *plain.values()]
        are_plain = all(isinstance(n, int | float | tuple | list | dict) for n in numbers)
        if len(tally.parts) != len(PARTS) or not are_plain:
            raise ValueError(f"the sums over training steps are {plain}")
        return cls(**{**plain, "tally": tally, "sizes": sizes})

    def _rate_sizes(self) -> dict[int, float]:
        """Return samples per second at each size that was seen often enough, or at all if none was."""
        frequent = {}
        for size, counts in self.sizes.items():
            if counts[0] >= _ENOUGH_STEPS:
                frequent[size] = counts
        speeds = {}
        for size, (_, samples, seconds_s) in (frequent or self.sizes).items():
            speeds[size] = samples / seconds_s
        return speeds


class Throughput:
    """History of a training, for throughput.png.

    Attributes:
        speed: Number of steps, samples, seconds, and batch size times steps; marks of ``oom``.
        parts: Seconds of each of `PARTS`.
    """

    def __init__(self) -> None:
        self.speed = Timeline(add_rows)
        self.parts = Timeline(add_rows)
        self._last_oom = -1

    def add(self, ended: Iterable[EndedBatch], parts: Iterable[tuple[int, Seconds]]) -> None:
        """Add batches that ended, and the parts of steps, each with its number."""
        for batch in ended:
            if batch.seconds_s is not None:
                row = (1, batch.samples, batch.seconds_s, batch.size)
                self.speed.add(batch.number, row)
        for number, seconds in parts:
            self.parts.add(number, seconds)

    def mark_oom(self, step: int) -> None:
        """Mark a step that ran out of memory, once even if it did so repeatedly."""
        if step != self._last_oom:
            self.speed.marks["oom"].add(step)
        self._last_oom = step


def describe_limit(
    parts: Mapping[Part, float],
    hardware: Hardware,
    *,
    free_memory: float = 0.0,
    gain: float | None = None,
    disk_ratio: float = 0.0,
) -> str:
    """Return one sentence on what limits a run and what to try.

    Args:
        parts: Time of each part of a step, in any unit.
        hardware: The device that the model runs on.
        free_memory: Fraction of the memory that was free even at the peak, 0 to 1.
        gain: Ratio of the speed at the largest batch size to that at the next smaller one; None if
            only one was seen.
        disk_ratio: Ratio of bytes read from disks to bytes of the samples.
    """
    total = sum(parts.values())
    # The model should take most of the time, so it is named if nothing else takes a fifth of it.
    fractions = {}
    for group in (*_LIMITS, _MODEL):
        fractions[group] = sum(parts[part] for part in group) / total
    worst = max(_LIMITS, key=fractions.__getitem__)
    if fractions[worst] < _WORTH_NAMING:
        half = _name_half(hardware.precision)
        in_half = f" in {half}" if half else ""
        is_free = not half and not hardware.is_chosen
        halves = is_free and (hardware.has_bf16 or not hardware.on_cpu)
        advice = _advise_model(hardware.on_cpu, free_memory, gain, halves=halves)
        return f"the model{in_half} takes {fractions[_MODEL]:.0%} of the time: {advice}"
    name, cure = _LIMITS[worst]
    reads = ""
    if worst == _DATA and parts["assemble"] > parts["wait"]:
        cure = _ASSEMBLY_CURE
    elif worst == _DATA and disk_ratio >= _MUCH_READ:
        reads = f", and the disk was read for {disk_ratio:.1f} times the bytes of the samples"
        cure = _DISK_CURE
    return f"{name} takes {fractions[worst]:.0%} of the time{reads}: try {cure}"


def _name_half(precision: str) -> str:
    """Return the half precision that the model ran in; empty for any other."""
    if precision.startswith("bf16"):
        return "bf16"
    return "fp16" if precision.startswith("16") else ""


def _advise_model(on_cpu: bool, free_memory: float, gain: float | None, *, halves: bool) -> str:
    """Return what to try if the model takes the time; `halves` means half precision is untried."""
    if gain is not None and gain >= _SOME_GAIN:
        return (
            f"a larger batch may help, as the largest so far was {gain - 1:.0%} faster "
            "than the one before"
        )
    if on_cpu and halves:
        return (
            "try bf16 (the callback AMP), for which this processor has instructions, a GPU "
            "or a smaller model"
        )
    if on_cpu:
        return "try a GPU, a smaller model or smaller images"
    if gain is None and free_memory >= _MUCH_MEMORY:
        return f"a larger batch may help, as {free_memory:.0%} of the memory is free"
    reason = "larger batches were no faster" if gain is not None else "the memory is in use"
    lower = "lower precision (the callback AMP), " if halves else ""
    return f"{reason}; try {lower}torch.compile, a smaller model or a faster device"
