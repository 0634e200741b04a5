"""Worker processes, kept by torch's DataLoader; only small numbers cross its queues."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from lit_data.errors import WorkerDiedError
from lit_data.loading.layout import INDICES, Layout
from lit_data.loading.tasks import Task, describe_samples
from lit_data.loading.watch import ChildSignal, Watch
from lit_data.loading.worker_process import CLOSING, FIRST, PID, PLAN, SLOT, STOP, Board, Message, RowReader
from lit_data.loading.workers import Answer, hang_text
from lit_data.types import Array, RowWriter

_END = object()


class ProcessWorkers:
    """Worker processes that write into slots of shared memory.

    They ignore Ctrl-C and SIGTERM, which reach a whole process group, until the main process ends them; they end by
    themselves within seconds of its death (torch watches the parent).

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
        self.board = Board(workers)
        self._reader = RowReader(dataset, layout, self.board.handle)
        self._context = multiprocessing.get_context(start_method)
        self._stream = _Stream(self.board.lines)
        self._loader: DataLoader[Any] | None = None
        self._processes: list[BaseProcess] = []
        self._watch = Watch(timeout_s, self._processes)
        self._signal = ChildSignal(self._watch, self._processes)

    def run(self, tasks: Iterator[Task], depth: int) -> Iterator[Answer]:
        """Let torch hand out the tasks and wait for the answers.

        Raises:
            WorkerDiedError: A worker died, or took longer than the timeout.
        """
        if self._stream.issued:  # what a broken-off epoch left under way is not wanted
            self.board.lines[0, PLAN] = self._stream.issued[-1].plan + 1
        self._stream.tasks = tasks
        try:
            answers = self._start(depth)
            while True:
                with self._watch:
                    self._signal.raise_late()
                    answer: Any = next(answers, _END)
                if answer is _END:
                    return
                yield self._stream.issued.popleft(), answer
        except RuntimeError as error:
            raise self._explain() from error

    def close(self) -> None:
        """End the processes: those that are idle at once, those that hang by force."""
        self.board.lines[0, CLOSING] = 1
        self._signal.closing = True
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGTERM)
        self._loader = None  # its iterator joins the processes
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
        self._processes.clear()
        self._signal.remove()
        self._watch.end()

    def _start(self, depth: int) -> Iterator[Any]:
        if self._loader is not None:
            answers = iter(self._loader)  # takes in what a broken-off epoch left under way
            self._stream.forget_stale()
            return answers
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
        answers = iter(self._loader)
        self._signal.install()
        self._processes.extend(process for process in multiprocessing.active_children() if process.pid not in before)
        return answers

    def _explain(self) -> WorkerDiedError:
        for process in self._processes:
            process.join(0.5 if self._watch.fired else 0)
        if self._watch.fired:
            line = next((line for line in self.board.lines[1:] if line[SLOT] >= 0), self.board.lines[1])
            return WorkerDiedError(hang_text(f"worker {line[PID]}", self.timeout_s, self._held_by(int(line[PID]))))
        ended = [process for process in self._processes if not process.is_alive()]
        signalled = [process for process in ended if process.exitcode]
        first = (signalled or ended or self._processes)[0]
        how, hint = _describe_end(first.exitcode)
        check: Any = getattr(self.dataset, "check_sources", None)
        if first.exitcode == -signal.SIGBUS and check:
            check()
        return WorkerDiedError(f"worker {first.pid} {how} while it had {self._held_by(first.pid or 0)}. {hint}")

    def _held_by(self, pid: int) -> str:
        for line in self.board.lines[1:]:
            task = next((task for task in self._stream.issued if task.slot.serial == line[SLOT]), None)
            if line[PID] == pid and task is not None:
                indices = task.slot.arrays[INDICES][line[FIRST] : line[STOP]]
                return describe_samples(self.dataset, indices)
        return "no sample"


class _Stream:
    """The sampler: gives torch the next task whenever it asks, also after it had none for a while."""

    def __init__(self, lines: Array) -> None:
        self.tasks: Iterator[Task] = iter(())
        self.issued: deque[Task] = deque()
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


def _pass(answer: Any) -> Any:  # noqa: ANN401 - torch's own conversion would turn tuples into lists
    return answer


def _describe_end(exitcode: int | None) -> tuple[str, str]:
    if exitcode == -signal.SIGKILL:
        return "was killed (SIGKILL)", "The kernel does that when memory runs out: lower data.loader.num_workers."
    if exitcode == -signal.SIGBUS:
        return "was killed (SIGBUS)", "A mapped file became shorter, or memory for a page ran out."
    if exitcode is not None and exitcode < 0:
        return f"was killed ({signal.Signals(-exitcode).name})", "A library crashed on these samples: read them alone."
    return f"ended with exit code {exitcode}", "Something in the dataset ends the process."
