"""Building a sparse store while processes are killed, die, race each other or run out of room."""

import gzip
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lit_data.core.errors import WorkerDiedError
from lit_data.wings.volumes import SparseStore
from lit_data.wings.volumes.files import sparse_store
from lit_data.wings.volumes.files import volume as volume_module
from lit_data.wings.volumes.files.sparse_file import StoredVolume
from tests.wings.volumes.files.scans import build_store, check_store, write_scans

# Children are forked, so that they begin in a millisecond; they run no thread that was there
# before.
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]

LIMIT_S = 60
WRITES = ("open", "mkdir", "write", "fsync", "pread", "pwrite", "rename")
CALLS = (*WRITES, "rmdir", "unlink", "posix_fallocate")


@pytest.fixture(autouse=True)
def many_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_module, "SLAB_BYTES", 4000)


def _run_in_child(task: Callable[[], object]) -> str:
    """What a task raised in a forked process; "done", or "" if it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        text = "done"
        try:
            task()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


def _kill_at(call: int, task: Callable[[], object]) -> None:
    """Do a task, and die at its n-th call of the file system."""
    left = [call]

    def watch(real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **named)

        return watched

    for name in CALLS:
        setattr(os, name, watch(getattr(os, name)))
    task()


def test_a_build_that_is_killed_anywhere_is_resumed_and_never_half_read(tmp_path: Path) -> None:
    volumes = write_scans(tmp_path, 3)
    draws = random.Random(0)
    killed = 0
    for call in (*range(1, 8), *draws.sample(range(8, 250), 20)):
        killed += _run_in_child(lambda n=call: _kill_at(n, lambda: build_store(tmp_path))) == ""
        for path in (tmp_path / "cache").rglob("*.voxels"):
            volume = volumes[int(Path(SparseStore([path]).name(0)).stem[1:])]
            np.testing.assert_array_equal(StoredVolume(path).map().values, volume[volume > 500])
            if draws.random() < 0.7:
                shutil.rmtree(path)
    assert killed >= 10
    check_store(build_store(tmp_path), volumes)
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert (
        sorted(path.suffix for path in folder.iterdir() if path.name != ".lock") == [".voxels"] * 3
    )


def test_workers_go_when_their_parent_is_killed_and_the_rest_is_built_later(tmp_path: Path) -> None:
    volumes = write_scans(tmp_path, 12)
    code = f"""
from pathlib import Path
from lit_data.wings.volumes import IndexOptions, SparseStore, find_volumes
from lit_data.wings.volumes.files import volume
volume.SLAB_BYTES = 4000
options = IndexOptions(low_hu=500)
SparseStore.build(find_volumes({str(tmp_path / "ct")!r}), {str(tmp_path / "cache")!r}, options=options, processes=2)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        ends_s, workers = time.monotonic() + LIMIT_S, list[psutil.Process]()
        while (
            not (found := list((tmp_path / "cache").glob("*/*.voxels")))
            and time.monotonic() < ends_s
        ):
            workers = max(
                workers, psutil.Process(parent.pid).children(), key=len
            )  # on a slow machine all may end here
            time.sleep(0.002)
        parent.kill()
    assert found
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=LIMIT_S)[1] == []
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.voxels")}
    check_store(build_store(tmp_path), volumes)
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_processes_that_build_at_the_same_time_make_each_file_once(tmp_path: Path) -> None:
    volumes = write_scans(tmp_path, 4)
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                check_store(build_store(tmp_path), volumes)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert len(list((tmp_path / "cache").rglob("*.voxels"))) == 4


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path, processes: int) -> None:
    write_scans(tmp_path, 2)

    def build() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        build_store(tmp_path, processes=processes)

    assert _run_in_child(build).startswith("StoreSpaceError: ")
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.name for path in left if path.name != ".lock"] == []


def test_a_dead_worker_is_reported_with_its_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scans(tmp_path, 8)
    # The processes are forked, so they die of the replacement.
    monkeypatch.setattr(sparse_store, "write_volume", lambda *_: os._exit(9))
    message = r"v0\d\.npy: a process was killed while it indexed this volume or a neighboring one"
    with pytest.raises(WorkerDiedError, match=message):
        build_store(tmp_path, processes=2)


BIG = 512
MEASURE = """
import resource, sys
from lit_data.wings.volumes import IndexOptions, SparseStore, find_volumes
options = IndexOptions(low_hu=float(sys.argv[3]))
store = SparseStore.build(find_volumes(sys.argv[1]), sys.argv[2], options=options, processes=2)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, int(store.counts.sum()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "low_hu", "points"), [("npy", -2000, BIG**3 + 2 * BIG**2), ("nii.gz", 300, 88**3)]
)
def test_a_process_stays_under_600_mb_whatever_share_is_occupied(
    tmp_path: Path, kind: str, low_hu: int, points: int
) -> None:
    volume = np.lib.format.open_memmap(tmp_path / "v.npy", "w+", np.int16, (BIG, BIG, BIG))
    volume[200:288, 200:288, 200:288] = 1000
    np.save(tmp_path / "w.npy", volume[:2])
    if kind == "npy":
        np.save(tmp_path / "v_labels.npy", (volume > 0).astype(np.uint8) + 1)
    else:
        nib = pytest.importorskip("nibabel")
        (tmp_path / "v.npy").unlink()
        with gzip.open(tmp_path / "v.nii.gz", "wb", compresslevel=1) as stream:
            nib.Nifti1Image(volume.T, np.eye(4)).to_stream(stream)
    del volume
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(tmp_path / "cache"), str(low_hu)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S, check=True)
    shutil.rmtree(tmp_path)
    peak_bytes, found = map(int, done.stdout.split())
    assert found == points
    assert peak_bytes < 600e6
