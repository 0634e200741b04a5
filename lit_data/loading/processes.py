"""Worker processes and the main process's side of them: pipes carry only small messages."""

import atexit
import errno
import os
import selectors
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import numpy as np

from lit_data.core.errors import WorkerDiedError
from lit_data.core.heap import return_freed_memory
from lit_data.core.machine import count_files
from lit_data.core.shared_arrays import Handle, SharedMemory, attach
from lit_data.core.types import Array, RowWriter
from lit_data.loading.apart import describe_end, set_up_worker, start_context
from lit_data.loading.options import StartMethod
from lit_data.loading.samples import SampleWriter
from lit_data.loading.staging import INDICES, Layout
from lit_data.loading.workers import (
    Answer,
    Failure,
    RowTask,
    Texts,
    check_crossing,
    describe_samples,
    hang_text,
    log_opencv_threads,
    write,
)
from lit_inspect.counts import counted

_GRACE_S = 1.0
Message = tuple[int, int, int, Handle, int, int, int, int, int]
"""Numbers of a task, its slot and the oldest slot that exists; memory and size of the slot;
first row, end row, epoch, plan."""

CLOSING, PLAN = 0, 1
"""Columns of the main process's line: 1 if workers must end; the lowest plan that is valid."""
PID, SLOT, FIRST, STOP = range(4)
"""Columns of a worker's line: its process, and the slot and rows it writes; slot -1 if it waits."""

_FILES = 24
_FILES_PER_WORKER = 4
"""Most open files that the workers need: in common, and for each one (pipe, sentinel, memory)."""

_open: "weakref.WeakSet[ProcessWorkers]" = weakref.WeakSet()


