"""Tasks of workers, and the workers in the main process: its main thread, or additional threads.

Every kind of worker takes tasks when it has room, and answers in order.
"""

import io
import logging
import os
import pickle
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, Self

import torch

from lit_data.core.errors import DataError, LitDataError, WorkerDiedError
from lit_data.core.types import Array, Ints, RowWriter
from lit_data.loading.staging import INDICES, Slot

log = logging.getLogger(__name__)

Texts = Mapping[str, list[Any]] | None
_NAMED = 5

THREADS_VARIABLE = "OPENCV_FOR_THREADS_NUM"
"""Environment variable of OpenCV; a number that the user sets also applies in workers."""

_EXIT_S = 5.0
_running = weakref.WeakSet[threading.Thread]()


@dataclass(frozen=True, slots=True)
class RowTask:
    """A micro-batch: the rows of a slot from `first` to `stop`.

    Attributes:
        slot: Memory of the batch.
        first: First row.
        stop: Row after the last one.
        epoch: Epoch of the samples.
        plan: Number of the plan. If the batch size changes, the same samples are planned again, and
            only tasks of the highest number are valid.
    """

    slot: Slot
    first: int
    stop: int
    epoch: int
    plan: int

    @property
    def indices(self) -> Ints:
        """Return the sample numbers, [M]."""
        return self.slot.arrays[INDICES][self.first : self.stop]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a worker sends to the main process.

    Attributes:
        error: The exception; its pickle from another process, or None if it cannot be rebuilt.
        text: Class, message and traceback.
        sample: The sample that raised it and its name, if known.
    """

    error: BaseException | bytes | None
    text: str
    sample: str

    def packed(self) -> Self:
        """Return a copy that can be sent to another process, whatever the exception contains."""
        try:
            pickled = pickle.dumps(self.error)
            pickle.loads(pickled)  # exceptions with two arguments can be pickled, but not loaded
        except Exception:
            pickled = None
        return type(self)(pickled, self.text, self.sample)

    def rebuild(self) -> BaseException:
        """Return the exception to raise: the original one with its sample, or one that quotes it."""
        error = self.error
        if isinstance(error, bytes):
            try:
                error = pickle.loads(error)
            except Exception:
                error = None
        if not isinstance(error, Exception):
            return DataError(f"loading {self.sample} failed:\n{self.text}")
        if isinstance(error, LitDataError):
            return type(error)(f"{error}\n  while loading {self.sample}")
        note = f"while loading {self.sample}"
        if error.__traceback__ is None:  # a pickle does not include it
            note += f"\n{self.text}"
        error.add_note(note)
        return error


def write(
    dataset: RowWriter, arrays: Mapping[str, Array], first: int, stop: int, epoch: int
) -> Texts | Failure:
    """Write one micro-batch; return an exception of the dataset instead of raising it."""
    rows = {name: array[first:stop] for name, array in arrays.items()}
    indices = rows.pop(INDICES)
    try:
        return dataset.write_into(rows, indices, epoch)
    except (Exception, SystemExit) as error:
        return Failure(error, traceback.format_exc(), _find_culprit(dataset, rows, indices, epoch))


def check_crossing(answer: Texts | Failure) -> Texts | Failure:
    """Return the answer if it can be sent to another process, else a failure with the reason."""
    if isinstance(answer, Failure):
        return answer.packed()
    try:
        _Checker(io.BytesIO()).dump(answer)
    except Exception as error:
        text = f"{error!r}: a part of a sample cannot be sent to the main process"
        return Failure(None, text, "a sample")
    return answer


class _Checker(pickle.Pickler):
    """Pickler that skips tensors, which are sent through shared memory."""

    def persistent_id(self, value: object) -> str | None:
        return "tensor" if isinstance(value, torch.Tensor) else None


def describe_samples(dataset: object, indices: Ints) -> str:
    """Return the samples of a micro-batch in words for a message."""
    numbers = indices.tolist()
    text = "sample " + ", ".join(map(str, numbers[:_NAMED]))
    if len(numbers) > _NAMED:
        text += f" and {len(numbers) - _NAMED} more"
    describe: Callable[[int], str] | None = getattr(dataset, "describe_sample", None)
    first = describe(numbers[0]) if describe else ""
    if not first:
        return text
    return f"{text} ({first} first)" if len(numbers) > 1 else f"{text} ({first})"


def _find_culprit(dataset: RowWriter, rows: Mapping[str, Array], indices: Ints, epoch: int) -> str:
    """Write the samples one by one, and return the first one that fails, else all of them."""
    for number in range(len(indices)):
        single = slice(number, number + 1)
        single_row = {name: array[single] for name, array in rows.items()}
        try:
            dataset.write_into(single_row, indices[single], epoch)
        except (Exception, SystemExit):
            return describe_samples(dataset, indices[single])
    return describe_samples(dataset, indices)


Answer = tuple[RowTask, Texts | Failure]
Answers = SimpleQueue[tuple[int, Texts | Failure]]
Jobs = SimpleQueue[tuple[int, RowTask, Answers] | None]


class Workers(Protocol):
    """Workers that run tasks. `tasks` may end and yield more later, while an answer is pending."""

    def run(self, tasks: Iterator[RowTask], depth: int) -> Iterator[Answer]:
        """Yield the answers in the order of the tasks.

        Up to `depth` tasks are in progress, in addition to the one that is answered next.
        """

    def close(self) -> None:
        """End the workers."""


class InlineWorkers:
    """The main thread as the only worker."""

    def __init__(self, dataset: RowWriter) -> None:
        self.dataset = dataset

    def run(self, tasks: Iterator[RowTask], depth: int) -> Iterator[Answer]:
        """Run each task when its answer is needed."""
        while (task := next(tasks, None)) is not None:
            yield task, write(self.dataset, task.slot.arrays, task.first, task.stop, task.epoch)

    def close(self) -> None:
        """Do nothing: no worker was started."""


class ThreadWorkers:
    """Threads of this process, for datasets that spend most time without the interpreter's lock.

    They are daemons, so a thread that hangs on a network disk does not keep the process from ending.

    Args:
        dataset: The dataset, which all threads read at once.
        threads: Number of threads.
        timeout_s: Longest wait for one micro-batch.
    """

    def __init__(self, dataset: RowWriter, threads: int, timeout_s: float) -> None:
        self.dataset = dataset
        self.timeout_s = timeout_s
        self._todo: Jobs = SimpleQueue()
        closing = threading.Event()
        self._end = weakref.finalize(self, _end_threads, closing, self._todo, threads)
        log_opencv_threads()
        torch_threads = torch.get_num_threads()
        ready = threading.Barrier(threads + 1)
        for number in range(threads):
            thread = threading.Thread(
                target=_work,
                args=(dataset, self._todo, closing, ready),  # not self, which would be kept alive
                name=f"lit_data-{number}",
                daemon=True,
            )
            thread.start()
            _running.add(thread)
        ready.wait()
        # Each thread has its own number of threads; later threads would start with the workers' number.
        torch.set_num_threads(torch_threads)

    def run(self, tasks: Iterator[RowTask], depth: int) -> Iterator[Answer]:
        """Issue tasks ahead and wait for the answers.

        Raises:
            WorkerDiedError: A task took longer than the timeout.
        """
        answers: Answers = SimpleQueue()
        ahead: dict[int, RowTask] = {}  # in order of issue
        done: dict[int, Texts | Failure] = {}
        issued = 0
        with _opencv:
            while True:
                _opencv.quieten()
                while len(ahead) <= depth and (task := next(tasks, None)) is not None:
                    ahead[issued] = task
                    self._todo.put((issued, task, answers))
                    issued += 1
                if not ahead:
                    return
                number = next(iter(ahead))
                self._wait(number, answers, done, ahead)
                yield ahead.pop(number), done.pop(number)

    def close(self) -> None:
        """Let the threads end after their current task."""
        self._end()

    def _wait(
        self,
        number: int,
        answers: Answers,
        done: dict[int, Texts | Failure],
        ahead: dict[int, RowTask],
    ) -> None:
        """Receive answers until the answer of one task has arrived."""
        deadline_s = time.monotonic() + self.timeout_s
        while number not in done:
            try:
                other, answer = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except Empty:
                samples = describe_samples(self.dataset, ahead[number].indices)
                raise WorkerDiedError(hang_text("a thread", self.timeout_s, samples)) from None
            done[other] = answer


def log_opencv_threads() -> None:
    """Log the number of OpenCV's threads if the user set it, because it also applies in workers."""
    if THREADS_VARIABLE in os.environ:
        log.info("workers keep %s=%s", THREADS_VARIABLE, os.environ[THREADS_VARIABLE])


