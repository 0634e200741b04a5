"""What a sweep wrote at its end, beside its jobs."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path


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
        summary = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
        metric = str(summary.get("metric") or "") if isinstance(summary, dict) else ""
    except (OSError, ValueError):
        metric = ""
    return Sweep(metric, tuple(_read_jobs(folder / "sweep.csv")))


def _read_jobs(path: Path) -> list[tuple[str, str, str]]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("status") not in (None, "done")]
    except (OSError, csv.Error):
        return []
    return [(str(row.get("job")), str(row["status"]), str(row.get("reason") or "")) for row in rows]
