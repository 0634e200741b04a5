"""Commands that start processes of their own, of which none outlives its time."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

import lit_data
from tests.helpers import fork_server

ROOT = Path(lit_data.__file__).parents[1]


def list_children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    """Processes that a command has started, without the server of the tests beside it."""
    children = psutil.Process(pid).children(recursive=recursive)
    return [child for child in children if child.name() != fork_server.NAME]


def run_family(
    words: list[str], *, limit_s: float, cwd: Path | None = None, **variables: str
) -> tuple[int, str]:
    """Exit code and output of a command; what is left of it and its children ends with it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"} | variables
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # which prints where each process is
        output, _ = process.communicate()
        pytest.fail(f"still running after {limit_s} s:\n{output}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output
