"""One job: import the command, run it, write its summary."""

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write
from typing_extensions import override

from lit_data.app import find_module
from lit_data.app.configuration.names import allow_packages
from lit_data.app.configuration.words import escape_references, quote
from lit_data.app.launcher import STOPPED, is_first_rank, is_started_by_rank, let_first_rank_speak
from lit_data.app.machine import find_unfit_torchvision
from lit_data.app.report import add_report
from lit_data.app.result import (
    FAILURE,
    SUMMARY,
    PartlyDoneError,
    describe_failure,
    warning_after,
    write_summary,
)
from lit_data.core.errors import (
    LitDataError,
    WorkerDiedError,
    escape,
    find_headline,
    list_problems,
    settle_lines,
    show_path,
)
from lit_data.core.files import remove_parts, write_json, write_text
from lit_data.core.heap import keep_freed_memory, load_module

_OBSERVER = "child-process-observer"
_POLL_S = 0.2
PROBLEMS = "problems.txt"
GRACE_S = 5.0  # for the first rank to say itself what is wrong, and for the others to end
_STOPPED_S = 60.0  # for the first rank to save, where another was stopped by a signal
_ELSEWHERE = ": see its own message, if it could write one"

_OF_SWEEP = ("hydra.mode=", "hydra.sweep.dir=", "sweep.")


class RankWatch(threading.Thread):
    """Takes over the processes that Lightning would watch, and ends this one with them.

    Attributes:
        children: The other ranks of this machine, from rank 1 on.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="rank-watch")
        self.children: list[subprocess.Popen[bytes]] = []
        self._done = threading.Event()
        # Of a rank that the first one has started, which would otherwise work on without it.
        self._parent = os.getppid() if is_started_by_rank() else None

    def run(self) -> None:
        """Look at the ranks until they are needed no more."""
        while not self._done.wait(_POLL_S):
            if self._parent is not None and os.getppid() != self._parent:
                print("lit_data: rank 0 of this machine has ended", file=sys.stderr, flush=True)
                os._exit(WorkerDiedError.exit_code)
            self._take_over()
            failed = self._find_failed()
            if failed is None:
                continue
            wait_s = _STOPPED_S if failed[1] in STOPPED else GRACE_S
            if not self._done.wait(wait_s):
                self.end_others(wait_s=0)
                print(f"lit_data: {_describe(*failed)}", file=sys.stderr, flush=True)
                os._exit(WorkerDiedError.exit_code)  # the main thread hangs in a collective

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self.join()
        self._take_over()

    def describe_dead(self, *, wait_s: float) -> str:
        """Say which rank has failed and how; empty if none fails within this time."""
        until_s = time.monotonic() + wait_s
        failed = self._find_failed()
        while self._waits_for_cause(failed) and time.monotonic() < until_s:
            time.sleep(_POLL_S / 10)
            failed = self._find_failed()
        return _describe(*failed) if failed else ""

    def end_others(self, *, wait_s: float) -> None:
        """Wait for the ranks that are left, then kill them.

        They may hang in a collective and heed nothing else.
        """
        until_s = time.monotonic() + wait_s
        while any(child.poll() is None for child in self.children) and time.monotonic() < until_s:
            time.sleep(_POLL_S / 10)
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()

    def _find_failed(self) -> tuple[int, int] | None:
        """Rank and exit code of one that failed, if possible not just because another did."""
        consequence = None
        for rank, child in enumerate(self.children, start=1):
            code = child.poll()
            if code and code != WorkerDiedError.exit_code:
                return rank, code
            if code and consequence is None:
                consequence = rank, code
        return consequence

    def _waits_for_cause(self, failed: tuple[int, int] | None) -> bool:
        running = any(child.poll() is None for child in self.children)
        return running and (failed is None or failed[1] == WorkerDiedError.exit_code)

    def _take_over(self) -> None:
        for thread in threading.enumerate():
            if thread.name == _OBSERVER:
                observer: Any = thread
                self.children += observer._child_processes
                observer._child_processes = []  # which ends it


@contextmanager
def watching_ranks() -> Iterator[None]:
    """Watch the ranks of a job that may start other ones, or be one.

    Raises:
        WorkerDiedError: Another rank died, and this one lost its connection for that.
    """
    watch = RankWatch()
    watch.start()
    try:
        yield
    except Exception as error:
        if not _is_lost_connection(error):
            raise
        watch.stop()
        cause = watch.describe_dead(wait_s=GRACE_S)
        cause = cause or f"the connection to another rank broke{_ELSEWHERE}"
        raise WorkerDiedError(cause) from error
    finally:
        watch.stop()
        watch.end_others(wait_s=GRACE_S)


def _is_lost_connection(error: Exception) -> bool:
    dist = sys.modules.get("torch.distributed")  # not loaded, there is no connection
    if dist is not None and isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)


def _describe(rank: int, code: int) -> str:
    end = f"failed with exit code {code}"
    if code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
    return f"rank {rank} of this machine {end}{_ELSEWHERE}"


class _Guard(logging.Filter):
    """Lets no name act on the terminal or forge a line, and lists bad files in the run folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._problems = ""  # all that were logged so far
        if is_first_rank():
            (folder / PROBLEMS).unlink(missing_ok=True)  # of an earlier start in this folder

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_settled", False):  # by the filter of another handler
            return True
        if isinstance(record.args, tuple) and record.msg != "%s":
            record.args = tuple(map(_show_argument, record.args))
        text = record.getMessage()
        if record.name.startswith("lit_data"):
            text = settle_lines(self.add_place(text, getattr(record, "problems", ())))
        record.msg = "\n".join(map(escape, text.split("\n")))
        record.args = ()
        record.is_settled = True
        return True

    def add_place(self, text: str, problems: Sequence[tuple[str, str]]) -> str:
        """Write all problems into the run folder, and say where, before the headline."""
        if not problems or not is_first_rank():
            return text
        headline = find_headline(text)
        path = self._folder / PROBLEMS
        self._problems += f"{headline}\n{list_problems(problems).report()}\n\n"
        try:
            write_text(path, self._problems)
        except LitDataError:
            return text  # a full disk, say, is no reason to hide what is wrong
        lines = text.split("\n")
        lines.insert(lines.index(headline), f"  full list: {show_path(path)}")
        return "\n".join(lines)