class Board:
    """A few numbers that all processes share.

    The main process writes line 0, worker i writes line i + 1.

    Args:
        workers: Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._memory = SharedMemory((workers + 1) * 4 * 8)
        self.lines = _view_board(self._memory.map)

    def __getstate__(self) -> Handle:
        return self._memory.handle

    def __setstate__(self, handle: Handle) -> None:
        self.lines = _view_board(attach(handle, writable=True))

    def set(self) -> None:
        """Signal the workers to end."""
        self.lines[0, PLAN] = np.iinfo(np.int64).max
        self.lines[0, CLOSING] = 1


class RowReader:
    """Writer of the rows that a message requests.

    Args:
        dataset: The dataset, which writes the samples.
        layout: Layout of a slot.
        board: Its line of this worker shows which rows are being written.
        worker_init_fn: Called in each worker before its first sample.
    """

    def __init__(
        self,
        dataset: RowWriter,
        layout: Layout,
        board: Board,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.worker_init_fn = worker_init_fn
        self.dataset = dataset
        self.layout = layout
        self.board = board
        self._slots: dict[int, dict[str, Array]] = {}

    def read(self, message: Message, worker: int) -> Texts | Failure:
        """Write the rows of a message; return the values that do not fit into rows, or the failure."""
        _, serial, oldest, handle, samples, first, stop, epoch, plan = message
        lines = self.board.lines
        line = lines[worker + 1]
        if plan < lines[0, PLAN]:
            return None  # the plan was discarded, and the slot may no longer exist
        line[:] = os.getpid(), serial, first, stop
        self._slots = {number: arrays for number, arrays in self._slots.items() if number >= oldest}
        if serial not in self._slots:
            memory = np.frombuffer(attach(handle, writable=True), np.uint8)
            self._slots[serial] = self.layout.arrays(memory, samples)
        answer = write(self.dataset, self._slots[serial], first, stop, epoch)
        line[SLOT] = -1
        return check_crossing(answer) or None


def serve(reader: RowReader, worker: int, workers: int, pipe: Connection) -> None:
    """Run a worker: answer each message with its number and the result.

    Args:
        reader: Writer of the rows.
        worker: Number of this worker.
        workers: Number of all workers.
        pipe: Pipe to the main process.
    """
    _set_up(reader, worker, workers)
    if reader.worker_init_fn is not None:
        reader.worker_init_fn(worker)
    pipe.send(None)  # this process is ready
    while True:
        message: Message = pipe.recv()
        pipe.send((message[0], reader.read(message, worker)))


def _set_up(reader: RowReader, worker: int, workers: int) -> None:
    """Register this worker on the board; SIGTERM ends it only if the main process closes the workers."""
    return_freed_memory()
    lines = reader.board.lines
    lines[worker + 1] = os.getpid(), -1, 0, 0

    def end_if_closing(*_: object) -> None:
        if lines[0, CLOSING]:
            os._exit(0)

    signal.signal(signal.SIGTERM, end_if_closing)
    dataset: Any = reader.dataset
    if isinstance(dataset, SampleWriter):
        dataset = dataset.dataset  # the user's own, which a `worker_init_fn` may change
    set_up_worker(dataset, worker, workers)


def _view_board(memory: Any) -> Array:  # noqa: ANN401 - an mmap
    return np.frombuffer(memory, np.int64).reshape(-1, 4)


def find_ended(processes: list[BaseProcess], wait_s: float) -> list[BaseProcess]:
    """Return the processes that have ended, by their sentinels.

    An exit code can be lost if a signal arrives while it is read.
    """
    ready = wait([process.sentinel for process in processes], wait_s)
    return [process for process in processes if process.sentinel in ready or not process.is_alive()]


def send_signal(number: signal.Signals, processes: list[BaseProcess]) -> None:
    """Send a signal to the running processes, and wait briefly for their end."""
    ended = find_ended(processes, 0)
    for process in processes:
        if process in ended or process.pid is None:
            continue
        with suppress(ProcessLookupError):  # it may end at this moment
            os.kill(process.pid, number)
    deadline_s = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))


class ProcessWorkers:
    """Worker processes that write into slots of shared memory.

    They ignore Ctrl-C and SIGTERM, which reach a whole process group, until the main process ends
    them. If the main process ends first, they end within seconds. A worker that ends or hangs is
    detected while the main thread waits for an answer, never in the middle of a training step.

    Args:
        dataset: The dataset, which is sent to each worker once.
        layout: Layout of the dataset's fields.
        workers: Number of processes.
        start_method: `fork`, `forkserver`, `spawn`, or `auto` for the default of this Python.
        timeout_s: Longest wait for one micro-batch; then the workers are killed.
        worker_init_fn: Called in each worker with its number, before its first sample.
    """

    def __init__(
        self,
        dataset: RowWriter,
        layout: Layout,
        workers: int,
        *,
        start_method: StartMethod,
        timeout_s: float,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self.workers = workers
        self.timeout_s = timeout_s
        self.board = Board(workers)
        self._reader = RowReader(dataset, layout, self.board, worker_init_fn)
        self._context: Any = start_context(start_method)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._selector = selectors.DefaultSelector()
        # In order; also the tasks that an interrupted epoch left in progress.
        self._issued: dict[int, RowTask] = {}
        self._answers: dict[int, Texts | Failure] = {}
        self._count = 0
        # The finalizer keeps these alive, so that they are intact when this object is deleted, alone
        # or in a cycle.
        self._end = weakref.finalize(
            self, _end, os.getpid(), self.board, self._processes, self._pipes, self._selector
        )
        _open.add(self)

    def run(self, tasks: Iterator[RowTask], depth: int) -> Iterator[Answer]:
        """Hand out the tasks, to each worker in turn, and wait for the answers.

        Raises:
            WorkerDiedError: A worker ended, took longer than the timeout, or could not be started.
        """
        if not self._processes:
            self._start()
        self._forget_stale()
        first = self._count
        while True:
            while len(self._issued) <= depth and (task := next(tasks, None)) is not None:
                self._issue(task, (self._count - first) % self.workers)
            if not self._issued:
                return
            number = next(iter(self._issued))
            self._wait_for(number)
            yield self._issued.pop(number), self._answers.pop(number)

    def close(self) -> None:
        """End the processes; those that hang or are stopped are killed."""
        self._end()

    def _start(self) -> None:
        """Start the processes and wait until they are ready."""
        limit, open_files = count_files()
        if open_files + _FILES + _FILES_PER_WORKER * self.workers > limit:
            raise WorkerDiedError(_describe_files(self.workers))
        log_opencv_threads()
        try:
            for number in range(self.workers):
                self._start_one(number)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise WorkerDiedError(_describe_files(self.workers)) from error
        deadline_s = time.monotonic() + self.timeout_s
        listening = 0
        while listening < self.workers:
            listening += self._receive(deadline_s)

    def _start_one(self, number: int) -> None:
        here, there = self._context.Pipe()
        with there:
            arguments = (self._reader, number, self.workers, there)
            process = self._context.Process(target=serve, args=arguments, daemon=True)
            process.start()
        self._processes.append(process)
        self._pipes.append(here)
        self._selector.register(here, selectors.EVENT_READ, here)
        self._selector.register(process.sentinel, selectors.EVENT_READ)

    def _issue(self, task: RowTask, worker: int) -> None:
        slot = task.slot
        assert slot.handle is not None
        self.board.lines[0, PLAN] = task.plan
        message: Message = (
            self._count,
            slot.serial,
            slot.oldest,
            slot.handle,
            slot.samples,
            task.first,
            task.stop,
            task.epoch,
            task.plan,
        )
        self._issued[self._count] = task
        self._count += 1
        with suppress(BrokenPipeError):  # the worker has ended, as its sentinel shows
            self._pipes[worker].send(message)

    def _forget_stale(self) -> None:
        """Wait for the tasks of an interrupted epoch; workers skip those that they have not begun."""
        if self._issued:
            self.board.lines[0, PLAN] = max(task.plan for task in self._issued.values()) + 1
        for number in list(self._issued):
            self._wait_for(number)
            del self._issued[number], self._answers[number]

    def _wait_for(self, number: int) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        while number not in self._answers:
            self._receive(deadline_s)

    def _receive(self, deadline_s: float) -> int:
        """Receive all messages that have arrived, at least one, and return their number.

        Raises:
            WorkerDiedError: A worker has ended, or no message arrived in time.
        """
        ready = self._selector.select(max(0.0, deadline_s - time.monotonic()))
        if not ready:
            for process in self._processes:
                process.kill()
            raise WorkerDiedError(self._describe_hang())
        try:
            messages = [key.data.recv() for key, _ in ready if key.data is not None]
        except (EOFError, OSError) as error:
            self._raise_death(error)
        if len(messages) < len(ready):  # a sentinel was ready
            self._raise_death()
        self._answers.update(message for message in messages if message is not None)
        return len(messages)

    def _raise_death(self, error: Exception | None = None) -> NoReturn:
        first = self._find_first_dead()
        check: Any = getattr(self.dataset, "check_sources", None)
        if first.exitcode == -signal.SIGBUS and check:
            check()  # a truncated file gives a better message
        end, hint = describe_end(first.exitcode)
        samples = self._describe_held(first.pid or 0)
        if not samples and (first.exitcode or 0) > 0:
            hint = (
                "Its own message is above; with spawn and forkserver, start the program under "
                "__main__ only."
            )
        raise WorkerDiedError(
            f"worker {first.pid} {end} while it had {samples or 'no sample'}. {hint}"
        ) from error

    def _find_first_dead(self) -> BaseProcess:
        """Return a process that failed, else one that ended, else any if no sentinel is ready."""
        ended = find_ended(self._processes, _GRACE_S)
        for process in ended:
            process.join(_GRACE_S)  # its sentinel may be ready before its exit code
        failed = [process for process in ended if process.exitcode]
        return [*failed, *ended, *self._processes][0]

    def _describe_hang(self) -> str:
        if not self._issued:
            return (
                f"the workers had not started after timeout_s={self.timeout_s:g} s: is the "
                "machine busy, or is sending the dataset to them slow? Raise "
                "data.loader.timeout_s, or lower data.loader.num_workers"
            )
        task = next(iter(self._issued.values()))
        pid = self._find_busy(task)
        if pid is None:
            samples = describe_samples(self.dataset, task.indices)
            return hang_text("a worker", self.timeout_s, samples)
        samples = self._describe_held(pid) or describe_samples(self.dataset, task.indices)
        return hang_text(f"worker {pid}", self.timeout_s, samples)

    def _find_busy(self, task: RowTask) -> int | None:
        """Return the process that writes a task, else one that writes another task; None if all wait."""
        busy = [line for line in self.board.lines[1:] if line[SLOT] >= 0]
        for line in busy:
            if (line[SLOT], line[FIRST]) == (task.slot.serial, task.first):
                return int(line[PID])
        return int(busy[0][PID]) if busy else None

    def _describe_held(self, pid: int) -> str:
        """Return the samples that a process was writing, for a message; empty if it was waiting."""
        slots = {task.slot.serial: task.slot for task in self._issued.values()}
        for line in self.board.lines[1:]:
            slot = slots.get(int(line[SLOT]))
            if line[PID] == pid and slot is not None:
                indices = slot.arrays[INDICES][line[FIRST] : line[STOP]]
                return describe_samples(self.dataset, indices)
        return ""


@atexit.register
def _close_all() -> None:
    """End all workers before multiprocessing joins its daemons, which ignore its signals."""
    for workers in list(_open):
        workers.close()


def _end(
    owner: int,
    board: Board,
    processes: list[BaseProcess],
    pipes: list[Connection],
    selector: selectors.BaseSelector,
) -> None:
    if os.getpid() != owner:
        return  # this is a copy in a forked process
    board.set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        send_signal(number, processes)
    selector.close()
    for pipe in pipes:
        pipe.close()
    pipes.clear()
    processes.clear()


def _describe_files(workers: int) -> str:
    limit, _ = count_files()
    needed = _FILES + _FILES_PER_WORKER * workers
    return (
        f"{counted(workers, 'worker')} cannot run: this process may open {limit} files (ulimit -n), and "
        f"workers need about {needed} in addition: raise the limit or lower "
        "data.loader.num_workers"
    )
