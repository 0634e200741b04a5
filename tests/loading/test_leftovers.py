"""What stays behind after a run, however it ends: nothing."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)

_PROGRAM = """
    import os, sys, time
    import numpy as np
    from lit_data.loading import LoaderOptions, MicroBatchLoader
    from lit_data.core.types import FieldSpec

    class Numbers:
        fields = {"index": FieldSpec((), "int64"), "image": FieldSpec((64, 64), "uint8")}

        def __init__(self, hanging):
            self.hanging = hanging

        def __len__(self):
            return 200

        def write_into(self, rows, indices, epoch):
            rows["index"][:] = indices
            if self.hanging and 190 in indices:
                time.sleep(3600)

    if __name__ == "__main__":
        kind, method, end = sys.argv[1:]
        options = LoaderOptions(
            batch_size=16, micro_batch_size=4, num_workers=2, worker_kind=kind, start_method=method
        )
        loader = MicroBatchLoader(Numbers(end == "hang"), options, shuffle=True)
        for number, batch in enumerate(loader):
            if number == 0:
                import multiprocessing
                print(*(process.pid for process in multiprocessing.active_children()), flush=True)
            if end == "break":
                break
            if end == "error":
                raise KeyError("the training step")
            if end in ("hang", "wait"):
                sys.stdin.read()
        print("end")
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, no_orphans: None) -> Iterator[Path]:
    """Where the program may leave temporary files, and must not; it lies beside.

    Short names: the socket of a fork server has a path of 108 characters at most.
    """
    parent = tmp_path_factory.mktemp("t")
    (parent / "program.py").write_text(textwrap.dedent(_PROGRAM))
    folder = parent / "t"
    folder.mkdir()
    yield folder
    # A fork server's socket: Python's own, and empty.
    assert [path for path in folder.iterdir() if not path.name.startswith("pymp-")] == []


def _start(
    folder: Path, kind: str, method: str, end: str
) -> tuple["subprocess.Popen[bytes]", list[psutil.Process]]:
    """The program and its workers, once it has its first batch."""
    program = subprocess.Popen(
        [sys.executable, str(folder.parent / "program.py"), kind, method, end],
        bufsize=0,  # or what follows the first line is lost
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert program.stdout is not None
    workers = []
    for pid in program.stdout.readline().split():
        try:
            workers.append(psutil.Process(int(pid)))
        except psutil.NoSuchProcess:
            continue  # the program has ended by now
    return program, workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "end"),
    [
        ("thread", "auto", "break"),
        ("thread", "auto", "error"),
        ("process", "fork", "normal"),
        ("process", "fork", "break"),
        ("process", "fork", "error"),
        ("process", "spawn", "break"),
        ("process", "forkserver", "error"),
    ],
)
def test_a_program_that_never_closes_its_loader_ends_and_leaves_nothing(
    kind: str, method: str, end: str, folder: Path
) -> None:
    program, workers = _start(folder, kind, method, end)
    output, errors = program.communicate(timeout=30)
    assert psutil.wait_procs(workers, timeout=6)[1] == []
    if end == "error":
        assert (program.returncode, output) == (1, b"")
        assert errors.endswith(b"KeyError: 'the training step'\n")
        assert errors.count(b"Traceback") == 1
    else:
        assert (program.returncode, output, errors) == (0, b"end\n", b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "end"),
    [("fork", "wait"), ("fork", "hang"), ("spawn", "hang"), ("forkserver", "wait")],
)
def test_workers_end_after_the_main_process_was_killed(method: str, end: str, folder: Path) -> None:
    program, workers = _start(folder, "process", method, end)
    helpers = psutil.Process(program.pid).children(recursive=True)
    assert len(workers) == 2
    program.kill()
    program.communicate(timeout=10)
    assert psutil.wait_procs([*workers, *helpers], timeout=6)[1] == []


@pytest.mark.slow
def test_starts_after_a_kill_just_work(folder: Path) -> None:
    for _ in range(2):
        program, workers = _start(folder, "process", "fork", "wait")
        program.send_signal(signal.SIGKILL)
        program.communicate(timeout=10)
        again, _ = _start(folder, "process", "fork", "normal")
        output, errors = again.communicate(timeout=30)
        assert (again.returncode, output, errors) == (0, b"end\n", b"")
        assert psutil.wait_procs(workers, timeout=6)[1] == []


def test_a_forked_process_that_lets_a_loader_go_leaves_its_workers_alone() -> None:
    script = """
        import gc, os, torch
        from lit_data.loading import LoaderOptions, MicroBatchLoader

        options = LoaderOptions(batch_size=5, worker_kind="process", num_workers=2, start_method="fork")
        loader = MicroBatchLoader(torch.arange(64), options, shuffle=True)
        batches = iter(loader)
        next(batches)
        pid = os.fork()
        if not pid:
            del batches, loader
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print(len(list(batches)))
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("12\n", "")
