"""Worker processes, kept by torch's DataLoader; only small numbers cross its queues."""

import atexit
import copy
import errno
import multiprocessing
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, cast

import torch
from torch.utils.data import DataLoader

from lit_data.errors import WorkerDiedError
from lit_data.loading.layout import INDICES, Layout
from lit_data.loading.machine import count_files
from lit_data.loading.tasks import RowTask, describe_samples
from lit_data.loading.worker_process import FIRST, PID, PLAN, SLOT, STOP, Board, Message, RowReader
from lit_data.loading.worker_watchdog import Watch
from lit_data.loading.workers import Answer, hang_text, log_opencv_threads
from lit_data.types import Array, RowWriter

_GRACE_S: Final = 1.0


def find_ended(processes: list[BaseProcess], wait_s: float) -> list[BaseProcess]:
    """Those that have ended, by their sentinels: an exit code is lost where a signal strikes as it is read."""
    gone = wait([process.sentinel for process in processes], wait_s)
    return [process for process in processes if process.sentinel in gone or not process.is_alive()]


def send_signal(number: signal.Signals, processes: list[BaseProcess]) -> None:
    """Send a signal to the processes that live, and wait a little for their end."""
    left = [process for process in processes if process not in find_ended(processes, 0)]
    for process in left:
        with suppress(ProcessLookupError):  # it may end at this moment
            os.kill(process.pid or 0, number)
    deadline_s = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))


def describe_end(exitcode: int | None) -> tuple[str, str]:
    """How a process ended, and what may help."""
    if exitcode == -signal.SIGKILL:
        return "was killed (SIGKILL)", "The kernel does that when memory runs out: lower data.loader.num_workers."
    if exitcode == -signal.SIGBUS:
        return "was killed (SIGBUS)", "A mapped file became shorter, or memory for a page ran out."
    if exitcode is None:
        return "ended", "Its exit code is lost."
    if exitcode < 0:
        return f"was killed ({signal.Signals(-exitcode).name})", "A library crashed on these samples: read them alone."
    return f"ended with exit code {exitcode}", "Something in the dataset ends the process."


_END: Final = object()
_FILES: Final = 24
_FILES_PER_WORKER: Final = 4


