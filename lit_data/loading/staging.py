"""The staging ring: pieces of memory, laid out for a batch each, written, handed out as tensors, and used again."""

import logging
import math
import mmap
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final, cast

import numpy as np
import torch

from lit_data.errors import ConfigError, DataError
from lit_data.io.store.shared_arrays import Handle, SharedMemory
from lit_data.loading.machine import available_memory_bytes
from lit_data.types import COUNT_SUFFIX, Array, Batch, FieldSpec, row_shapes

INDICES: Final = "\0indices"
"""Name of the row of sample numbers that stands before the fields and tells a worker what to write."""

_ALIGNMENT_BYTES: Final = 64


class Layout:
    """Fields one after the other, each contiguous over the samples, ragged fields with room for the
    most items.

    Args:
        fields: Every key of a sample.
    """

    def __init__(self, fields: Mapping[str, FieldSpec]) -> None:
        self.fields = dict(fields)
        self._parts = {INDICES: ((), np.dtype(np.int64)), **row_shapes(fields)}

    def count_bytes(self, samples: int) -> int:
        """Bytes that so many samples need."""
        return sum(self._part_bytes(shape, dtype, samples) for shape, dtype in self._parts.values())

    def arrays(self, memory: Array, samples: int) -> dict[str, Array]:
        """The fields of `samples` samples as views of the memory, the sample numbers under
        `INDICES`.

        Args:
            memory: [bytes] uint8, at least `count_bytes(samples)` long.
            samples: First dimension of each view.
        """
        arrays: dict[str, Array] = {}
        offset = 0
        for name, (shape, dtype) in self._parts.items():
            arrays[name] = np.ndarray((samples, *shape), dtype, memory, offset)
            offset += self._part_bytes(shape, dtype, samples)
        return arrays

    def flatten_ragged(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """The ragged fields of a written batch, flat, without the room that is left: N items of all
        samples each.

        Returns:
            Each field, and under ``NAME_count`` [B] int64 the items of each sample.

        Raises:
            DataError: A sample says that it has more items than there is room for.
        """
        found: dict[str, torch.Tensor] = {}
        for name, field in self.fields.items():
            if field.max_items is not None:
                counts = arrays[name + COUNT_SUFFIX]
                found[name] = _flatten(name, field, arrays[name], counts)
                found[name + COUNT_SUFFIX] = torch.from_numpy(counts.copy())
        return found

    @staticmethod
    def _part_bytes(shape: tuple[int, ...], dtype: "np.dtype[np.generic]", samples: int) -> int:
        return (
            -(-samples * math.prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        )


def _flatten(name: str, field: FieldSpec, rows: Array, counts: Array) -> torch.Tensor:
    worst = int(counts.argmax())
    if counts[worst] > rows.shape[1]:
        raise DataError(
            f"{name!r} of a sample has {counts[worst]} items and there is room for {rows.shape[1]}: raise the "
            "dataset's most items per sample"
        )
    flat = np.concatenate([row[:count] for row, count in zip(rows, counts.tolist(), strict=True)])
    if field.row_column:
        flat[:, 0] = np.repeat(np.arange(len(counts)), counts)
    return torch.from_numpy(flat)


log = logging.getLogger(__name__)


_HANDED_OUT: Final = 3
"""Batches a consumer may hold while the ring still lends its memory: one in use, one prefetched, one in transfer."""

_serials = count()


class Slot:
    """Memory of one batch.

    Attributes:
        serial: Its number in this process; never used twice.
        samples: Room.
        oldest: The lowest serial in its ring when it was taken: workers may forget slots below.
        handle: Where worker processes find it; none if it is private.
        arrays: Views of all fields, and of the sample numbers.
    """

    def __init__(
        self, layout: Layout, samples: int, *, shared: bool, pinned: torch.device | None
    ) -> None:
        self.serial = self.oldest = next(_serials)
        self.samples = samples
        nbytes = layout.count_bytes(samples)
        self._shared = SharedMemory(nbytes) if shared else None
        self.handle: Handle | None = self._shared.handle if self._shared else None
        # The exporter is no ndarray, so that views keep the array they were made from alive and not
        # this one.
        self._exporter = (
            self._shared.map if self._shared else _allocate(nbytes, pinned=pinned is not None)
        )
        if pinned is not None:
            _pin(self, self.view(), pinned)
        self.arrays = layout.arrays(self.view(), samples)

    def view(self) -> Array:
        """The memory as a new array: [bytes] uint8. Arrays made from it keep it alive."""
        return np.frombuffer(self._exporter, np.uint8)


class Staging:
    """Lends the memory of batches, and takes it back when the last tensor that shows it is gone.

    A batch that is still referenced is never written again. Whoever keeps more than a few gets
    copies, so that the ring stays small. Where copies to a GPU may be under way, memory is used
    again only after an event that was recorded on the stream when the last reference went.

    Args:
        layout: The fields.
        shared: Worker processes write.
        pinned: Page-lock the memory, once, for copies to this GPU that do not block.
    """

    def __init__(self, layout: Layout, *, shared: bool, pinned: torch.device | None) -> None:
        self.layout, self.shared, self.pinned = layout, shared, pinned
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._free: list[Slot] = []
        self._returned: deque[tuple[Slot, Any]] = (
            deque()
        )  # appended to by finalizers, in any thread
        self._lent = 0

    def take(self, samples: int) -> Slot:
        """A slot with room for so many samples; smaller ones that are free are let go."""
        self._collect()
        self._free = [slot for slot in self._free if slot.samples >= samples]
        slot = (
            self._free.pop()
            if self._free
            else Slot(self.layout, samples, shared=self.shared, pinned=self.pinned)
        )
        self._slots.add(slot)
        slot.oldest = min(other.serial for other in self._slots)
        return slot

    def lend(self, slot: Slot, samples: int) -> Batch:
        """The first samples of a written slot as tensors without a copy; ragged fields flat.

        Returns:
            One tensor for each field, and the number of items of each sample for ragged ones.
        """
        self._collect()
        root = slot.view()
        arrays = self.layout.arrays(root, slot.samples)
        kept = self._lent >= _HANDED_OUT
        ragged = self.layout.flatten_ragged(
            {name: array[:samples] for name, array in arrays.items()}
        )
        fixed = {name: arrays[name][:samples] for name in self.layout.fields if name not in ragged}
        if kept:
            fixed = {name: array.copy() for name, array in fixed.items()}
            self._free.append(slot)
        else:
            self._lent += 1
            weakref.finalize(root, _give_back, self._returned, slot, self.pinned).atexit = False
        return {name: torch.from_numpy(array) for name, array in fixed.items()} | ragged

    def _collect(self) -> None:
        for _ in range(len(self._returned)):
            slot, event = self._returned.popleft()
            if event is None or event.query():
                self._lent -= 1
                self._free.append(slot)
            else:
                self._returned.append((slot, event))


def check_room(layout: Layout, samples: int, slots: int) -> None:
    """Refuse a ring that cannot fit, before it is written and the kernel ends the run.

    Args:
        layout: The fields.
        samples: Batch size.
        slots: Batches of the ring.

    Raises:
        ConfigError: It needs more than the memory that is available.
    """
    needed, free = slots * layout.count_bytes(samples), available_memory_bytes()
    if needed > free:
        raise ConfigError(
            f"staging {slots} batches of {samples} samples needs {needed / 2**20:.0f} MiB and {free / 2**20:.0f} MiB "
            "of memory are available: lower data.loader.batch_size or data.loader.prefetch_batches"
        )


def _give_back(returned: deque[tuple[Slot, Any]], slot: Slot, pinned: torch.device | None) -> None:
    event = None
    if pinned is not None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(
            torch.cuda.current_stream(pinned)
        )  # of that device, whichever is current in this thread
    returned.append((slot, event))


def _allocate(nbytes: int, *, pinned: bool) -> Any:  # noqa: ANN401 - an exporter of its bytes
    """Pages of its own for what is page-locked: of the heap, two slots would share one, which is locked only once."""
    return mmap.mmap(-1, nbytes) if pinned else memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]


def _pin(slot: Slot, memory: Array, device: torch.device) -> None:
    """Page-lock the memory of a slot for its life; where that fails, copies to the GPU are just slower."""
    address, runtime = memory.ctypes.data, cast(Any, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        log.warning(
            "%d bytes of staging cannot be page-locked (CUDA error %d)", memory.nbytes, error
        )
        with suppress(
            RuntimeError
        ):  # the runtime keeps an error until the next kernel, which would be blamed for it
            torch.ones(1, device=device).add_(1)
        return
    weakref.finalize(slot, runtime.cudaHostUnregister, address).atexit = False
