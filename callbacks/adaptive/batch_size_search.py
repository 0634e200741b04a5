"""Which size to try next: a search between what fitted and what failed, guided by memory and by speed."""

from dataclasses import dataclass, field, fields
from typing import Any, Final

from lit_data.callbacks.device_memory import MemoryReading

_ROOM: Final = 1.05
"""Failures are forgotten once there is this much more memory than when they happened."""
_LOSS: Final = 0.95
"""A larger size must reach this share of the speed of the smaller one; timings of single windows differ by so much."""
_UNUSED: Final = 0.1
"""Share of what would fit that may be left unused, where any size is possible."""
_OPTIONAL: Final = ("max_size", "fails", "slow")


@dataclass
class SizeSearch:
    """The sizes of one stage and one kind of sample.

    Attributes:
        size: Samples that may go through the model at once.
        min_size: Smallest size.
        max_size: Largest size, if there is one.
        fits: Largest size that went through.
        fails: Smallest size that did not, if one failed.
        fails_limit_bytes: Memory that there was when it failed.
        slow: Smallest size that was no faster than a smaller one.
        clean: Steps since the size changed or failed, of batches at least that large.
        peaks: For each size (fixed bytes, peak bytes).
        rates: For each size the samples per second of its last window.
        batch: Samples of the largest batch.
        fixed_bytes: What was there before the last step that was measured.
    """

    size: int
    min_size: int = 1
    max_size: int | None = None
    fits: int = 0
    fails: int | None = None
    fails_limit_bytes: int = 0
    slow: int | None = None
    clean: int = 0
    peaks: dict[int, tuple[int, int]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    batch: int = 0
    fixed_bytes: int = 0
    _samples: int = 0
    _seconds: float = 0.0
    _smaller: int | None = None
    _owed: int | None = None

    def fail(self, size: int, limit_bytes: int) -> None:
        """Memory ran out at a size: halve, or go back to what fitted if that is more.

        If that fails too, the next half is that of the first size, so a batch is tried no more
        often than by halving.
        """
        half = -(-min(size, self._owed or size) // 2)
        self.fails = size if self.fails is None else min(size, self.fails)
        self.fails_limit_bytes = limit_bytes
        self.fits = self.fits if self.fits < size else 0
        self.change(max(self.min_size, self.fits, half))
        self._owed = half if self.fits > half else None

    def succeed(self, size: int, samples: int, seconds: float) -> None:
        """A step of `samples` samples went through, at most `size` of them at once.

        A batch smaller than the size in use tells nothing about that one.
        """
        self.fits, self.batch, self._owed = max(self.fits, size), max(self.batch, samples), None
        if samples < self.size:
            return
        self.clean += 1
        self._samples += samples
        self._seconds += seconds

    def change(self, size: int) -> None:
        """Use another size, and count anew."""
        self._smaller = self.size if size > self.size else None
        self.size, self.clean, self._samples, self._seconds = size, 0, 0, 0.0

    def learn(self, size: int, fixed_bytes: int, reading: MemoryReading) -> None:
        """Take note of what a size needed, and forget failures that happened when there was less memory."""
        self.peaks[size], self.fixed_bytes = (fixed_bytes, reading.peak_bytes), fixed_bytes
        if self.fails is not None and reading.limit_bytes > self.fails_limit_bytes * _ROOM:
            self.fails = self.slow = None

    def take_back(self) -> bool:
        """Take the last growth back if it made steps slower; whether it did."""
        if not self._seconds:
            return False
        rate = self.rates[self.size] = self._samples / self._seconds
        before = self.rates.get(self._smaller) if self._smaller is not None else None
        self._samples, self._seconds = 0, 0.0
        if before is None or rate >= before * _LOSS:
            self._smaller = None
            return False
        self.slow = self.size
        self.change(self._smaller or self.size)
        return True

    def grow(self, batch: int, memory_bytes: float) -> bool:
        """Try fewer pieces of a batch after clean steps.

        Args:
            batch: Samples of a batch.
            memory_bytes: What the predicted peak may reach.

        Returns:
            Whether the size changed.
        """
        pieces = -(-batch // self.size)
        top = self.largest_within(batch, memory_bytes)
        if pieces == 1 or top <= self.size:
            return False
        fewer = min(pieces - 1, -(-batch // self._aim(top)))
        if fewer < -(-batch // top):
            return False
        self.change(-(-batch // fewer))
        return True

    def enlarge(self, memory_bytes: float) -> bool:
        """Try a larger batch, where any size is possible; otherwise like `grow`."""
        top = self.largest_within(2 * self.size, memory_bytes)
        if top <= self.size * (1 + _UNUSED) and not (self.size < top == self.max_size):
            return False
        self.change(self._aim(top))
        return True

    def recede(self, size: int, memory_bytes: float) -> None:
        """Use less than a size because memory is scarce, which may pass: what is predicted to do, at least half."""
        top = self.largest_within(size, memory_bytes)
        self.change(max(self.min_size, -(-size // 2), top if top < size else 0))

    def to_plain(self) -> dict[str, Any]:
        """The search as plain values, for a checkpoint."""
        return {
            item.name: {str(key): value for key, value in found.items()}
            if isinstance(found, dict)
            else found
            for item in fields(self)
            if not item.name.startswith("_")
            for found in (getattr(self, item.name),)
        }

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "SizeSearch":
        """A search that goes on where another stood.

        Raises:
            ValueError: These are not the values of one.
        """
        known = {item.name for item in fields(cls) if not item.name.startswith("_")}
        if values.keys() != known:
            raise ValueError(
                f"a search of batch sizes has {', '.join(sorted(known))}, not {', '.join(map(str, values))}"
            )
        peaks = {
            int(size): (int(fixed), int(peak)) for size, (fixed, peak) in values["peaks"].items()
        }
        rates = {int(size): float(rate) for size, rate in values["rates"].items()}
        for name in known - {"peaks", "rates"}:
            if not (
                (type(values[name]) is int and values[name] >= 0)
                or (values[name] is None and name in _OPTIONAL)
            ):
                raise ValueError(f"{name} of a search of batch sizes is {values[name]!r}")
        return cls(**{**values, "peaks": peaks, "rates": rates})

    def largest_within(self, batch: int, memory_bytes: float) -> int:
        """Largest size that neither failed, nor was slow, nor is predicted to need too much."""
        tops = [batch, self.max_size or batch]
        tops += [size - 1 for size in (self.fails, self.slow) if size is not None]
        if self.peaks:
            fixed, slope = self._fit()
            tops += [int((memory_bytes - fixed) / slope)] if slope > 0 else []
        return min(tops)

    def _aim(self, top: int) -> int:
        """Half way to what failed or was slow, or twice the size."""
        blocked = [size - 1 for size in (self.fails, self.slow) if size is not None]
        return (self.size + top + 1) // 2 if top in blocked else min(2 * self.size, top)

    def _fit(self) -> tuple[float, float]:
        """The peak as a fixed part and one for each sample, in bytes.

        It is that of what a step needs beside what is there before it: that may change, as
        optimizers get states.
        """
        small, large = min(self.peaks), max(self.peaks)
        needs = {size: self.peaks[size][1] - self.peaks[size][0] for size in (small, large)}
        if small == large:
            return self.fixed_bytes, max(0.0, needs[large] / large)
        slope = max(0.0, (needs[large] - needs[small]) / (large - small))
        return self.fixed_bytes + needs[large] - slope * large, slope