class ProcessWorkers:
    """Worker processes that write into slots of shared memory.

    They ignore Ctrl-C and SIGTERM, which reach a whole process group, until the main process ends them; they end by
    themselves within seconds of its death.

    Args:
        dataset: Sent to each worker once.
        layout: Its fields.
        workers: How many.
        start_method: `fork`, `forkserver`, `spawn`, or none for the default of this Python.
        timeout_s: Longest wait for one micro-batch; then the workers are killed.
    """

    def __init__(
        self, dataset: RowWriter, layout: Layout, workers: int, *, start_method: str | None, timeout_s: float
    ) -> None:
        self.dataset, self.workers, self.timeout_s = dataset, workers, timeout_s
        self.board = board = Board(workers)
        self._reader = RowReader(dataset, layout, board)
        self._context = copy.copy(multiprocessing.get_context(start_method))
        setattr(self._context, "Event", lambda: board)  # noqa: B010 - see Board
        self._stream = _Stream(self.board.lines)
        self._loader: DataLoader[Any] | None = None
        self._iterators: list[Any] = []  # torch's, at most one
        self._processes: list[BaseProcess] = []
        self._watch = Watch(timeout_s, self._processes)
        # Kept alive by the finalizer, so that they are whole when this object goes, alone or in a cycle.
        self._end = weakref.finalize(self, _end, os.getpid(), board, self._processes, self._iterators, self._watch)
        _open.add(self)

    def run(self, tasks: Iterator[RowTask], depth: int) -> Iterator[Answer]:
        """Let torch hand out the tasks and wait for the answers.

        Raises:
            WorkerDiedError: A worker died, took longer than the timeout, or could not be started.
        """
        if self._stream.issued:  # what a broken-off epoch left under way is not wanted
            self.board.lines[0, PLAN] = self._stream.issued[-1].plan + 1
        try:
            if self._loader is None:
                self._start(depth)
            self._stream.tasks = tasks
            answers = self._restart()
            while True:
                with self._watch.waiting():
                    answer: Any = next(answers, _END)
                if answer is _END:
                    return
                yield self._stream.issued.popleft(), answer
        except (RuntimeError, OSError) as error:
            self._explain(error)
            raise
        finally:
            if self._stream.tasks is tasks:
                self._stream.tasks = iter(())  # these know the loader, which would be kept alive

    def close(self) -> None:
        """End the processes: those that listen at once, those that hang or are stopped by force."""
        self._end()

    def _start(self, depth: int) -> None:
        """Start the processes without tasks, so that none dies of one before it is known here."""
        limit, opened = count_files()
        if opened + _FILES + _FILES_PER_WORKER * self.workers > limit:
            raise WorkerDiedError(_describe_files(self.workers))
        log_opencv_threads()
        before = {process.pid for process in multiprocessing.active_children()}
        self._loader = DataLoader(
            cast(Any, self._reader),  # a map-style dataset whose keys are messages
            batch_size=None,
            sampler=self._stream,
            num_workers=self.workers,
            collate_fn=_pass,
            worker_init_fn=self._reader.start,
            multiprocessing_context=self._context,
            prefetch_factor=-(-(depth + 1) // self.workers),
            persistent_workers=True,
            generator=torch.Generator(),  # or it would draw from the global one, and change what a model draws
        )
        try:
            self._iterators.append(iter(self._loader))
        finally:  # also of those that started before one could not
            self._processes.extend(p for p in multiprocessing.active_children() if p.pid not in before)
            self._watch.start()

    def _restart(self) -> Iterator[Any]:
        with self._watch.waiting():
            answers = iter(cast(DataLoader[Any], self._loader))  # takes in what a broken-off epoch left under way
        self._stream.forget_stale()
        return answers

    def _explain(self, error: Exception) -> None:
        """Raise what an error is about, if a worker is gone or there are too few files."""
        if getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in str(error):
            raise WorkerDiedError(_describe_files(self.workers)) from error
        ended = find_ended(self._processes, 1 if self._watch.lost else 0)
        if self._watch.timed_out:
            raise WorkerDiedError(self._describe_hang()) from error
        if not ended:
            return
        first = next((process for process in ended if process.exitcode), ended[0])
        check: Any = getattr(self.dataset, "check_sources", None)
        if first.exitcode == -signal.SIGBUS and check:
            check()
        how, hint = describe_end(first.exitcode)
        held = self._held_by(first.pid or 0)
        if not held and (first.exitcode or 0) > 0:
            hint = "Its own message stands above; with spawn and forkserver, start the program under __main__ only."
        raise WorkerDiedError(f"worker {first.pid} {how} while it had {held or 'no sample'}. {hint}") from error

    def _describe_hang(self) -> str:
        if not self._stream.issued:
            return (
                f"the workers had not started after timeout_s={self.timeout_s:g} s: is the machine busy, or the "
                "dataset slow to be sent to them? Raise data.loader.timeout_s, or take fewer data.loader.num_workers"
            )
        task = self._stream.issued[0]
        busy = [line for line in self.board.lines[1:] if line[SLOT] >= 0]
        busy.sort(key=lambda line: (line[SLOT], line[FIRST]) != (task.slot.serial, task.first))
        pid = int(busy[0][PID]) if busy else 0
        held = self._held_by(pid) or describe_samples(self.dataset, task.indices)
        return hang_text(f"worker {pid}" if pid else "a worker", self.timeout_s, held)

    def _held_by(self, pid: int) -> str:
        for line in self.board.lines[1:]:
            task = next((task for task in self._stream.issued if task.slot.serial == line[SLOT]), None)
            if line[PID] == pid and task is not None:
                indices = task.slot.arrays[INDICES][line[FIRST] : line[STOP]]
                return describe_samples(self.dataset, indices)
        return ""


class _Stream:
    """The sampler: gives torch the next task whenever it asks, also after it had none for a while."""

    def __init__(self, lines: Array) -> None:
        self.tasks: Iterator[RowTask] = iter(())
        self.issued: deque[RowTask] = deque()
        self._lines = lines
        self._fresh = 0

    def __iter__(self) -> "_Stream":
        self._fresh = 0
        return self

    def __next__(self) -> Message:
        task = next(self.tasks)
        self.issued.append(task)
        self._fresh += 1
        self._lines[0, PLAN] = task.plan
        slot = task.slot
        assert slot.handle is not None
        return slot.serial, slot.oldest, slot.handle, slot.samples, task.first, task.stop, task.epoch, task.plan

    def forget_stale(self) -> None:
        """Forget the tasks that were issued before the last `iter`."""
        while len(self.issued) > self._fresh:
            self.issued.popleft()


_open: "weakref.WeakSet[ProcessWorkers]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before multiprocessing joins its daemons, which listen to nobody else."""
    for workers in list(_open):
        workers.close()


def _disown() -> None:
    """In a forked process: torch's iterators belong to the parent, whose workers they would look after and end here."""
    for workers in list(_open):
        for iterator in workers._iterators:
            iterator._shutdown = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)


def _end(owner: int, board: Board, processes: list[BaseProcess], iterators: list[Any], watch: Watch) -> None:
    if os.getpid() != owner:
        return  # a copy in a forked process
    board.set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        send_signal(number, processes)
    for iterator in iterators:
        iterator._shutdown_workers()  # or its queues would live as long as the traceback of an error
    iterators.clear()
    processes.clear()
    watch.end()


def _describe_files(workers: int) -> str:
    return (
        f"{workers} workers cannot run: this process may have {count_files()[0]} files open (ulimit -n), and they need "
        f"about {_FILES + _FILES_PER_WORKER * workers} beside those of the program: raise the limit or lower "
        "data.loader.num_workers"
    )


def _pass(answer: Any) -> Any:  # noqa: ANN401 - torch's own conversion would turn tuples into lists
    return answer
