"""`python -m benchmarks start`: sets of several sizes are started on; a table is written."""

import csv
from pathlib import Path

import pytest

from benchmarks.__main__ import run as measure
from benchmarks.start import COLUMNS


@pytest.mark.usefixtures("small_runs_are_fast")
def test_every_size_is_measured(tmp_path: Path) -> None:
    assert (
        measure(["start", "suite.images=[12,40]", "suite.repeats=1", f"paths.run={tmp_path}"]) == 0
    )
    with (tmp_path / "benchmark.csv").open(newline="") as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["images_12", "images_40"]
    assert all(
        tuple(row) == COLUMNS and min(map(float, list(row.values())[1:])) > 0
        for row in rows.values()
    )
