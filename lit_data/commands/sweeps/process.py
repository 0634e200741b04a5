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
from dataclasses import dataclass
from pathlib import Path

import psutil

from lit_data.child_process import python_command, python_environment
from lit_data.commands.sweeps.plan import Status
from lit_data.errors import (
    BatchMemoryError,
    LitDataError,
    WorkerDiedError,
    find_headline,
    settle_lines,
)

_VARIABLE = "LIT_DATA_SWEEP_JOB"  # in a job's environment: the file for the reason of a failure
_SAVING_S = (
    120.0  # how long a job that is told to stop may take to finish its step and write a checkpoint
)
LEFTOVERS_S = 5.0  # how long processes may outlive the one that started them
_KILLED_S = 1.0  # until a killed process is gone
OUT_OF_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended: its status, exit code, and one line that says why."""

    status: Status
    exit_code: int = 0
    reason: str = ""


def run_process(words: Sequence[str], folder: Path) -> Outcome:
    """Run a command line of `python -m lit_data` in a process of its own, and leave none of its
    processes.

    Args:
        words: the command line.
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
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _wait(process)
    finally:
        _end_session(process)
    outcome = _read_outcome(process.returncode, report, by_kernel=_count_kernel_kills() > kills)
    report.unlink(missing_ok=True)
    return outcome


def describe_failure(error: Exception) -> Outcome:
    """The outcome of a job that raised an error."""
    code = error.exit_code if isinstance(error, LitDataError) else 1
    if code == 1 and _ran_out_of_memory(error):
        code = BatchMemoryError.exit_code
    name = "" if isinstance(error, LitDataError) else f"{type(error).__name__}: "
    line = settle_lines(find_headline(str(error)))
    status: Status = "out of memory" if code == BatchMemoryError.exit_code else "failed"
    return Outcome(status=status, exit_code=code, reason=(name + line).rstrip(": "))


@contextmanager
def reporting_to_sweep() -> Iterator[None]:
    """In a job's process and its ranks: tell the sweep why the job failed, and end with the sweep's
    process.

    Does nothing in a process that no sweep started.
    """
    report = os.environ.get(_VARIABLE, "")
    if report and os.getsid(0) == os.getpid():  # the job, not one of its ranks
        threading.Thread(target=_end_with_sweep, name="end-with-sweep", daemon=True).start()
        with suppress(ValueError):  # not in the main thread
            # SLURM announces so, and to all processes, that the time of submitit's job is nearly
            # over.
            signal.signal(
                signal.SIGUSR2, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM)
            )
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


def end_descendants() -> None:
    """End what a launcher has started: first the jobs, which may save, then the rest."""
    family = [
        child for child in psutil.Process().children(recursive=True) if not _is_tracker(child)
    ]
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
        process.send_signal(
            signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SAVING_S)
        raise


def _end_session(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    left = [other for other in psutil.process_iter() if _session_of(other.pid) == process.pid]
    stubborn = psutil.wait_procs(left, timeout=LEFTOVERS_S)[1]
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
    """Whether it is one of the processes that free shared memory once all others have gone."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return True


def _read_outcome(code: int, report: Path, *, by_kernel: bool) -> Outcome:
    if code == 0:
        return Outcome(status="done")
    if code < 0 or code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        number = -code if code < 0 else code - 128
        more = ", while the kernel ended processes for want of memory" if by_kernel else ""
        killed = Outcome(
            status="killed",
            exit_code=WorkerDiedError.exit_code,
            reason=f"ended by {_name_signal(number)}{more}",
        )
        return _read_report(report) or killed
    return _read_report(report) or Outcome(
        status="out of memory" if code == BatchMemoryError.exit_code else "failed",
        exit_code=code,
        reason="its messages say why",
    )


def _read_report(report: Path) -> Outcome | None:
    try:
        return Outcome(**json.loads(report.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_report(report: Path, outcome: Outcome) -> None:
    with (
        suppress(OSError),
        report.open("x", encoding="utf-8") as file,
    ):  # of several ranks, the first one knows why
        json.dump(outcome.__dict__, file)


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
    """How many processes of this container the kernel has ended because memory ran out; 0 where it does not say."""
    with suppress(OSError, ValueError):
        lines = dict(line.split() for line in OUT_OF_MEMORY_EVENTS.read_text().splitlines())
        return int(lines.get("oom_kill", 0))
    return 0
