"""A dataset is read where its workers read it: no file of it is open in the main process before they start."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lit_data.core.errors import ConfigError, DataError, WorkerDiedError
from lit_data.loading import LoaderOptions, MicroBatchLoader
from tests.loading.rows import FORK

pytestmark = pytest.mark.timeout(120)

AUTO = {"start_method": "fork", "num_workers": 2}
SPAWN = FORK | {"start_method": "spawn"}
Pair = namedtuple("Pair", ["image", "label"])


class Lazy(Dataset[dict[str, int]]):
    """Opens a file at the first sample, and tells whether its reader is the process that did."""

    def __init__(self, length: int = 64) -> None:
        self.length = length
        self.file: Any = None
        self.opener = self.reads = 0

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        if self.file is None:
            self.file = os.fdopen(os.open(os.devnull, os.O_RDONLY), "rb")
            self.opener = os.getpid()
        self.reads += 1
        return {"index": index, "is_own": int(self.opener == os.getpid())}


class Alone(Dataset[Any]):
    """Calls a function for each sample, if it is not in the main process."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        self.main_process = os.getpid()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.main_process:
            return self.act() or index
        return index


def _raise() -> None:
    raise KeyError("no such image")


def _refuse() -> None:
    raise DataError("images/7.png is cut short")


def _raise_what_cannot_be_pickled() -> None:
    class Local(Exception):
        pass

    raise Local("odd")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    sys.exit(3)


def _hang() -> None:
    time.sleep(3600)


def _open(dataset: Any, *, shuffle: bool = False, **options: Any) -> MicroBatchLoader:
    chosen = LoaderOptions(**({"batch_size": 16, "timeout_s": 60} | options))
    return MicroBatchLoader(dataset, chosen, shuffle=shuffle)


def _are_own(batches: Any) -> bool:
    return all(bool(batch["is_own"].all()) for batch in batches)


@pytest.mark.parametrize("kind", [FORK, AUTO, {"start_method": "fork"}], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_that_is_opened_at_the_first_sample_belongs_to_one_worker(
    kind: dict[str, Any], shuffle: bool
) -> None:
    dataset = Lazy()
    loader = _open(dataset, shuffle=shuffle, **kind)
    assert loader.choice.kind == "process"
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert _are_own(loader)
    loader.close()
    assert (dataset.reads, dataset.file) == (0, None)


@pytest.mark.parametrize("make", [
    lambda: Subset(Lazy(), range(32)), lambda: ConcatDataset([Lazy(), Lazy()])
])  # fmt: skip
def test_datasets_within_datasets_are_not_read_here_either(make: Callable[[], Any]) -> None:
    loader = _open(make(), **FORK)
    assert _are_own(loader)
    loader.close()


@pytest.mark.parametrize("length", [8, 64])
def test_a_small_set_that_keeps_files_open_is_not_read_where_others_are_forked(length: int) -> None:
    dataset = Lazy()
    part = _open(Subset(dataset, range(length)), start_method="fork")
    assert part.choice.kind == "process"
    assert _are_own(part)
    whole = _open(dataset, **FORK)
    assert _are_own(whole)
    plain = _open(list(range(length)), start_method="fork")
    assert plain.choice.kind == "inline"


@pytest.mark.parametrize(("act", "error", "text"), [
    (_raise, KeyError, "no such image"),
    (_refuse, DataError, "images/7.png is cut short\n  while loading the first samples, in a sep"),
    (_raise_what_cannot_be_pickled, DataError, "(?s)while loading|loading the first .*Local: odd"),
    (_leave, DataError, "(?s)loading the first samples, in a separate process failed.*SystemExit: 3"),
    (_kill, WorkerDiedError, r"a process was killed \(SIGKILL\) while it read the first samples"),
])  # fmt: skip
def test_what_the_dataset_raises_before_the_workers_start_is_told(
    act: Callable[[], object], error: type[Exception], text: str, no_orphans: None
) -> None:
    with pytest.raises(error, match=text):
        list(_open(Alone(act), **FORK))
    assert multiprocessing.active_children() == []


def test_a_first_sample_that_hangs_ends_with_a_message(no_orphans: None) -> None:
    started_s = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"a process was not ready with the first samples.* after timeout_s=0.5 s"):  # fmt: skip
        list(_open(Alone(_hang), timeout_s=0.5, **FORK))
    assert time.monotonic() - started_s < 20
    assert multiprocessing.active_children() == []


