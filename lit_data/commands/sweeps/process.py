"""A job of a sweep in a process of its own: its end, whatever it is, is the end of that job alone.

The process is a plain run of the command with the job's own overrides and folder, as one would type
it, so it may start ranks and workers as any run does. It leads a session of its own: a Ctrl-C at
the terminal reaches it once, through the sweep, and what it leaves behind is found by the session's
number. Its standard input is a pipe that closes when the sweep's process ends, even by SIGKILL.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

from lit_data.child_process import python_command, python_environment
from lit_data.errors import (
    BatchMemoryError,
    LitDataError,
    WorkerDiedError,
    find_headline,
    settle_lines,
)

Status = Literal["running", "done", "failed", "out of memory", "killed", "interrupted", "not run"]

_VARIABLE: Final = (
    "LIT_DATA_SWEEP_JOB"  # in a job's environment: the file for the reason of a failure
)
_SAVING_S: Final = (
    120.0  # for a job that is told to stop: to finish its step and write a checkpoint
)
LEFTOVERS_S = 5.0  # how long processes may outlive the one that started them
_KILLED_S: Final = 1.0  # until a killed process is gone
OUT_OF_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of a job: its status, exit code, and one line that says why."""

    status: Status
    exit_code: int = 0
    reason: str = ""


def run_process(words: Sequence[str], folder: Path) -> Outcome:
    """Run `python -m lit_data` in a process of its own, and leave none of its processes.

    Args:
        words: the rest of the command line.
        folder: an existing folder for the message about a failure.

    Raises:
        KeyboardInterrupt, SystemExit: this process was told to stop; the job was told as well, and
            has ended.
    """
    report = folder / ".failure.json"
    report.unlink(missing_ok=True)
    kills = _count_kernel_kills()
    process = subprocess.Popen(
        python_command("-m", "lit_data", *words),
        env=python_environment({_VARIABLE: str(report)}),
        stdin=subprocess.PIPE,  # closes with this process, at which the job ends
        start_new_session=True,
    )
    try:
        _wait(process)
    finally:
        _end_session(process)
    is_by_kernel = _count_kernel_kills() > kills
    outcome = _read_outcome(process.returncode, report, is_by_kernel=is_by_kernel)
    report.unlink(missing_ok=True)
    return outcome


def describe_failure(error: Exception) -> Outcome:
    """Return the outcome of a job that raised an error."""
    code, name = 1, f"{type(error).__name__}: "
    if isinstance(error, LitDataError):
        code, name = error.exit_code, ""
    if code == 1 and _ran_out_of_memory(error):
        code = BatchMemoryError.exit_code
    line = settle_lines(find_headline(str(error)))
    reason = f"{name}{line}".rstrip(": ")
    return Outcome(status=_name_failure(code), exit_code=code, reason=reason)


def _name_failure(code: int) -> Status:
    return "out of memory" if code == BatchMemoryError.exit_code else "failed"


@contextmanager
def reporting_to_sweep() -> Iterator[None]:
    """Tell the sweep why a job failed, and end with the sweep's process.

    For a job's process and its ranks; it does nothing in a process that no sweep started.
    """
    report = os.environ.get(_VARIABLE, "")
    if report and os.getsid(0) == os.getpid():  # the job, not one of its ranks
        threading.Thread(target=_end_with_sweep, name="end-with-sweep", daemon=True).start()
        with suppress(ValueError):  # not in the main thread
            # SLURM announces so, to all processes, that the time of submitit's job is nearly over.
            signal.signal(signal.SIGUSR2, _stop_soon)
    try:
        yield
    except Exception as error:
        if report:
            _write_report(Path(report), describe_failure(error))
        raise
    except SystemExit as stop:
        if report and isinstance(stop.__cause__, Exception):
            _write_report(Path(report), describe_failure(stop.__cause__))
        raise


def _stop_soon(number: int, frame: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def end_descendants() -> None:
    """End what a launcher has started: first the jobs, which may save, then the rest."""
    children = psutil.Process().children(recursive=True)
    family = [child for child in children if not _is_tracker(child)]
    jobs = [child for child in family if _session_of(child.pid) == child.pid]
    for group, wait_s in ((jobs, _SAVING_S), (family, LEFTOVERS_S)):
        for child in group:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(group, timeout=wait_s)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait()
    except (KeyboardInterrupt, SystemExit) as stop:
        is_ctrl_c = isinstance(stop, KeyboardInterrupt)
        process.send_signal(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SAVING_S)
        raise


def _end_session(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    leftovers = [one for one in psutil.process_iter() if _session_of(one.pid) == process.pid]
    stubborn = psutil.wait_procs(leftovers, timeout=LEFTOVERS_S)[1]
    for other in stubborn:
        with suppress(psutil.NoSuchProcess):
            other.kill()
    psutil.wait_procs(stubborn, timeout=_KILLED_S)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _is_tracker(process: psutil.Process) -> bool:
    """Return True if a process frees shared memory once all others have gone."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return True


def _read_outcome(code: int, report: Path, *, is_by_kernel: bool) -> Outcome:
    if code == 0:
        return Outcome(status="done")
    reported = _read_report(report)
    if reported is not None:
        return reported
    if code >= 0 and code not in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        reason = "its messages say why"
        return Outcome(status=_name_failure(code), exit_code=code, reason=reason)
    reason = f"ended by {_name_signal(-code if code < 0 else code - 128)}"
    if is_by_kernel:
        reason += ", while the kernel ended processes for want of memory"
    return Outcome(status="killed", exit_code=WorkerDiedError.exit_code, reason=reason)


def _read_report(report: Path) -> Outcome | None:
    try:
        return Outcome(**json.loads(report.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_report(report: Path, outcome: Outcome) -> None:
    # Of several ranks, the first one knows why: a file that is there stays.
    with suppress(OSError), report.open("x", encoding="utf-8") as file:
        json.dump(asdict(outcome), file)


def _end_with_sweep() -> None:
    while os.read(sys.__stdin__.fileno() if sys.__stdin__ else 0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # what trains saves a checkpoint first
    time.sleep(_SAVING_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ran_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from lit_data.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)


def _count_kernel_kills() -> int:
    """Return how many processes of this container the kernel ended for want of memory."""
    with suppress(OSError, ValueError):
        lines = dict(line.split() for line in OUT_OF_MEMORY_EVENTS.read_text().splitlines())
        return int(lines.get("oom_kill", 0))
    return 0
