"""Workers that die, hang or raise: what the main process says of it, how soon, and that it leaves nothing behind."""

import gc
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from lit_data.core.errors import ConfigError, DataError, StoreCorruptError, WorkerDiedError
from lit_data.core.types import FieldSpec, Ints
from lit_data.loading import LoaderOptions, MicroBatchLoader
from tests.loading.rows import FORK, Indices, Rows

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("small_runs_are_fast")]


class Faulty(Indices):
    """Sample i tells which process wrote it; as `at` is written, `fault` happens."""

    def __init__(self, fault: Callable[[], object] | None = None, at: int = 31) -> None:
        super().__init__(pid=FieldSpec((), "int64"))
        self.fault, self.at = fault, at

    def describe_sample(self, index: int) -> str:
        return f"images/{index}.png"

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> Any:
        super().write_into(rows, indices, epoch)
        rows["pid"][:] = os.getpid()
        if self.fault is not None and self.at in indices:
            self.fault()


class Files:
    """Rows of a mapped file, which is cut short as a worker reads row 31."""

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes = path, path.stat().st_size
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.fields = {"row": FieldSpec((mmap.PAGESIZE,), "uint8")}

    def __len__(self) -> int:
        return self.nbytes // mmap.PAGESIZE

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        if 31 in indices:
            os.truncate(self.path, mmap.PAGESIZE)
        rows["row"][:] = np.frombuffer(self.map, np.uint8).reshape(len(self), -1)[indices]

    def check_sources(self) -> None:
        if self.path.stat().st_size != self.nbytes:
            raise StoreCorruptError(f"{self.path.name} was cut short: build it again")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _break_bus() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


def _exit_123() -> None:
    os._exit(123)


def _exit_0() -> None:
    os._exit(0)


def _sleep() -> None:
    time.sleep(3600)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _leave() -> None:
    sys.exit(3)


WANT, SHORT = "The kernel does that when memory runs out: lower", "A mapped file became shorter, or"
ENDS = "Something in the dataset ends the process"
DEATHS = [
    (_kill, r"was killed \(SIGKILL\)", WANT, 0),
    (_break_bus, r"was killed \(SIGBUS\)", SHORT, 31),
    (_exit_123, "ended with exit code 123", ENDS, 63),
    (_exit_0, "ended with exit code 0", ENDS, 31),
]


class Open(Protocol):
    def __call__(
        self, dataset: object, *, shuffle: bool = False, **options: Any
    ) -> MicroBatchLoader: ...


class Asking(Indices):
    def __init__(self) -> None:
        super().__init__(worker=FieldSpec((2,), "int64"))

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        info = torch.utils.data.get_worker_info()
        rows["worker"][:] = (info.id, info.num_workers) if info else (-1, -1)


@pytest.fixture
def open_loader(no_orphans: None) -> Iterator[Open]:
    """Makes loaders with two processes, and afterwards fails if anything of them is left."""
    before, shared = set(threading.enumerate()), _count_shared()
    loaders = []

    def make(dataset: Any, *, shuffle: bool = False, **options: Any) -> MicroBatchLoader:
        chosen = LoaderOptions(**(FORK | {"batch_size": 16, "micro_batch_size": 4} | options))
        loaders.append(MicroBatchLoader(dataset, chosen, shuffle=shuffle))
        return loaders[-1]

    yield make
    while loaders:
        loaders.pop().close()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert multiprocessing.active_children() == []
    assert set(threading.enumerate()) <= before
    assert _count_shared() <= shared


def _count_shared() -> int:
    """Descriptors of staging memory in this process."""
    links = Path("/proc/self/fd").iterdir()
    return sum("lit_data" in str(link.readlink()) for link in links if link.is_symlink())


def _expect_death(loader: MicroBatchLoader, match: str, *, within_s: float = 5) -> None:
    started_s = time.monotonic()
    with pytest.raises(WorkerDiedError, match=match):
        list(loader)
    assert time.monotonic() - started_s < within_s
    assert multiprocessing.active_children() == []


def _name_samples(at: int) -> str:
    first = at - at % 4
    return f"sample {first}, {first + 1}, {first + 2}, {first + 3} \\(images/{first}.png first\\)"


@pytest.mark.parametrize(("fault", "how", "hint", "at"), DEATHS)
def test_a_dead_worker_is_named_with_its_samples(
    fault: Callable[[], None], how: str, hint: str, at: int, open_loader: Open
) -> None:
    loader = open_loader(Faulty(fault, at))
    _expect_death(loader, rf"^worker \d+ {how} while it had {_name_samples(at)}. {hint}")
    # And with new workers.
    _expect_death(loader, rf"^worker \d+ {how} while it had {_name_samples(at)}")


@pytest.mark.parametrize(("fault", "at"), [(_sleep, 0), (_stop, 31), (_sleep, 63)])
def test_a_hanging_worker_is_named_and_killed_after_the_timeout(
    fault: Callable[[], None], at: int, open_loader: Open
) -> None:
    loader = open_loader(Faulty(fault, at), timeout_s=0.4)
    message = (
        rf"^worker \d+ was not ready with {_name_samples(at)} after timeout_s=0.4 s: is the disk"
    )
    _expect_death(loader, message, within_s=4)  # torch alone looks every 5 s


