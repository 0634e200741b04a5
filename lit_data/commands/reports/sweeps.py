"""What a sweep wrote at its end, beside its jobs."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from lit_data.commands.reports.untrusted import open_inside, parse_json, read_text


@dataclass(frozen=True)
class Sweep:
    """A sweep as a whole.

    Attributes:
        metric: What its jobs are compared by; empty where that is not known.
        jobs: Number, status and reason of each job that came to no end or never began.
    """

    metric: str = ""
    jobs: tuple[tuple[str, str, str], ...] = ()


def read_sweep(folder: Path) -> Sweep:
    """Read sweep.json and sweep.csv as far as they are there."""
    try:
        summary = parse_json(read_text(folder, folder / "sweep.json"))
        metric = str(summary.get("metric") or "") if isinstance(summary, dict) else ""
    except (OSError, ValueError, RecursionError):
        metric = ""
    return Sweep(metric, tuple(_read_jobs(folder / "sweep.csv")))


def _read_jobs(path: Path) -> list[tuple[str, str, str]]:
    try:
        with io.TextIOWrapper(open_inside(path.parent, path), "utf-8", "replace", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("status") not in (None, "done")]
    except (OSError, csv.Error):
        return []
    return [(str(row.get("job")), str(row["status"]), str(row.get("reason") or "")) for row in rows]
