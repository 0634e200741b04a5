"""A rank that dies ends the others within seconds, and the first one says which it was."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lit_data.app import job as rank_watch
from lit_data.app.job import watching_ranks
from lit_data.core.errors import ConfigError, WorkerDiedError

ROOT = Path(__file__).resolve().parents[1]
LOST = "[../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:33168: Connection reset by peer"
LINGER = "import time; time.sleep(600)"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rank_watch, "GRACE_S", 0.5)
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "rank-watch"]


def _fail(error: Exception, ranks: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    """A job that ends with an error, once these ranks have ended."""
    with watching_ranks():
        for rank in ranks:
            rank.wait()
        raise error


def _start(*codes: str) -> list[subprocess.Popen[bytes]]:
    """Ranks from 1 on that run these lines, observed as Lightning does it."""
    ranks = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code in codes]
    _ChildProcessObserver(main_pid=os.getpid(), child_processes=list(ranks)).start()
    return ranks


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("raise SystemExit(3)", "failed with exit code 3"),
    ],
)
def test_a_broken_connection_is_told_as_the_rank_that_died(code: str, how: str) -> None:
    ranks = _start(LINGER, code)
    with pytest.raises(
        WorkerDiedError, match=rf"^rank 2 of this machine {how}: see its own message"
    ):
        _fail(RuntimeError(LOST), ranks[1:])
    assert ranks[0].returncode == -9


def test_a_rank_that_failed_since_another_did_is_not_named() -> None:
    ranks = _start("raise SystemExit(6)", "raise SystemExit(1)")
    with pytest.raises(WorkerDiedError, match="rank 2 of this machine failed with exit code 1"):
        _fail(RuntimeError(LOST), ranks)


def test_a_rank_that_another_launcher_started_knows_only_that_it_lost_one() -> None:
    with pytest.raises(
        WorkerDiedError, match=r"^the connection to another rank broke: see its own"
    ):
        _fail(RuntimeError(LOST))


@pytest.mark.parametrize("error", [ConfigError("of this rank"), RuntimeError("of this rank")])
def test_an_error_of_the_first_rank_is_its_own(error: Exception) -> None:
    (rank,) = _start(LINGER)
    with pytest.raises(type(error), match=r"^of this rank$"):
        _fail(error)
    assert rank.returncode == -9


def test_ranks_have_time_to_end() -> None:
    (rank,) = _start("import sys; sys.stdin.read(0)")
    with watching_ranks():
        pass
    assert rank.returncode == 0


HANGS = f"""
import subprocess, sys, threading
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer
from lit_data.app import job as rank_watch
rank_watch.GRACE_S = 0.1
with rank_watch.watching_ranks():
    ranks = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code in ({LINGER!r}, "raise SystemExit(4)")]
    print(ranks[0].pid, flush=True)
    _launch_process_observer(ranks)
    threading.Event().wait()
"""


@pytest.mark.slow
def test_a_first_rank_that_hangs_is_ended_with_the_exit_code_of_a_dead_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == WorkerDiedError.exit_code
    assert done.stderr.startswith(
        "lit_data: rank 2 of this machine failed with exit code 4: see its"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
