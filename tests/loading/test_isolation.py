"""What workers do not share: random numbers, threads, memory, and the pixels that they read."""

import gc
import os
import pickle
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
import torch

from lit_data.core.rng import Stream, random_words
from lit_data.core.types import Array, FieldSpec, Ints
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.loading.processes import Board, RowReader
from lit_data.loading.staging import Layout
from tests.loading.rows import FORK, Indices, Rows

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_runs_are_fast")]

SPAWN, FORKSERVER = FORK | {"start_method": "spawn"}, FORK | {"start_method": "forkserver"}
KINDS = [
    {"worker_kind": "inline", "num_workers": 0},
    {"worker_kind": "thread", "num_workers": 2},
    FORK,
    pytest.param(SPAWN, marks=pytest.mark.slow),
    pytest.param(FORKSERVER, marks=pytest.mark.slow),
]
WORKERS = KINDS[1:]
ISOLATED = [KINDS[0], *KINDS[2:]]


class Drawing(Indices):
    """Random numbers of our own streams; each worker reseeds the global generators differently."""

    def __init__(self) -> None:
        super().__init__(60, draw=FieldSpec((4,), "uint32"))
        self.main_process = os.getpid()

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        if os.getpid() != self.main_process:
            _reseed(os.getpid())
        super().write_into(rows, indices, epoch)
        rows["draw"][:] = random_words(7, Stream.USER, indices, epoch, 4)


