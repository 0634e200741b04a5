"""Who does the tasks: the main thread, or threads. Every kind takes tasks when it has room and answers in order."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from lit_data.errors import WorkerDiedError
from lit_data.loading.tasks import Failure, Task, Texts, describe_samples, write
from lit_data.types import RowWriter

Answer = tuple[Task, Texts | Failure]


class Workers(Protocol):
    """Does tasks. `tasks` may end and later give more, as long as an answer is outstanding."""

    def run(self, tasks: Iterator[Task], depth: int) -> Iterator[Answer]:
        """The answers in the order of the tasks, of which up to `depth` are under way beside the one answered."""

    def close(self) -> None:
        """End the workers."""


class InlineWorkers:
    """The main thread."""

    def __init__(self, dataset: RowWriter) -> None:
        self.dataset = dataset

    def run(self, tasks: Iterator[Task], depth: int) -> Iterator[Answer]:
        """Do each task when its answer is wanted."""
        while (task := next(tasks, None)) is not None:
            yield task, write(self.dataset, task.slot.arrays, task.first, task.stop, task.epoch)

    def close(self) -> None:
        """Nothing to end."""


class ThreadWorkers:
    """Threads of this process, for datasets that spend their time outside the interpreter's lock.

    They are daemons: one that hangs on a dead network disk cannot keep the process from ending.

    Args:
        dataset: Written by all threads at once.
        threads: How many.
        timeout_s: Longest wait for one micro-batch.
    """

    def __init__(self, dataset: RowWriter, threads: int, timeout_s: float) -> None:
        self.dataset, self.timeout_s = dataset, timeout_s
        self._todo: SimpleQueue[tuple[int, Task, SimpleQueue[tuple[int, Texts | Failure]]] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._work, name=f"lit_data-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Iterator[Task], depth: int) -> Iterator[Answer]:
        """Hand out tasks ahead and wait for the answers.

        Raises:
            WorkerDiedError: A task took longer than the timeout.
        """
        answers: SimpleQueue[tuple[int, Texts | Failure]] = SimpleQueue()
        ahead: dict[int, Task] = {}  # in order of issue
        done: dict[int, Texts | Failure] = {}
        issued = 0
        with _no_opencv_threads():
            while True:
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
        """Let the threads end after the task they are at."""
        self._closing.set()
        for _ in self._threads:
            self._todo.put(None)

    def _wait(
        self,
        number: int,
        answers: SimpleQueue[tuple[int, Texts | Failure]],
        done: dict[int, Texts | Failure],
        ahead: dict[int, Task],
    ) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        while number not in done:
            try:
                finished, answer = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except Empty:
                raise WorkerDiedError(
                    hang_text("a thread", self.timeout_s, describe_samples(self.dataset, ahead[number].indices))
                ) from None
            done[finished] = answer

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            if not self._closing.is_set():
                number, task, answers = job
                answers.put((number, write(self.dataset, task.slot.arrays, task.first, task.stop, task.epoch)))
            del job  # or the slot would be kept while this thread waits


def hang_text(worker: str, timeout_s: float, samples: str) -> str:
    """What to say of a worker that did not answer."""
    return (
        f"{worker} was not ready with {samples} after timeout_s={timeout_s:g} s: is the disk or the network folder "
        "reachable? If the samples only take long, raise data.loader.timeout_s"
    )


@contextmanager
def _no_opencv_threads() -> Iterator[None]:
    """OpenCV starts a thread for each core on every call; several of our threads would each wait for them."""
    cv2 = sys.modules.get("cv2")
    before: Callable[[], int] | None = getattr(cv2, "getNumThreads", None)
    count = before() if before else 0
    with suppress(AttributeError):
        cv2.setNumThreads(0)  # type: ignore[union-attr]
    try:
        yield
    finally:
        with suppress(AttributeError):
            cv2.setNumThreads(count)  # type: ignore[union-attr]
