"""A job in a process of its own: how it ended, and what it leaves behind."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_data.app.result import describe_failure
from lit_data.app.sweeps import process as sweep_process
from lit_data.app.sweeps.process import run_process
from lit_data.core.errors import BatchMemoryError, StoreSpaceError


@pytest.mark.parametrize(
    ("error", "status", "code", "reason"),
    [
        (StoreSpaceError("no room"), "failed", 4, "no room"),
        (BatchMemoryError("too large\nmore"), "out of memory", 5, "too large"),
        (RuntimeError("CUDA out of memory"), "out of memory", 5, "RuntimeError: CUDA out of m"),
        (KeyError(), "failed", 1, "KeyError"),
    ],
)
def test_a_failure_is_one_line(error: Exception, status: str, code: int, reason: str) -> None:
    import torch  # noqa: F401 - its texts are looked at where a job has imported it

    outcome = describe_failure(error)
    assert (outcome.status, outcome.exit_code) == (status, code)
    assert outcome.reason.startswith(reason)


class _Ended:
    """Stands for a job's process that has ended."""

    pid, stdin = 2**22 + 1, None  # more than the largest number of a process

    def __init__(self, code: int) -> None:
        self.returncode = code

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    poll = wait


BY_KERNEL = "while the kernel ended processes because memory ran out"


@pytest.mark.parametrize(
    ("code", "by_kernel", "status", "reason"),
    [
        (-signal.SIGKILL, True, "killed", f"ended by SIGKILL, {BY_KERNEL}"),
        (-signal.SIGSEGV, False, "killed", "ended by SIGSEGV"),
        (128 + signal.SIGTERM, False, "killed", "ended by SIGTERM"),
        (5, False, "out of memory", "see its messages"),
        (9, False, "failed", "see its messages"),
        (0, True, "done", ""),
    ],
)
def test_how_a_process_ended(
    code: int, by_kernel: bool, status: str, reason: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom_kill 4\n")
    monkeypatch.setattr(sweep_process, "OUT_OF_MEMORY_EVENTS", events)

    def start(*words: object, **options: object) -> _Ended:
        events.write_text(f"low 0\noom_kill {4 + by_kernel}\n")
        return _Ended(code)

    monkeypatch.setattr(subprocess, "Popen", start)
    outcome = run_process(["show"], tmp_path)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert outcome.exit_code == {"killed": 6, "out of memory": 5}.get(status, code)


def test_what_a_job_leaves_behind_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000']); open(sys.argv[-1], 'w').write(str(p.pid))"
    start = subprocess.Popen

    def leave(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-S", "-c", code, str(note)], **options)

    monkeypatch.setattr(sweep_process.subprocess, "Popen", leave)
    monkeypatch.setattr(sweep_process, "LEFTOVERS_S", 0.05)
    assert run_process([], tmp_path).status == "done"
    command_line = Path(f"/proc/{note.read_text()}/cmdline")
    # It may have ended without being fetched yet by whoever adopted it.
    assert not command_line.exists() or not command_line.read_bytes()
