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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from lit_data.app.launcher import STOPPED, SWEEP_JOB
from lit_data.app.result import FAILURE, Outcome, describe_failure, name_failure, read_failure
from lit_data.core.child_process import python_command, python_environment
from lit_data.core.errors import WorkerDiedError

_SAVING_S = 120.0  # for a job that is to stop: to finish its step and write a checkpoint
LEFTOVERS_S = 5.0  # how long processes may outlive the one that started them
_KILLED_S = 1.0  # until a killed process is gone
OUT_OF_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")


def run_process(
    arguments: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Run `python -m lit_data` in a process of its own, and leave none of its processes.

    Args:
        arguments: the rest of the command line.
        folder: of the job; it exists.
        variables: further ones of its environment.

    Raises:
        KeyboardInterrupt, SystemExit: this process was told to stop; the job was told as well, and
            has ended.
    """
    (folder / FAILURE).unlink(missing_ok=True)
    kills = _count_kernel_kills()
    process = subprocess.Popen(
        python_command("-m", "lit_data", *arguments),
        env=python_environment({SWEEP_JOB: str(folder), **(variables or {})}),
        stdin=subprocess.PIPE,  # closes with this process, at which the job ends
        start_new_session=True,
    )
    try:
        _wait(process)
    finally:
        _end_session(process)
    if process.returncode == 0:
        return Outcome(status="done")
    is_by_kernel = _count_kernel_kills() > kills
    failure = read_failure(folder)
    return failure or _describe_end(process.returncode, is_by_kernel=is_by_kernel)


@contextmanager
def reporting_to_sweep() -> Iterator[None]:
    """Tell the sweep why a job failed, and end with the sweep's process.

    For a job's process and its ranks; it does nothing in a process that no sweep started.
    """
    folder = os.environ.get(SWEEP_JOB, "")
    if folder and os.getsid(0) == os.getpid():  # the job, not one of its ranks
        threading.Thread(target=_end_with_sweep, name="end-with-sweep", daemon=True).start()
        with suppress(ValueError):  # not in the main thread
            # SLURM announces so, to all processes, that the time of submitit's job is nearly over.
            signal.signal(signal.SIGUSR2, _stop_soon)
    try:
        yield
    except (Exception, SystemExit) as error:
        # Hydra's job is left by SystemExit, whose cause is the error.
        cause = error.__cause__ if isinstance(error, SystemExit) else error
        if folder and isinstance(cause, Exception):
            _note_failure(Path(folder), cause)
        raise


def _note_failure(folder: Path, error: Exception) -> None:
    """Write failure.json, where the command itself came no further than its command line."""
    # Of several ranks, the first one knows why: a file that is there stays.
    with suppress(OSError), (folder / FAILURE).open("x", encoding="utf-8") as file:
        json.dump(asdict(describe_failure(error)), file)


def _stop_soon(number: int, frame: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _end_with_sweep() -> None:
    """Wait for the end of standard input, then let the job save, and kill what is left."""
    while os.read(sys.__stdin__.fileno() if sys.__stdin__ else 0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # what trains saves a checkpoint first
    time.sleep(_SAVING_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def end_descendants() -> None:
    """End what a launcher has started: first the jobs, which may save, then the rest."""
    children = psutil.Process().children(recursive=True)
    family = [child for child in children if not _is_tracker(child)]
    jobs = [child for child in family if _session_of(child.pid) == child.pid]
    for group, wait_s in ((jobs, _SAVING_S), (family, LEFTOVERS_S)):
        for child in group:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        _kill_after(group, wait_s)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for a job; a stop of this process is handed on, and the job may save."""
    try:
        process.wait()
    except (KeyboardInterrupt, SystemExit) as stop:
        is_ctrl_c = isinstance(stop, KeyboardInterrupt)
        process.send_signal(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SAVING_S)
        raise


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a job that is still there, and all that its session left behind."""
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    leftovers = [one for one in psutil.process_iter() if _session_of(one.pid) == process.pid]
    _kill_after(leftovers, LEFTOVERS_S)


def _kill_after(processes: Sequence[psutil.Process], wait_s: float) -> None:
    """Give processes some time to end, then kill those that are left."""
    stubborn = psutil.wait_procs(processes, timeout=wait_s)[1]
    for process in stubborn:
        with suppress(psutil.NoSuchProcess):
            process.kill()
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


def _describe_end(code: int, *, is_by_kernel: bool) -> Outcome:
    """Describe the end of a process that noted no failure: it was killed, or failed too early."""
    if code >= 0 and code not in STOPPED:
        return Outcome(status=name_failure(code), exit_code=code, reason="see its messages")
    reason = f"ended by {_name_signal(-code if code < 0 else code - 128)}"
    if is_by_kernel:
        reason += ", while the kernel ended processes because memory ran out"
    return Outcome(status="killed", exit_code=WorkerDiedError.exit_code, reason=reason)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _count_kernel_kills() -> int:
    """Return how many processes of this container the kernel ended for want of memory."""
    with suppress(OSError, ValueError):
        lines = dict(line.split() for line in OUT_OF_MEMORY_EVENTS.read_text().splitlines())
        return int(lines.get("oom_kill", 0))
    return 0