def _show_argument(argument: object) -> object:
    return show_path(argument) if isinstance(argument, str | os.PathLike) else argument


@contextmanager
def _guarding(folder: Path) -> Iterator[None]:
    let_first_rank_speak()
    guard = _Guard(folder)
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(guard)
    try:
        yield
    except LitDataError as error:
        if error.problems:
            error.args = (guard.add_place(str(error), error.problems),)
        raise
    finally:
        for handler in handlers:
            handler.removeFilter(guard)


def run_job(cfg: DictConfig, *, flags: Sequence[str], packages: Sequence[str]) -> None:
    """Run the command of a configuration inside Hydra's job and print the path of its summary.

    Args:
        cfg: the configuration without Hydra's node.
        flags: options of the command line that are not overrides, such as `--config-dir FOLDER`.
        packages: packages whose targets are allowed too.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        with _guarding(folder):
            _run_command(cfg, folder, flags=flags, packages=packages)
    except Exception as error:
        unfit = find_unfit_torchvision(error)
        if unfit is None:
            raise
        raise unfit from error


def _run_command(
    cfg: DictConfig, folder: Path, *, flags: Sequence[str], packages: Sequence[str]
) -> None:
    started = time.perf_counter()
    failure = None
    module = load_module(find_module(cfg.command))
    try:
        with (
            noting_failure(cfg, folder),
            allow_packages(packages),
            watching_ranks(),
            _command_line_for_ranks(cfg.command, flags),
            _leaving_no_ranks(),
        ):
            if _computes_on_cpu(cfg):
                keep_freed_memory()
            metrics = module.run(cfg)
    except PartlyDoneError as error:
        metrics = error.metrics
        failure = error
    measured = {
        **metrics,
        "seconds": time.perf_counter() - started,
        "peak_rss_bytes": _measure_peak_rss_bytes(),
    }
    if is_first_rank():
        _end_run(cfg, folder, measured)
    if failure:
        raise failure


@contextmanager
def noting_failure(cfg: DictConfig, folder: Path) -> Iterator[None]:
    """Write failure.json (status, exit code, reason in one line) and the report on a failure.

    What an earlier start in this folder wrote at its end, or left unfinished, goes first.

    Args:
        cfg: The configuration.
        folder: Of the run.
    """
    if is_first_rank():
        for name in (FAILURE, SUMMARY):
            (folder / name).unlink(missing_ok=True)
        remove_parts(folder / "checkpoints")
    try:
        yield
    except PartlyDoneError:
        raise
    except Exception as error:
        if is_first_rank():
            # In a sweep another rank that failed first has written it, and knows the cause.
            if not (folder / FAILURE).exists():
                write_json(folder / FAILURE, asdict(describe_failure(error)))
            add_report(cfg, folder)
        raise


def _computes_on_cpu(cfg: DictConfig) -> bool:
    import torch  # not at the top: it takes a second, and the command has imported it by now

    is_told = OmegaConf.select(cfg, "trainer.accelerator") == "cpu"
    return is_told or not torch.accelerator.is_available()


def _end_run(cfg: DictConfig, folder: Path, metrics: Mapping[str, Any]) -> None:
    """Write the summary and the report, and print where they are; after ``fit`` each is guarded."""
    path = None
    with warning_after(cfg.command, "summary.json"):
        path = write_summary(folder, cfg.command, cfg.name, metrics)
    add_report(cfg, folder)
    if cfg.command == "fit":
        # Not at the top: it needs Lightning, which the command has imported by now.
        from lit_data.app.terminal import print_end

        with warning_after(cfg.command, "the table of scores"):
            print_end(metrics, folder)
    elif cfg.command in ("validate", "test"):
        from lit_data.app.terminal import print_quality, print_scores

        with warning_after(cfg.command, "the table of scores"):
            print_quality(folder)
            print_scores(metrics)
    if path is not None:
        print(path, flush=True)


@contextmanager
def _command_line_for_ranks(command: str, flags: Sequence[str]) -> Iterator[None]:
    """Let Lightning's launcher start the other ranks with this job's command line and folder.

    It runs `sys.argv[1:]` again and adds `hydra.run.dir`, read from Hydra's configuration. With the
    overrides as typed, every rank of a sweep's job would start the whole sweep again
    (Lightning-AI/pytorch-lightning#11300).
    """
    before = sys.argv
    hydra = HydraConfig.get()
    sys.argv = [before[0], *list_job_arguments(command, flags)]
    with read_write(hydra):  # type: ignore[arg-type]  # a DictConfig typed as its schema
        # Lightning puts it between these marks as it is.
        hydra.run.dir = escape_references(quote(hydra.runtime.output_dir, '"')[1:-1])
    try:
        yield
    finally:
        sys.argv = before


def list_job_arguments(command: str, flags: Sequence[str]) -> list[str]:
    """Return the command line of the job that runs now, without overrides of the sweep."""
    groups = HydraConfig.get().overrides
    overrides = [*_list_overrides(groups.hydra), *_list_overrides(groups.task)]
    remaining = [override for override in overrides if not override.startswith(_OF_SWEEP)]
    return [command, *flags, *remaining]


@contextmanager
def _leaving_no_ranks() -> Iterator[None]:
    """Put the environment back and end the process group.

    Or the next job of a sweep would not start its ranks.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _list_overrides(overrides: object) -> list[str]:
    # Interpolations stay as typed.
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def _measure_peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2): KiB on Linux
    return (peak + peak_of_children) * unit_bytes
