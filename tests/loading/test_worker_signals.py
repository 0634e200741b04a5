"""Signals to the whole process group, and how soon workers end that do not listen."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_data.core.types import Ints
from lit_data.loading import LoaderOptions, MicroBatchLoader
from tests.helpers.families import ROOT
from tests.helpers.fork_server import SCRIPTS_TOO
from tests.loading.rows import FORK, Indices, Rows

pytestmark = pytest.mark.timeout(60)

_PROGRAM = """
    import os, signal, sys, threading
    import numpy as np
    from lit_data.loading import LoaderOptions, MicroBatchLoader
    from lit_data.core.types import FieldSpec

    class Pids:
        fields = {"pid": FieldSpec((), "int64")}

        def __len__(self):
            return 64

        def write_into(self, rows, indices, epoch):
            rows["pid"][:] = os.getpid()

    if __name__ == "__main__":
        seen = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: seen.append(number))
        options = LoaderOptions(
            batch_size=16, micro_batch_size=4, num_workers=2, worker_kind="process", start_method="fork"
        )
        loader = MicroBatchLoader(Pids(), options, shuffle=True)
        batches = iter(loader)
        pids = set(next(batches)["pid"].tolist())
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(0, number)
        pids |= {pid for batch in batches for pid in batch["pid"].tolist()}
        again = {pid for batch in loader for pid in batch["pid"].tolist()}
        print(seen == [signal.SIGINT, signal.SIGTERM], len(pids), pids == again)
        loader.close()
"""


_EXITING = """
    import torch
    from lit_data.loading import LoaderOptions, MicroBatchLoader
    from lit_data.core.types import FieldSpec

    class Slow:
        fields = {"index": FieldSpec((), "int64")}

        def __len__(self):
            return 64

        def write_into(self, rows, indices, epoch):
            rows["index"][:] = indices
            if indices[0] >= 16:
                matrix = torch.ones(1000, 1000)
                for _ in range(20):
                    matrix @ matrix

    options = LoaderOptions(batch_size=16, micro_batch_size=4, num_workers=2, worker_kind="thread")
    loader = MicroBatchLoader(Slow(), options)
    next(iter(loader))
"""
_DYING = """
    import os, signal, time
    from lit_data.core.errors import WorkerDiedError
    from lit_data.loading import LoaderOptions, MicroBatchLoader
    from lit_data.core.types import FieldSpec

    class Numbers:
        fields = {"index": FieldSpec((), "int64")}
        dies = False

        def __len__(self):
            return 64

        def write_into(self, rows, indices, epoch):
            if self.dies and 31 in indices:
                os._exit(0)

    def read(dataset):
        options = LoaderOptions(
            batch_size=16, worker_kind="process", num_workers=2, start_method="fork"
        )
        return sum(len(batch["index"]) for batch in MicroBatchLoader(dataset, options))

    before = signal.getsignal(signal.SIGCHLD)
    numbers = Numbers()
    assert read(numbers) == 64
    signal.signal(signal.SIGCHLD, before)  # as a Trainer does at its end
    numbers.dies = True
    began_s = time.monotonic()
    try:
        read(numbers)
    except WorkerDiedError:
        print(time.monotonic() - began_s < 4)  # torch alone looks every 5 s
"""


class Waiting(Indices):
    """Sample 31 does not return; the first batch does not hold it."""

    def __init__(self, seconds_s: float) -> None:
        super().__init__()
        self.seconds_s = seconds_s

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        if 31 in indices:
            time.sleep(self.seconds_s)


@pytest.fixture
def loader(request: pytest.FixtureRequest) -> Iterator[MicroBatchLoader]:
    options = LoaderOptions(batch_size=16, micro_batch_size=4, **FORK)
    loader = MicroBatchLoader(Waiting(request.param), options)
    yield loader
    loader.close()


def _run(folder: Path, program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    variables = os.environ | SCRIPTS_TOO | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(path)]
    return subprocess.run(
        words, env=variables, capture_output=True, text=True, timeout=40, check=True, **options
    )


def test_workers_ignore_what_is_sent_to_the_process_group(tmp_path: Path) -> None:
    done = _run(tmp_path, _PROGRAM, start_new_session=True)
    assert (done.stdout, done.stderr) == ("True 2 True\n", "")


@pytest.mark.parametrize("end", ["", "loader.close()"])
def test_the_process_ends_well_while_threads_are_within_torch(end: str, tmp_path: Path) -> None:
    assert _run(tmp_path, textwrap.dedent(_EXITING) + end).stderr == ""


@pytest.mark.parametrize(
    ("loader", "stopped"),
    [
        (0.0, False),  # idle
        (3600.0, False),  # asleep in the dataset
        (0.0, True),  # deaf to SIGTERM
        (3600.0, True),
    ],
    indirect=["loader"],
)
def test_close_ends_workers_whatever_they_do(loader: MicroBatchLoader, stopped: bool) -> None:
    batches = iter(loader)
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        if stopped:
            os.kill(worker.pid or 0, signal.SIGSTOP)
    started_s = time.monotonic()
    loader.close()
    assert time.monotonic() - started_s < 4  # torch alone gives each of them 5 s
    assert not any(worker.is_alive() for worker in workers)
    # Others end when they are told.
    assert [worker.exitcode == -signal.SIGKILL for worker in workers] == [stopped] * 2
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("loader", [3600.0], indirect=True)
def test_a_hanging_worker_ignores_sigterm_until_the_loader_closes(loader: MicroBatchLoader) -> None:
    batches = iter(loader)
    next(batches)
    workers = multiprocessing.active_children()
    for process in workers:
        os.kill(process.pid or 0, signal.SIGTERM)
        os.kill(process.pid or 0, signal.SIGINT)
    workers[0].join(0.2)
    workers[1].join(0.2)
    assert multiprocessing.active_children() == workers


def test_a_trainer_that_puts_old_handlers_back_does_not_make_us_deaf(tmp_path: Path) -> None:
    assert _run(tmp_path, _DYING).stdout == "True\n"