def test_a_structure_that_cannot_be_sent_is_refused_with_its_class() -> None:
    local = namedtuple("local", ["value"])
    local.__qualname__ = "nowhere.local"
    samples = [local(number) for number in range(40)]
    with pytest.raises(DataError, match=r"nowhere.local.*cannot be sent to the main process"):
        list(_open(samples, **FORK))
    first, *_ = list(_open(samples, start_method="fork"))
    assert type(first) is local


def _load_in_daemon(pipe: Any, options: dict[str, Any]) -> None:
    try:
        loader = _open(Lazy(), **options)
        pipe.send((loader.choice.kind, sum(len(batch["index"]) for batch in loader)))
    except ConfigError as error:
        pipe.send(str(error))


def test_a_daemon_reads_in_its_main_thread_or_says_what_to_set() -> None:
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    for options, expected in ((AUTO, ("inline", 64)), (FORK, "this process is a daemon")):
        process = fork.Process(target=_load_in_daemon, args=(there, options), daemon=True)
        process.start()
        answer = here.recv()
        process.join()
        assert answer == expected or expected in answer


# --- workers that get a pickled copy


class Shared(Lazy):
    """Holds a lock, a number and a tensor that processes share."""

    def __init__(self, method: str) -> None:
        super().__init__()
        spawn = multiprocessing.get_context(method)
        self.epoch = spawn.Value("i", 3)
        self.images = torch.arange(64)

    def __getitem__(self, index: int) -> dict[str, int]:
        assert int(self.images[index]) == index
        with self.epoch.get_lock():
            return super().__getitem__(index) | {"epoch": self.epoch.value}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("make", [lambda method: Lazy(), Shared])
def test_a_lazily_opened_file_works_with_every_start_method(make: Any, method: str) -> None:
    loader = _open(make(method), **(FORK | {"start_method": method}))
    seen = loader.read(np.arange(4), 0)
    assert seen["index"].tolist() == [0, 1, 2, 3]
    assert _are_own(loader)
    loader.close()


def test_what_cannot_be_pickled_is_refused_with_a_cure_or_read_here() -> None:
    with tempfile.TemporaryFile() as file:
        dataset = Lazy()
        dataset.handle = file
        with pytest.raises(ConfigError, match=r"Lazy cannot be pickled, and with start_method=spawn .*: open files at the first sample"):  # fmt: skip
            list(_open(dataset, **SPAWN))
        loader = _open(dataset, start_method="spawn")
        assert sum(len(batch["index"]) for batch in loader) == 64
        assert "cannot be read in a separate process (ConfigError: Lazy" in loader.choice.reason


def test_records_of_one_file_are_right_with_many_workers(tmp_path: Path) -> None:
    path, length = tmp_path / "records.bin", 1000
    np.arange(length, dtype=np.int64)[:, None].repeat(1024, 1).tofile(path)

    class Records(Lazy):
        def __getitem__(self, index: int) -> Any:
            if self.file is None:
                self.file = path.open("rb")
            self.file.seek(index * 8192)
            return np.frombuffer(self.file.read(8192), np.int64).copy(), index

    loader = _open(Records(length), shuffle=True, **(FORK | {"num_workers": 4}))
    for values, indices in loader:
        assert torch.equal(values, indices[:, None].expand(-1, 1024))
    loader.close()
