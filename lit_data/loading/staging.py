"""Staging ring: memory of a few batches that is written, returned as tensors, and reused."""

import logging
import math
import mmap
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any, cast

import numpy as np
import torch

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.machine import available_memory_bytes
from lit_data.core.shared_arrays import Handle, SharedMemory
from lit_data.core.types import COUNT_SUFFIX, Array, Batch, FieldSpec, row_shapes
from lit_inspect.counts import counted

INDICES = "\0indices"
"""Name of the sample numbers, which are before the fields and tell a worker which samples to write."""

_ALIGNMENT_BYTES = 64

log = logging.getLogger(__name__)

_HANDED_OUT = 3
"""Batches of the ring that a consumer may hold: one in use, one prefetched, one in transfer."""

_serials = count()


class Layout:
    """Memory layout of a batch: the fields in sequence, each contiguous over the samples.

    Ragged fields have room for the largest number of items.

    Args:
        fields: Shape and dtype of each key of a sample.
    """

    def __init__(self, fields: Mapping[str, FieldSpec]) -> None:
        self.fields = dict(fields)
        self._parts = {INDICES: ((), np.dtype(np.int64)), **row_shapes(fields)}

    def count_bytes(self, samples: int) -> int:
        """Return the number of bytes for `samples` samples."""
        return sum(self._part_bytes(shape, dtype, samples) for shape, dtype in self._parts.values())

    def arrays(self, memory: Array, samples: int) -> dict[str, Array]:
        """Return the fields as views of the memory, and the sample numbers under `INDICES`.

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
        """Return the ragged fields of a written batch flat, without unused room.

        Returns:
            Each field with the N items of all samples, and ``NAME_count`` [B] int64 with the number
                of items of each sample.

        Raises:
            DataError: A sample has more items than there is room for.
        """
        flat: dict[str, torch.Tensor] = {}
        for name, field in self.fields.items():
            if field.max_items is None:
                continue
            counts = arrays[name + COUNT_SUFFIX]
            flat[name] = _flatten(name, field, arrays[name], counts)
            flat[name + COUNT_SUFFIX] = torch.from_numpy(counts.copy())
        return flat

    @staticmethod
    def _part_bytes(shape: tuple[int, ...], dtype: "np.dtype[np.generic]", samples: int) -> int:
        nbytes = samples * math.prod(shape) * dtype.itemsize
        return math.ceil(nbytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _flatten(name: str, field: FieldSpec, rows: Array, counts: Array) -> torch.Tensor:
    most_items = int(counts.max())
    if most_items > rows.shape[1]:
        raise DataError(
            f"{name!r} of a sample has {most_items} items, and a batch has room for "
            f"{rows.shape[1]}: raise the dataset's most items per sample"
        )
    flat = np.concatenate([row[:count] for row, count in zip(rows, counts.tolist(), strict=True)])
    if field.row_column:
        flat[:, 0] = np.repeat(np.arange(len(counts)), counts)
    return torch.from_numpy(flat)


class Slot:
    """Memory of one batch.

    Attributes:
        serial: Number of the slot in this process; never used twice.
        samples: Number of samples that it has room for.
        oldest: Lowest serial in its ring when it was taken; workers may discard slots below it.
        handle: Handle by which worker processes open the memory; None if it is private.
        arrays: Views of all fields and of the sample numbers.
    """

    def __init__(
        self, layout: Layout, samples: int, *, shared: bool, pinned: torch.device | None
    ) -> None:
        self.serial = self.oldest = next(_serials)
        self.samples = samples
        nbytes = layout.count_bytes(samples)
        # The exporter is not an ndarray, so that views keep the array alive from which they were
        # made, not this one.
        self.handle: Handle | None = None
        if shared:
            self._shared = SharedMemory(nbytes)  # the memory is freed with it
            self.handle = self._shared.handle
            self._exporter = self._shared.map
        else:
            self._exporter = _allocate(nbytes, pinned=pinned is not None)
        if pinned is not None:
            _pin(self, self.view(), pinned)
        self.arrays = layout.arrays(self.view(), samples)

    def view(self) -> Array:
        """Return the memory as a new array: [bytes] uint8. Arrays made from it keep it alive."""
        return np.frombuffer(self._exporter, np.uint8)


class Staging:
    """Memory of batches, which is free again when the last tensor that uses it is deleted.

    A batch that is still referenced is never overwritten. A consumer that keeps more than a few
    batches gets copies, so that the ring stays small. If copies to a GPU may be in progress, memory
    is reused only after an event that is recorded on the stream when the last reference is deleted.

    Args:
        layout: The fields.
        shared: Worker processes write into the memory.
        pinned: Page-lock the memory, once, for copies to this GPU that do not block.
    """

    def __init__(self, layout: Layout, *, shared: bool, pinned: torch.device | None) -> None:
        self.layout, self.shared, self.pinned = layout, shared, pinned
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._free: list[Slot] = []
        # Finalizers append to it, in any thread.
        self._returned: deque[tuple[Slot, Any]] = deque()
        self._lent = 0

    def take(self, samples: int) -> Slot:
        """Return a slot with room for `samples` samples; free slots that are smaller are deleted."""
        self._collect()
        self._free = [slot for slot in self._free if slot.samples >= samples]
        if self._free:
            slot = self._free.pop()
        else:
            slot = Slot(self.layout, samples, shared=self.shared, pinned=self.pinned)
        self._slots.add(slot)
        slot.oldest = min(other.serial for other in self._slots)
        return slot

    def lend(self, slot: Slot, samples: int) -> Batch:
        """Return the first samples of a written slot as tensors without a copy; ragged fields are flat.

        Returns:
            One tensor for each field, and the number of items of each sample for ragged ones.
        """
        self._collect()
        root = slot.view()
        arrays = self.layout.arrays(root, slot.samples)
        arrays = {name: array[:samples] for name, array in arrays.items()}
        ragged = self.layout.flatten_ragged(arrays)
        fixed = {name: arrays[name] for name in self.layout.fields if name not in ragged}
        if self._lent >= _HANDED_OUT:
            # The consumer keeps batches, so it gets copies.
            fixed = {name: array.copy() for name, array in fixed.items()}
            self._free.append(slot)
        else:
            self._lent += 1
            weakref.finalize(root, _give_back, self._returned, slot, self.pinned).atexit = False
        return {name: torch.from_numpy(array) for name, array in fixed.items()} | ragged

    def _collect(self) -> None:
        """Free the returned slots whose copies to the GPU have ended."""
        for _ in range(len(self._returned)):
            slot, event = self._returned.popleft()
            if event is None or event.query():
                self._lent -= 1
                self._free.append(slot)
            else:
                self._returned.append((slot, event))


def check_room(layout: Layout, samples: int, slots: int) -> None:
    """Refuse a ring that does not fit into memory, before the kernel ends the run.

    Args:
        layout: The fields.
        samples: Batch size.
        slots: Number of batches in the ring.

    Raises:
        ConfigError: The ring needs more memory than is available.
    """
    needed_bytes = slots * layout.count_bytes(samples)
    free_bytes = available_memory_bytes()
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"staging {slots} batches of {counted(samples, 'sample')} needs "
            f"{needed_bytes / 2**20:.0f} MiB and {free_bytes / 2**20:.0f} MiB of memory are available: lower "
            "data.loader.batch_size or data.loader.prefetch_batches"
        )


def _give_back(returned: deque[tuple[Slot, Any]], slot: Slot, pinned: torch.device | None) -> None:
    event = None
    if pinned is not None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # On the stream of that device, whatever this thread's current device is.
        event.record(torch.cuda.current_stream(pinned))
    returned.append((slot, event))


def _allocate(nbytes: int, *, pinned: bool) -> Any:  # noqa: ANN401 - an exporter of its bytes
    # Page-locked memory has pages of its own: on the heap two slots could share a page, which can be
    # locked only once.
    return mmap.mmap(-1, nbytes) if pinned else memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]


def _pin(slot: Slot, memory: Array, device: torch.device) -> None:
    """Page-lock the memory of a slot while it exists; if that fails, copies are only slower."""
    address = memory.ctypes.data
    runtime = cast(Any, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        log.warning(
            "%d bytes of staging cannot be page-locked (CUDA error %d)", memory.nbytes, error
        )
        # The runtime keeps the error until the next kernel, which would report it.
        with suppress(RuntimeError):
            torch.ones(1, device=device).add_(1)
        return
    weakref.finalize(slot, runtime.cudaHostUnregister, address).atexit = False
