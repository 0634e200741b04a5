"""What runs in a worker process, and the board on which it and the main process see each other."""

import os
import signal
import sys
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lit_data.io.shared import Handle, SharedMemory, attach
from lit_data.loading.layout import Layout
from lit_data.loading.tasks import Failure, Texts, write
from lit_data.types import Array, RowWriter

Message = tuple[int, int, Handle, int, int, int, int, int]
"""Slot, oldest slot that exists, its memory, its samples, first row, end, epoch, plan: what a task is to a worker."""

CLOSING, PLAN = 0, 1
"""Columns of the main process's line: the workers shall end; tasks of older plans are not wanted any more."""
PID, SLOT, FIRST, STOP = range(4)
"""Columns of a worker's line: its process, and the slot and rows that it writes; slot -1 while it waits."""

_THREADS_VARIABLE: Final = "OPENCV_FOR_THREADS_NUM"


class Board:
    """A few numbers that all processes see: line 0 is written by the main process, line i + 1 by worker i.

    Args:
        workers: How many workers.
    """

    def __init__(self, workers: int) -> None:
        self._memory = SharedMemory((workers + 1) * 4 * 8)
        self.handle = self._memory.handle
        self.lines = _view_board(self._memory.map)


class RowReader:
    """What torch's workers call: a dataset whose `index` is a message."""

    def __init__(self, dataset: RowWriter, layout: Layout, board: Handle) -> None:
        self.dataset, self.layout, self.board = dataset, layout, board
        self._lines: Array | None = None
        self._slots: dict[int, dict[str, Array]] = {}

    def __getitem__(self, message: Message) -> Texts | Failure:
        serial, oldest, handle, samples, first, stop, epoch, plan = message
        if self._lines is None:
            self._lines = _view_board(attach(self.board, writable=True))
        worker = get_worker_info()
        line = self._lines[worker.id + 1 if worker else 1]
        if plan < self._lines[0, PLAN]:
            return None  # nobody wants it any more, and the slot may be gone
        line[:] = os.getpid(), serial, first, stop
        self._slots = {number: arrays for number, arrays in self._slots.items() if number >= oldest}
        if serial not in self._slots:
            memory = np.frombuffer(attach(handle, writable=True), np.uint8)
            self._slots[serial] = self.layout.arrays(memory, samples)
        answer = write(self.dataset, self._slots[serial], first, stop, epoch)
        line[SLOT] = -1
        return answer.packed() if isinstance(answer, Failure) else answer or None

    def start(self, worker: int) -> None:
        """Set up this process as a worker: one thread, and deaf to signals that are meant for the main process."""
        lines = self._lines = _view_board(attach(self.board, writable=True))
        lines[worker + 1] = os.getpid(), -1, 0, 0
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if lines[0, CLOSING] else None)
        torch.set_num_threads(1)
        if _THREADS_VARIABLE not in os.environ:
            os.environ[_THREADS_VARIABLE] = "1"  # for an OpenCV that is imported later
            if "cv2" in sys.modules:
                sys.modules["cv2"].setNumThreads(0)


def _view_board(memory: Any) -> Array:  # noqa: ANN401 - an mmap
    return np.frombuffer(memory, np.int64).reshape(-1, 4)
