"""Code of a worker process, and the board on which it and the main process see each other."""

import faulthandler
import os
import random
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from lit_data.child_process import watch_parent
from lit_data.io.store.shared_arrays import Handle, SharedMemory, attach
from lit_data.loading.staging import Layout
from lit_data.loading.tasks import Failure, Texts, check_crossing, write
from lit_data.loading.workers import THREADS_VARIABLE
from lit_data.types import Array, RowWriter

Message = tuple[int, int, int, Handle, int, int, int, int, int]
"""Numbers of a task, its slot and the oldest slot that exists; memory and samples of the slot;
first row, end, epoch, plan."""

_SEED: Final = 0
"""Seed of the global generators in the first worker, from which a dataset may draw."""
CLOSING, PLAN = 0, 1
"""Columns of the main process's line: 1 if workers end; tasks of plans below this are void."""
PID, SLOT, FIRST, STOP = range(4)
"""Columns of a worker's line: process, slot and rows that it writes; slot -1 while it waits."""


class Board:
    """A few numbers that all processes see.

    Line 0 is written by the main process, line i + 1 by worker i.

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
        """Let the workers end."""
        self.lines[0, PLAN] = np.iinfo(np.int64).max
        self.lines[0, CLOSING] = 1


class RowReader:
    """Writer of the rows that a message names.

    Args:
        dataset: Writes the samples.
        layout: Layout of a slot.
        board: The worker's line of it says which rows are being written.
    """

    def __init__(self, dataset: RowWriter, layout: Layout, board: Board) -> None:
        self.dataset = dataset
        self.layout = layout
        self.board = board
        self._slots: dict[int, dict[str, Array]] = {}

    def read(self, message: Message, worker: int) -> Texts | Failure:
        """Write the rows of a message; return what does not fit into rows, or the failure."""
        _, serial, oldest, handle, samples, first, stop, epoch, plan = message
        lines = self.board.lines
        line = lines[worker + 1]
        if plan < lines[0, PLAN]:
            return None  # the plan was given up, and the slot may be gone
        line[:] = os.getpid(), serial, first, stop
        self._slots = {number: arrays for number, arrays in self._slots.items() if number >= oldest}
        if serial not in self._slots:
            memory = np.frombuffer(attach(handle, writable=True), np.uint8)
            self._slots[serial] = self.layout.arrays(memory, samples)
        answer = write(self.dataset, self._slots[serial], first, stop, epoch)
        line[SLOT] = -1
        return check_crossing(answer) or None


def serve(reader: RowReader, worker: int, workers: int, pipe: Connection) -> None:
    """Be a worker: answer each message with its number and the result.

    Args:
        reader: Writes the rows.
        worker: Number of this worker.
        workers: Number of all workers.
        pipe: To the main process.
    """
    _set_up(reader, worker, workers)
    pipe.send(None)  # this process listens
    while True:
        message: Message = pipe.recv()
        pipe.send((message[0], reader.read(message, worker)))


def _set_up(reader: RowReader, worker: int, workers: int) -> None:
    """Set one thread and seeds, and ignore signals that are meant for the main process."""
    lines = reader.board.lines
    lines[worker + 1] = os.getpid(), -1, 0, 0
    faulthandler.disable()  # the main process says how a worker ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_if_closing(*_: object) -> None:
        if lines[0, CLOSING]:
            os._exit(0)

    signal.signal(signal.SIGTERM, end_if_closing)
    watch_parent()
    torch.set_num_threads(1)
    seed = _SEED + worker
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generators that somebody's dataset may draw from
    torch.manual_seed(seed)
    dataset: Any = reader.dataset
    # `torch.utils.data.get_worker_info` looks here; nothing public sets it.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker, num_workers=workers, seed=seed, dataset=dataset
    )
    if THREADS_VARIABLE not in os.environ:
        os.environ[THREADS_VARIABLE] = "1"  # for an OpenCV that is imported later
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)


def _view_board(memory: Any) -> Array:  # noqa: ANN401 - an mmap
    return np.frombuffer(memory, np.int64).reshape(-1, 4)
