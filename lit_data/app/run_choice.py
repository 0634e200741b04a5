"""Run of ``fit`` that a command takes where none is named: the best one that came to something."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_data.app.result import FAILURE, find_direction, find_monitor, find_summary, read_number
from lit_data.app.run_folder import Written, list_checkpoints
from lit_data.app.untrusted import as_dict, load
from lit_data.core.errors import DataError, show_path
from lit_data.core.plain import parse_json, parse_yaml

log = logging.getLogger(__name__)

_ENDED_BADLY = ("failed", "out of memory", "killed")


@dataclass(frozen=True)
class FitRun:
    """A run of ``fit`` with a checkpoint, as its files describe it.

    Attributes:
        written: The checkpoint.
        flaw: Why no command takes it unasked; empty where one may.
        has_ended: It came to its end.
        monitor: Name of the score that chose its best checkpoint; empty if none did.
        sign: 1 if more of that is better, -1 if less is.
        score: Of its best checkpoint, if it is known.
        root: Of its data, absolute; empty for a synthetic dataset.
    """

    written: Written
    flaw: str
    has_ended: bool
    monitor: str
    sign: int
    score: float | None
    root: str

    @property
    def rank(self) -> tuple[float, Written]:
        """Key by which the best of some runs with scores is the largest; of equal ones the newest."""
        return self.sign * (self.score or 0.0), self.written


def choose_best(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the checkpoint of the best run, and log why; None without runs.

    Runs can be compared that have the monitor and the data of the newest one. Those that were for
    debugging, failed, or lost their sweep do not count.

    Args:
        folder: Of all runs of an experiment.
        names: Of the files.

    Raises:
        DataError: No run counts.
    """
    runs = read_runs(folder, names)
    if not runs:
        return None
    usable = _list_usable(runs, folder)
    newest = max(usable, key=_read_time)
    alike = [run for run in usable if (run.monitor, run.root) == (newest.monitor, newest.root)]
    scored = [run for run in alike if run.score is not None and run.sign]
    best = max(scored, key=_read_rank) if scored else newest
    # The record of the checkpoint, with its path and scores, is logged when it is loaded.
    log.info(
        "checkpoint of %s: %s", show_path(best.written.run), _explain(best, scored, len(usable))
    )
    return folder / best.written.name


def choose_newest(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the newest checkpoint of the runs that `choose_best` compares; for the rest see there."""
    runs = read_runs(folder, names)
    return _take(folder, _list_usable(runs, folder)) if runs else None


def choose_unfinished(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the newest checkpoint of a run that has not ended; where all have, that of any."""
    runs = read_runs(folder, names)
    unfinished = [run for run in runs if not run.has_ended]
    return _take(folder, unfinished or runs) if runs else None


def _take(folder: Path, runs: Sequence[FitRun]) -> Path:
    checkpoint = folder / max(runs, key=_read_time).written.name
    log.info("checkpoint: %s", show_path(checkpoint))
    return checkpoint


def read_runs(folder: Path, names: Sequence[str]) -> list[FitRun]:
    """Read all runs below a folder that have a checkpoint of some names, each with its newest."""
    newest: dict[str, Written] = {}
    for written in sorted(list_checkpoints(folder, names)):
        newest[written.run] = written
    if not newest:
        return []
    return [_read_run(folder / run, written) for run, written in newest.items()]


def _list_usable(runs: Sequence[FitRun], folder: Path) -> list[FitRun]:
    usable = [run for run in runs if not run.flaw]
    if not usable:
        flaws = Counter(run.flaw for run in runs)
        counts = ", ".join(f"{count} {flaw}" for flaw, count in flaws.items())
        raise DataError(
            f"none of the runs in {folder} is used by default ({counts}): run=FOLDER selects one"
        )
    return usable


def _explain(best: FitRun, scored: Sequence[FitRun], usable: int) -> str:
    """Return why the run is taken."""
    reason = "the newest run, because no score compares them"
    if best.score is not None:
        reason = f"the best of {len(scored)} runs on its data by {best.monitor}"
    if usable == 1:
        reason = "the only run that finished"
        if not best.has_ended:
            reason = "the only run, which is not finished"
    return f"{reason}; run=FOLDER selects another"


def _read_run(folder: Path, written: Written) -> FitRun:
    notes: list[str] = []  # of a file that is damaged: what it says is not known
    summary = find_summary(folder)
    hydra = as_dict(as_dict(load(folder, ".hydra/hydra.yaml", parse_yaml, notes)).get("hydra"))
    config = as_dict(load(folder, ".hydra/config.yaml", parse_yaml, notes))
    monitor, mode = find_monitor(as_dict(config.get("callbacks")))
    signs = {"max": 1, "min": -1, None: find_direction(monitor or "")}
    root = as_dict(config.get("data")).get("root")
    cwd = str(as_dict(hydra.get("runtime")).get("cwd"))
    return FitRun(
        written=written,
        flaw=_find_flaw(folder, summary, hydra),
        has_ended=summary is not None,
        monitor=monitor or "",
        sign=signs[mode],
        score=read_number(summary or {}, monitor),
        root="" if root is None else _make_absolute(str(root), cwd),
    )


def _make_absolute(root: str, cwd: str) -> str:
    return root if "://" in root else str(Path(cwd, Path(root).expanduser()).resolve())


def _find_flaw(folder: Path, summary: dict[str, Any] | None, hydra: dict[str, Any]) -> str:
    """Return why a run is none that a command takes unasked; empty for one that is."""
    notes: list[str] = []
    job = as_dict(load(folder, "job.json", parse_json, notes))
    winner = as_dict(load(folder.parent, "sweep.json", parse_json, notes)).get("best_job")
    has_failed = load(folder, FAILURE, parse_json, notes) is not None
    flaws = {
        "for debugging": as_dict(as_dict(hydra.get("runtime")).get("choices")).get("debug"),
        "failed": summary is None and (has_failed or job.get("status") in _ENDED_BADLY),
        "worse than another run of its sweep": winner is not None and job.get("number") != winner,
    }
    return next((flaw for flaw, is_so in flaws.items() if is_so), "")


def _read_time(run: FitRun) -> Written:
    return run.written


def _read_rank(run: FitRun) -> tuple[float, Written]:
    return run.rank
