"""`python -m benchmarks start`: sets of several sizes are started on; a table is written."""

from pathlib import Path

import pytest

from benchmarks.__main__ import run as measure
from benchmarks.start import COLUMNS
from tests.benchmarks.suites import read_table


@pytest.mark.usefixtures("small_runs_are_fast")
def test_every_size_is_measured(tmp_path: Path) -> None:
    words = ["suite.images=[12,40]", "suite.repeats=1", f"paths.run={tmp_path}"]
    assert measure(["start", *words]) == 0
    rows = read_table(tmp_path)
    assert [row.pop("way") for row in rows] == ["images_12", "images_40"]
    for row in rows:
        assert ("way", *row) == COLUMNS
        assert min(map(float, row.values())) > 0
