"""`python -m benchmarks first`: each kind of worker makes the samples; a table is written."""

from pathlib import Path

import pytest

from benchmarks.__main__ import run as measure
from benchmarks.first import COLUMNS, FreshSamples
from tests.benchmarks.suites import read_table


@pytest.mark.slow
@pytest.mark.usefixtures("small_runs_are_fast")
def test_every_kind_of_worker_is_measured(tmp_path: Path) -> None:
    toy = ["suite.batches=[1,2]", "suite.batch_size=4", "suite.shape=[3,8,8]", "suite.repeats=1"]
    assert measure(["first", *toy, f"paths.run={tmp_path}"]) == 0
    rows = {row["way"]: row for row in read_table(tmp_path)}
    assert list(rows) == [
        f"{way}_{n}" for n in (1, 2) for way in ("dataloader", "process", "thread", "inline")
    ]
    assert all(tuple(row) == COLUMNS and float(row["samples_per_s"]) > 0 for row in rows.values())
    assert float(rows["dataloader_2"]["ratio"]) == float(rows["dataloader_1"]["first_ratio"]) == 1


def test_a_sample_is_a_new_tensor() -> None:
    samples = FreshSamples(1000, (3, 4, 4))
    one, other = samples[999], samples[999]
    assert one.equal(other)
    assert one.data_ptr() != other.data_ptr()