class GlobalDrawing:
    """A user's own dataset, which draws from every global generator."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002
        if index % 7 == 0:
            _reseed(os.getpid())
        return {"index": index, "draw": np.array(draws)}


class Threads(Indices):
    """How many threads OpenCV and torch use where a sample is written."""

    def __init__(self) -> None:
        super().__init__(32, threads=FieldSpec((2,), "int64"))

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        cv2.resize(np.zeros((64, 64), np.uint8), (512, 512))
        rows["threads"][:] = cv2.getNumThreads(), torch.get_num_threads()


class FlatRecords(Indices):
    """Records in a flat array, and the private memory of whoever reads them."""

    def __init__(self, count: int) -> None:
        number = FieldSpec((), "int64")
        super().__init__(count, value=number, pid=number, bytes=number)
        self.values = np.arange(count, dtype=np.int64)

    def write_into(self, rows: Rows, indices: Ints, epoch: int) -> None:
        super().write_into(rows, indices, epoch)
        rows["value"][:] = self.values[indices]
        rows["pid"][:] = os.getpid()
        rows["bytes"][:] = psutil.Process().memory_full_info().uss


class Views:
    """Hands out views of a read-only map, as a store does."""

    def __init__(self, path: Path) -> None:
        self.images = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Array]:
        return {"image": np.asarray(self.images[index])}


def _reseed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def _global_state() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))  # noqa: NPY002


@pytest.fixture(autouse=True)
def _main_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OPENCV_FOR_THREADS_NUM", raising=False)
    yield
    gc.collect()


def _open(
    dataset: Any, kind: Mapping[str, Any], *, shuffle: bool = False, **options: Any
) -> MicroBatchLoader:
    chosen = LoaderOptions(batch_size=16, micro_batch_size=4, **kind, **options)
    return MicroBatchLoader(dataset, chosen, shuffle=shuffle)


def _epochs(loader: MicroBatchLoader, count: int = 3) -> list[list[list[Any]]]:
    """The samples of some epochs, sorted by index."""
    epochs = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        rows = []
        for batch in loader:
            rows += map(list, zip(batch["index"].tolist(), batch["draw"].tolist(), strict=True))
        epochs.append(sorted(rows))
    loader.close()
    return epochs


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_samples_do_not_depend_on_what_a_worker_seeds(kind: dict[str, Any]) -> None:
    before = _global_state()
    epochs = _epochs(_open(Drawing(), kind, shuffle=True))
    assert _global_state() == before
    assert epochs == _epochs(_open(Drawing(), {"num_workers": 0}))
    assert len({str(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("kind", ISOLATED, ids=str)
def test_a_users_global_draws_depend_on_seed_epoch_and_index_alone(kind: dict[str, Any]) -> None:
    before = _global_state()
    epochs = _epochs(_open(GlobalDrawing(), kind, shuffle=True))
    assert _global_state() == before
    _reseed(5)
    assert epochs == _epochs(_open(GlobalDrawing(), {"num_workers": 0}))
    assert len({str(epoch) for epoch in epochs}) == 3
    assert len({str(draw) for epoch in epochs for _, draw in epoch}) == 180


@pytest.mark.parametrize("kind", WORKERS, ids=str)
def test_a_worker_has_one_thread_and_the_main_process_keeps_its_own(kind: dict[str, Any]) -> None:
    counts = cv2.getNumThreads(), torch.get_num_threads()
    try:
        cv2.setNumThreads(3)
        torch.set_num_threads(2)
        # This starts OpenCV's threads before a fork.
        cv2.resize(np.zeros((4096, 4096, 3), np.uint8), (8192, 2048))
        loader = _open(Threads(), kind, timeout_s=30)
        seen = torch.cat([batch["threads"] for batch in loader])
        loader.close()
        assert (cv2.getNumThreads(), torch.get_num_threads()) == (3, 2)
    finally:
        cv2.setNumThreads(counts[0])
        torch.set_num_threads(counts[1])
    assert set(seen[:, 0].tolist()) <= {0, 1}
    assert set(seen[:, 1].tolist()) == {1}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_a_transform_that_writes_into_the_batch_leaves_the_store_alone(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "images.npy"
    np.save(path, np.arange(40 * 6, dtype=np.uint8).reshape(40, 2, 3))
    before = path.read_bytes()
    loader = _open(Views(path), kind)
    for number, batch in enumerate(loader):
        images = batch["image"]
        expected = np.load(path)[16 * number :][: len(images)]
        images += 1
        assert np.array_equal(images.numpy(), expected + 1)
    loader.close()
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FORK, SPAWN], ids=str)
def test_private_memory_of_a_worker_stays_flat_over_a_million_records(kind: dict[str, Any]) -> None:
    options = LoaderOptions(batch_size=8192, micro_batch_size=2048, **kind)
    loader = MicroBatchLoader(FlatRecords(10**6), options, shuffle=True)
    seen = {}
    total = 0
    for batch in loader:
        total += int(batch["value"].sum())
        pids, sizes = batch["pid"][::2048].tolist(), batch["bytes"][::2048].tolist()
        for pid, nbytes in zip(pids, sizes, strict=True):
            seen.setdefault(pid, []).append(nbytes)
    loader.close()
    assert total == sum(range(10**6))
    assert len(seen) == 2
    for nbytes in seen.values():
        assert max(nbytes) - nbytes[0] <= 20 * 2**20


def test_what_goes_to_a_spawned_worker_is_small_beside_the_dataset() -> None:
    dataset = Drawing()
    reader = RowReader(dataset, Layout(dataset.fields), Board(8))
    assert len(pickle.dumps(reader)) < 4096


_MANY_FILES = """
    import resource, sys
    import numpy as np
    from lit_data.core.errors import WorkerDiedError
    from lit_data.loading import LoaderOptions, MicroBatchLoader
    from lit_data.core.types import FieldSpec

    class Numbers:
        fields = {"index": FieldSpec((), "int64")}
        def __len__(self):
            return 4000
        def write_into(self, rows, indices, epoch):
            rows["index"][:] = indices

    limit = int(sys.argv[1])
    options = LoaderOptions(
        batch_size=8, worker_kind="process", num_workers=2, start_method="fork", prefetch_batches=4
    )
    loader = MicroBatchLoader(Numbers(), options, shuffle=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        kept = list(loader)
        print(len(kept), sorted(int(i) for b in kept for i in b["index"]) == list(range(4000)))
    except WorkerDiedError as error:
        print(error)
    loader.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "expected"),
    [(64, "500 True\n"), (14, "2 workers cannot run: this process may open 14 files (ulim")],
)
def test_few_file_descriptors_are_enough_or_the_message_names_limit_and_need(
    limit: int, expected: str
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_MANY_FILES), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(expected)
    assert done.stderr == ""
