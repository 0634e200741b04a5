"""What a run leaves beside its summary: failure.json if it failed, and report.html."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig

from lit_data.commands.launcher import is_first_rank
from lit_data.commands.result import PartlyDoneError
from lit_data.commands.sweeps.process import describe_failure
from lit_data.files import write_json

log = logging.getLogger(__name__)


@contextmanager
def noting_failure(cfg: DictConfig, folder: Path) -> Iterator[None]:
    """Write failure.json (status, exit code, reason in one line) and the report if what runs within fails.

    Args:
        cfg: The configuration.
        folder: Of the run.
    """
    if is_first_rank():
        (folder / "failure.json").unlink(missing_ok=True)  # of an earlier start in this folder
    try:
        yield
    except PartlyDoneError:
        raise
    except Exception as error:
        if is_first_rank():
            write_json(folder / "failure.json", asdict(describe_failure(error)))
            add_report(cfg, folder)
        raise


@contextmanager
def warning_after(command: str, what: str = "the end of the run") -> Iterator[None]:
    """Let nothing that comes after training end a run: of an error there is a warning, and the exit code stays 0.

    Args:
        command: Errors of commands other than ``fit``, whose result is what they write, pass through.
        what: What may be missing then.
    """
    try:
        yield
    except Exception as error:
        if command != "fit":
            raise
        log.warning("%s: %s: %s; training itself is done", what, type(error).__name__, error, exc_info=error)


def add_report(cfg: DictConfig, folder: Path) -> None:
    """Write report.html of a run or a sweep where the configuration asks for it; it never fails a run."""
    if not cfg.get("report", False):
        return
    from lit_data.commands.report import write_report  # not for commands without one

    try:
        log.debug("report: %s", write_report([folder]))
    except Exception:
        log.exception("no report could be written of %s", folder)
