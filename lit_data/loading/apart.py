"""Reading of a dataset outside of the main process, before its workers start."""

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from lit_data.core.child_process import watch_parent
from lit_data.core.errors import ConfigError, WorkerDiedError
from lit_data.core.types import RowWriter
from lit_data.loading.options import LoaderOptions, StartMethod
from lit_data.loading.workers import THREADS_VARIABLE, Failure, check_crossing, hang_text

Rows = TypeVar("Rows", bound=RowWriter)
Result = TypeVar("Result")

_GRACE_S = 1.0
_SEED = 0
"""Seed of the first worker's global generators, from which a dataset may draw."""
_PLACE = "the first samples, in a separate process"


def can_start_processes() -> bool:
    """Return True if this process can have worker processes.

    They share anonymous memory, which only Linux has, and daemons cannot start processes.
    """
    return hasattr(os, "memfd_create") and not multiprocessing.current_process().daemon


def start_context(method: StartMethod) -> Any:  # noqa: ANN401 - a context of any start method
    """Return the context in which processes start; `auto` is the default of this Python."""
    return multiprocessing.get_context(None if method == "auto" else method)


def maps_files(rows: RowWriter) -> bool:
    """Return True for a dataset of lit_data, whose open files forked processes can share.

    The datasets of `lit_data.loading` wrap those of other libraries.
    """
    module = type(rows).__module__
    return module.startswith("lit_data.") and not module.startswith("lit_data.loading.")


def read_apart(read: Callable[[Rows], Result], rows: Rows, options: LoaderOptions) -> Result:
    """Read a dataset without leaving its files open in this process.

    Forked workers share the open files of this process and their positions, so two workers would
    get each other's bytes. If workers are forked, a forked process reads the dataset. Otherwise
    workers get a pickled copy, so this process reads such a copy too.

    Args:
        read: Reads the dataset; its result must be picklable.
        rows: The dataset.
        options: Start method and timeout of workers.

    Raises:
        WorkerDiedError: The process died or took longer than the timeout.
        ConfigError: The dataset cannot be pickled.
        Exception: The one that the dataset raised.
    """
    method = start_context(options.start_method).get_start_method()
    if method == "fork":
        answer = _read_in_fork(read, rows, options.timeout_s)
    else:
        answer = read(_copy(rows, method))
    if isinstance(answer, Failure):
        raise answer.rebuild()
    return answer


def _read_in_fork(read: Callable[[Rows], Result], rows: Rows, timeout_s: float) -> Result | Failure:
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=_serve, args=(read, rows, here, there), daemon=True)
    try:
        process.start()
        there.close()
        answer: Result | Failure = _receive(process, here, timeout_s)
    finally:
        here.close()
        _end(process)
    return answer


def set_up_worker(dataset: Any, worker: int, workers: int) -> None:  # noqa: ANN401
    """Set up this process as a worker: one thread, seeds, and no Ctrl-C, which the main process handles.

    Args:
        dataset: The dataset that it reads.
        worker: Number of this worker.
        workers: Number of all workers.
    """
    faulthandler.disable()  # the main process reports how a worker ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_parent()
    torch.set_num_threads(1)
    seed = _SEED + worker
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - a user's dataset may draw from it
    torch.manual_seed(seed)
    # `torch.utils.data.get_worker_info` reads this; nothing public sets it.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker,
        num_workers=workers,
        seed=seed,
        dataset=dataset,
    )
    if THREADS_VARIABLE not in os.environ:
        os.environ[THREADS_VARIABLE] = "1"  # for an OpenCV that is imported later
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)


def describe_end(exitcode: int | None) -> tuple[str, str]:
    """Return how a process ended in words, and a hint."""
    if exitcode == -signal.SIGKILL:
        return (
            "was killed (SIGKILL)",
            "The kernel does that when memory runs out: lower data.loader.num_workers.",
        )
    if exitcode == -signal.SIGBUS:
        return "was killed (SIGBUS)", "A mapped file became shorter, or memory for a page ran out."
    if exitcode is None:
        return "ended", "Its exit code is unknown."
    if exitcode < 0:
        return (
            f"was killed ({signal.Signals(-exitcode).name})",
            "A library crashed on these samples: read them alone.",
        )
    return f"ended with exit code {exitcode}", "Something in the dataset ends the process."


def _serve(read: Callable[[Rows], Any], rows: Rows, parent: Connection, pipe: Connection) -> None:
    parent.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the main process ends this one
    set_up_worker(getattr(rows, "dataset", rows), 0, 1)
    begin: Callable[[int], None] | None = getattr(rows, "worker_init_fn", None)
    try:
        if begin is not None:
            begin(0)
        answer = read(rows)
    except (Exception, SystemExit) as error:
        answer = Failure(error, traceback.format_exc(), _PLACE)
    pipe.send(check_crossing(answer))
    with suppress(EOFError, OSError):
        pipe.recv()  # the main process fetches tensors of the answer from this one


def _receive(process: BaseProcess, pipe: Connection, timeout_s: float) -> Any:  # noqa: ANN401
    if not pipe.poll(timeout_s):
        raise WorkerDiedError(hang_text("a process", timeout_s, _PLACE))
    try:
        return pipe.recv()
    except (EOFError, ConnectionError) as error:
        process.join(_GRACE_S)
        end, hint = describe_end(process.exitcode)
        raise WorkerDiedError(f"a process {end} while it read {_PLACE}. {hint}") from error


def _end(process: BaseProcess) -> None:
    if process.pid is None:
        return  # it did not start
    process.join(_GRACE_S)
    if process.exitcode is None:
        process.kill()
        process.join()


def _copy(rows: Rows, method: str) -> Rows:
    """Return the copy of the dataset that a worker process would get."""
    try:
        with _pickling_for_here():
            copy: Rows = pickle.loads(ForkingPickler.dumps(rows))
    except Exception as error:
        dataset = getattr(rows, "dataset", rows)
        raise ConfigError(
            f"{type(dataset).__name__} cannot be pickled, and with start_method={method} worker "
            f"processes get a pickled copy of it ({type(error).__name__}: {error}): open files at "
            "the first sample, define functions and classes at the top of a module, or set "
            "num_workers=0"
        ) from error
    return copy


class _DescriptorCopy:
    """A file descriptor in a pickle that the same process loads."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def detach(self) -> int:
        return self.descriptor


class _ThisProcess:
    """This process, as the one for which multiprocessing pickles locks and shared memory."""

    DupFd = _DescriptorCopy

    @staticmethod
    def duplicate_for_child(descriptor: int) -> int:
        return os.dup(descriptor)


@contextmanager
def _pickling_for_here() -> Iterator[None]:
    context.set_spawning_popen(_ThisProcess)  # type: ignore[arg-type]
    try:
        yield
    finally:
        context.set_spawning_popen(None)