def test_a_worker_that_dies_during_a_training_step_is_reported_at_the_next_batch(
    open_loader: Open,
) -> None:
    dying, other = open_loader(Faulty(), shuffle=True), open_loader(Faulty(), shuffle=True)
    batches, others = iter(dying), iter(other)
    pids = {int(pid) for pid in next(batches)["pid"]}
    victim = next(process for process in multiprocessing.active_children() if process.pid in pids)
    next(others)
    victim.kill()
    victim.join(5)
    time.sleep(0.1)  # the step goes on
    assert sum(len(batch["index"]) for batch in others) == 48
    text = rf"^worker {victim.pid} was killed \(SIGKILL\) while it had no sample"
    with pytest.raises(WorkerDiedError, match=text):
        list(batches)
    assert sum(len(batch["index"]) for batch in other) == 64


def test_a_dataset_learns_which_worker_it_is_in(open_loader: Open) -> None:
    loader = open_loader(Asking())
    rows = [row for batch in loader for row in batch["worker"].tolist()]
    assert sorted({tuple(row) for row in rows}) == [(0, 2), (1, 2)]
    assert torch.utils.data.get_worker_info() is None


def test_after_a_bus_error_the_dataset_says_what_became_of_its_files(
    tmp_path: Path, open_loader: Open
) -> None:
    path = tmp_path / "pixels.bin"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    with pytest.raises(StoreCorruptError, match=r"pixels.bin was cut short: build it again"):
        list(open_loader(Files(path)))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_loader_that_is_dropped_takes_its_workers_along(kind: str, open_loader: Open) -> None:
    before = set(threading.enumerate())
    options = LoaderOptions(batch_size=16, worker_kind=kind, num_workers=2, start_method="fork")
    loader = MicroBatchLoader(Faulty(), options, shuffle=True)
    next(iter(loader))
    workers = (set(threading.enumerate()) - before) | set(multiprocessing.active_children())
    assert len(workers) >= 2
    del loader
    gc.collect()
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()


class ManyParts(Exception):
    """Cannot be built from one string."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("behind a lock")
        self.lock = threading.Lock()


def _raise_local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("from a function")


def _raise_many_parts() -> None:
    raise ManyParts("one", "two")


def _raise_locked() -> None:
    raise Locked


def _raise_missing() -> None:
    raise FileNotFoundError(2, "No such file", "images/31.png")


def _raise_data_error() -> None:
    raise DataError("images/31.png is empty")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_raise_local, "LocalError: from a function"),
        (_raise_many_parts, "ManyParts: one and two"),
        (_raise_locked, "Locked: behind a lock"),
        (_leave, "SystemExit: 3"),
    ],
)
def test_an_exception_that_cannot_cross_is_quoted(
    fault: Callable[[], None], message: str, open_loader: Open
) -> None:
    text = r"^loading sample 31 \(images/31.png\) failed:\nTraceback"
    with pytest.raises(DataError, match=text) as caught:
        list(open_loader(Faulty(fault), timeout_s=20))
    assert message in str(caught.value)
    assert f"in {fault.__name__}" in str(caught.value)


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [(_raise_missing, FileNotFoundError), (_raise_data_error, DataError), (_leave, DataError)],
)
def test_an_exception_that_can_cross_arrives_as_itself(
    fault: Callable[[], None], expected: type[Exception], kind: str, open_loader: Open
) -> None:
    with pytest.raises(expected) as caught:
        list(open_loader(Faulty(fault), worker_kind=kind))
    assert type(caught.value) is expected
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "loading sample 31 (images/31.png)" in told
    assert getattr(caught.value, "filename", "images/31.png") == "images/31.png"


class BadText(Faulty):
    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> Any:
        super().write_into(rows, indices, epoch)
        return {"name": [lambda: None for _ in indices]}


def test_text_that_cannot_be_sent_is_refused_and_does_not_hang(open_loader: Open) -> None:
    with pytest.raises(DataError, match=r"a part of a sample cannot be sent to the main process"):
        list(open_loader(BadText(), timeout_s=20))


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_error_of_the_consumer_is_left_alone(shuffle: bool, open_loader: Open) -> None:
    loader = open_loader(Faulty(), shuffle=shuffle)
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match=r"^the training step$"):
        batches.throw(RuntimeError("the training step"))
    assert torch.cat([batch["index"] for batch in loader]).sort().values.tolist() == list(range(64))


def test_a_ring_that_does_not_fit_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch, open_loader: Open
) -> None:
    monkeypatch.setattr("lit_data.loading.staging.available_memory_bytes", lambda: 2**20)
    message = "staging 4 batches of 16 samples needs 4 MiB and 1 MiB of memory are available: lower"
    with pytest.raises(ConfigError, match=message):
        list(open_loader(Indices(image=FieldSpec((2**16,), "uint8"))))