def hang_text(worker: str, timeout_s: float, samples: str) -> str:
    """Return the message for a worker that did not answer in time."""
    return (
        f"{worker} was not ready with {samples} after timeout_s={timeout_s:g} s: is the disk or "
        "the network folder reachable? If the samples only take long, raise data.loader.timeout_s"
    )


class _OpenCV:
    """Threads of OpenCV, which are turned off while at least one loader uses threads.

    OpenCV starts a thread for each core on every call, and several worker threads would each wait
    for theirs. A number that the user set is kept. Afterwards the previous number is restored.
    """

    def __init__(self) -> None:
        self._users = 0
        self._before: int | None = None

    def __enter__(self) -> None:
        self._users += 1

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users and self._before is not None:
            sys.modules["cv2"].setNumThreads(self._before)
            self._before = None

    def quieten(self) -> None:
        """Turn off OpenCV's threads, also if a dataset imports it late."""
        cv2: Any = sys.modules.get("cv2")
        if (
            self._before is None
            and hasattr(cv2, "setNumThreads")
            and THREADS_VARIABLE not in os.environ
        ):
            self._before = cv2.getNumThreads()
            cv2.setNumThreads(0)


_opencv = _OpenCV()


def take_one_core() -> None:
    """Have torch compute in this thread alone; threads that start later inherit that."""
    # The first call in a thread sets the main thread's number: call it before the next one.
    torch.get_num_threads()
    torch.set_num_threads(1)


def _work(
    dataset: RowWriter, todo: Jobs, closing: threading.Event, ready: threading.Barrier
) -> None:
    take_one_core()
    ready.wait()
    while (job := todo.get()) is not None:
        if not closing.is_set():
            number, task, answers = job
            answers.put((number, _answer(dataset, task)))
            del task, answers
        del job  # otherwise the slot would be kept alive while this thread waits


def _answer(dataset: RowWriter, task: RowTask) -> Texts | Failure:
    try:
        return write(dataset, task.slot.arrays, task.first, task.stop, task.epoch)
    except BaseException as error:
        # Otherwise the thread would end without a message, and its answer would never arrive.
        return Failure(error, traceback.format_exc(), describe_samples(dataset, task.indices))


def _await_threads() -> None:
    """Give threads time to end before the interpreter exits.

    The interpreter stops the others. A thread that is in C++ code at that moment, such as an
    operation of torch, aborts the process (SIGABRT).
    """
    deadline_s = time.monotonic() + _EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, deadline_s - time.monotonic()))


# Finalizers run in reverse order at exit: this one runs after those that end the threads.
weakref.finalize(ThreadWorkers, _await_threads)


def _end_threads(closing: threading.Event, todo: Jobs, threads: int) -> None:
    closing.set()
    for _ in range(threads):
        todo.put(None)
