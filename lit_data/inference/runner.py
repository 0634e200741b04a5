"""Batches go through the net, in smaller pieces where memory runs out; every tile comes back once and in order."""

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.filesize import decimal
from torch import Tensor

from lit_data.errors import BatchMemoryError
from lit_data.inference.batch_size import BatchRange, BatchSize
from lit_data.inference.batches import Job, Kind, TileBatch
from lit_data.inference.forward import Forward
from lit_data.inference.memory import count_weight_bytes, measure_peak_bytes
from lit_data.out_of_memory import is_out_of_memory

T = TypeVar("T")

_ADVICE: Final = "use a smaller tile_px or model, precision=bf16, or free the device of other programs"


@dataclass(frozen=True, slots=True)
class Flight:
    """Values on their way back from the device."""

    values: Tensor
    jobs: Sequence[Job]
    arrived: torch.cuda.Event | None

    def land(self) -> None:
        """Wait for them and put them into their images."""
        if self.arrived is not None:
            self.arrived.synchronize()
        for job, values in zip(self.jobs, self.values, strict=True):
            job.stitcher.add(values)


class BatchSizes:
    """The batch size of each kind of tile; it outlives a call of the predictor.

    Args:
        forward: The net.
        limits: What the sizes may be.
        memory_limit_bytes: What weights and one batch may take; None leaves it to the device.
    """

    def __init__(self, forward: Forward, limits: BatchRange, memory_limit_bytes: int | None) -> None:
        self._forward, self._limits, self._memory_limit_bytes = forward, limits, memory_limit_bytes
        self._sizes: dict[Kind, BatchSize] = {}

    def of(self, kind: Kind) -> BatchSize:
        """The size of one kind.

        Raises:
            BatchMemoryError: The memory limit does not hold the smallest batch.
        """
        if kind not in self._sizes:
            most = None if self._memory_limit_bytes is None else self._count_fitting(kind, self._memory_limit_bytes)
            self._sizes[kind] = BatchSize(self._limits, most)
        return self._sizes[kind]

    def _count_fitting(self, kind: Kind, limit_bytes: int) -> int:
        tile_bytes = self._measure_tile(kind)
        weight_bytes = count_weight_bytes(self._forward.model)
        most = (limit_bytes - weight_bytes) // tile_bytes
        if most < self._limits.smallest:
            raise BatchMemoryError(
                f"memory_limit_bytes={limit_bytes} ({decimal(limit_bytes)}) does not hold "
                f"{self._limits.smallest} tiles of {kind}: the model takes {decimal(weight_bytes)}, "
                f"each tile {decimal(tile_bytes)}; {_ADVICE}"
            )
        return most

    def _measure_tile(self, kind: Kind) -> int:
        tile = torch.from_numpy(np.zeros((1, *kind.shape), kind.dtype))

        def measure() -> int:
            return measure_peak_bytes(lambda: self._forward.call_plain(tile))

        return max(1, try_twice(measure, f"a single tile of {kind}", self._forward.device))


class Runner:
    """Sends batches to the device.

    On a GPU the values of a batch are put into their images while the next one is computed.

    Args:
        forward: The net.
        sizes: How many tiles at once.
        on_tiles: Called with the number of tiles that came back.
    """

    def __init__(self, forward: Forward, sizes: BatchSizes, on_tiles: Callable[[int], None]) -> None:
        self._forward, self._sizes, self._on_tiles = forward, sizes, on_tiles
        self._flights: deque[Flight] = deque()
        self._depth = 1 if forward.device.type == "cuda" else 0

    def run(self, batch: TileBatch) -> None:
        """Predict the tiles of a batch; those of the last piece may still be on their way back.

        Raises:
            BatchMemoryError: The smallest batch does not fit.
        """
        size, start, again = self._sizes.of(batch.kind), 0, False
        while start < len(batch.jobs):
            stop = min(start + size.size, len(batch.jobs))
            flight, failure = self._attempt(batch, start, stop, size.size)
            if flight is None:
                self.land()  # their memory is free then
                _release_memory(self._forward.device)
                smallest = not size.fail(stop - start)
                if smallest and again:
                    raise BatchMemoryError(
                        f"a batch of {stop - start} tiles of {batch.kind} does not fit into memory ({failure}): "
                        f"{_ADVICE}"
                    )
                again = smallest  # a second chance, with what was released
                continue
            again = False
            size.succeed(stop - start)
            self._flights.append(flight)
            self.land(self._depth)
            start = stop

    def land(self, leave: int = 0) -> None:
        """Put what is on its way back into its images, but for the last so many batches."""
        while len(self._flights) > leave:
            flight = self._flights.popleft()
            flight.land()
            self._on_tiles(len(flight.jobs))

    def _attempt(self, batch: TileBatch, start: int, stop: int, size: int) -> tuple[Flight | None, str]:
        """Predict some tiles; what was out of memory is text by the end, as an error would keep its tensors alive."""
        try:
            tiles = batch.tiles[start:stop]
            if self._forward.options.compile and len(tiles) < size:
                tiles = _fill_up(tiles, size)  # another length would be compiled again
            values = self._forward(torch.from_numpy(tiles))[: stop - start]
            return _send_back(values, batch.jobs[start:stop]), ""
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None, str(error).partition("\n")[0]


def try_twice(call: Callable[[], T], what: str, device: torch.device) -> T:
    """The result of a call for which a single tile must fit.

    Raises:
        BatchMemoryError: Memory ran out, and again after all that could be was released.
    """
    failure = ""
    for _ in range(2):
        try:
            return call()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error).partition("\n")[0]
        _release_memory(device)
    raise BatchMemoryError(f"{what} does not fit into memory ({failure}): {_ADVICE}")


def _send_back(values: Tensor, jobs: Sequence[Job]) -> Flight:
    if not values.is_cuda:
        return Flight(values.cpu(), jobs, None)
    host = values.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return Flight(host, jobs, arrived)


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _fill_up(tiles: NDArray[Any], size: int) -> NDArray[Any]:
    return np.concatenate((tiles, np.zeros((size - len(tiles), *tiles.shape[1:]), tiles.dtype)))
