"""What runs in a worker process, and the board on which it and the main process see each other."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lit_data.io.store.shared_arrays import Handle, SharedMemory, attach
from lit_data.loading.layout import Layout
from lit_data.loading.tasks import Failure, Texts, check_crossing, write
from lit_data.loading.workers import THREADS_VARIABLE
from lit_data.types import Array, RowWriter

Message = tuple[int, int, Handle, int, int, int, int, int]
"""Slot, oldest slot that exists, its memory, its samples, first row, end, epoch, plan: what a task is to a worker."""

CLOSING, PLAN = 0, 1
"""Columns of the main process's line: the workers shall end; tasks of older plans are not wanted any more."""
PID, SLOT, FIRST, STOP = range(4)
"""Columns of a worker's line: its process, and the slot and rows that it writes; slot -1 while it waits."""


class Board:
    """A few numbers that all processes see: line 0 is written by the main process, line i + 1 by worker i.

    It is also the event by which torch tells its workers to end. torch's own has a lock, which a worker that is killed
    may have taken, and then the main process hangs (see the notes in torch's ``_shutdown_workers``).

    Args:
        workers: How many workers.
    """

    def __init__(self, workers: int) -> None:
        self._memory = SharedMemory((workers + 1) * 4 * 8)
        self.lines = _view_board(self._memory.map)

    def __getstate__(self) -> Handle:
        return self._memory.handle

    def __setstate__(self, handle: Handle) -> None:
        self.lines = _view_board(attach(handle, writable=True))

    def set(self) -> None:
        """Tell the workers to end."""
        self.lines[0, PLAN] = np.iinfo(np.int64).max
        self.lines[0, CLOSING] = 1

    def is_set(self) -> bool:
        """Whether the workers shall end."""
        return bool(self.lines[0, CLOSING])


class RowReader:
    """What torch's workers call: a dataset whose `index` is a message."""

    def __init__(self, dataset: RowWriter, layout: Layout, board: Board) -> None:
        self.dataset, self.layout, self.board = dataset, layout, board
        self._slots: dict[int, dict[str, Array]] = {}

    def __getitem__(self, message: Message) -> Texts | Failure:
        serial, oldest, handle, samples, first, stop, epoch, plan = message
        worker, lines = get_worker_info(), self.board.lines
        line = lines[worker.id + 1 if worker else 1]
        if plan < lines[0, PLAN]:
            return None  # nobody wants it any more, and the slot may be gone
        line[:] = os.getpid(), serial, first, stop
        self._slots = {number: arrays for number, arrays in self._slots.items() if number >= oldest}
        if serial not in self._slots:
            memory = np.frombuffer(attach(handle, writable=True), np.uint8)
            self._slots[serial] = self.layout.arrays(memory, samples)
        answer = write(self.dataset, self._slots[serial], first, stop, epoch)
        line[SLOT] = -1
        return check_crossing(answer) or None

    def start(self, worker: int) -> None:
        """Set up this process as a worker: one thread, and deaf to signals that are meant for the main process."""
        lines = self.board.lines
        lines[worker + 1] = os.getpid(), -1, 0, 0
        faulthandler.disable()  # the main process says how a worker ended
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if lines[0, CLOSING] else None)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        torch.set_num_threads(1)
        if THREADS_VARIABLE not in os.environ:
            os.environ[THREADS_VARIABLE] = "1"  # for an OpenCV that is imported later
            if "cv2" in sys.modules:
                sys.modules["cv2"].setNumThreads(0)


def _end_with_parent() -> None:
    """Kill this process once its parent is gone: torch looks for that only between tasks, which may hang.

    Nor does torch see it under a fork server, which lives as long as its workers do.
    """
    parent, number = multiprocessing.parent_process(), os.getppid()
    while parent and parent.is_alive() and os.getppid() == number:
        parent.join(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _view_board(memory: Any) -> Array:  # noqa: ANN401 - an mmap
    return np.frombuffer(memory, np.int64).reshape(-1, 4)
