"""The batch that a step has in hand: whole, or still on the host to be moved piece by piece."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lit_data.callbacks.adaptive.pieces import Slicer, spread
from lit_data.callbacks.adaptive.search import SizeSearch
from lit_data.callbacks.adaptive.snapshot import Restore


@dataclass(slots=True)
class Hand:
    """One batch between its arrival and the end of its step.

    Attributes:
        host: The batch before its transfer.
        samples: Of it.
        index: Number of the batch.
        search: The sizes for its stage and shapes.
        move: Transfers a batch or a piece to the device, augmentation included.
        cut: Cuts a piece out of the batch.
        restore_random: Undoes the transfer of the whole batch: random generators, plain attributes of the module.
        started_s: When the transfer began.
        fixed_bytes: What was allocated then, if this step is measured.
        whole: The batch on the device, if it was moved as a whole.
        largest: Samples of the largest piece of the attempt that went through.
        pieces: Pieces of that attempt.
    """

    host: Any
    samples: int
    index: int
    search: SizeSearch
    move: Callable[[Any], Any]
    cut: Slicer
    restore_random: Restore | None
    started_s: float
    fixed_bytes: int | None = None
    whole: Any = None
    largest: int = 0
    pieces: int = 0

    @property
    def size(self) -> int:
        """Samples of the largest piece, as the search has it now."""
        if self.samples <= self.search.size:
            return self.samples
        return spread(self.samples, self.search.size)[0][1]

    def parts(self) -> Iterator[tuple[Any, int]]:
        """The pieces on the device, one at a time, and how many samples each has."""
        pieces = spread(self.samples, self.search.size)
        self.largest, self.pieces = pieces[0][1], len(pieces)
        for start, stop in pieces:
            yield self.part(start, stop), stop - start

    def part(self, start: int, stop: int) -> Any:  # noqa: ANN401 - a batch
        """Some samples on the device."""
        if (start, stop) != (0, self.samples):
            return self.move(self.cut(self.host, start, stop))
        return self.move(self.host) if self.whole is None else self.whole
