from pathlib import Path

import numpy as np
import pytest

from lit_data.commands.reports.curves import Series, read_log, split_off_last, thin
from tests.commands.reports.folders import CSV, make_run


def make_series(
    values: list[float], steps: list[int] | None = None, epochs: list[int] | None = None
) -> Series:
    count = len(values)
    return Series(
        np.array(steps or range(count)),
        np.array(epochs or [0] * count),
        np.array(values, np.float64),
    )


def test_series_of_a_log_keep_steps_epochs_and_gaps(tmp_path: Path) -> None:
    notes: list[str] = []
    log = read_log(make_run(tmp_path / "run"), notes)
    loss = log.series["train/loss"]
    assert (loss.steps.tolist(), loss.epochs.tolist()) == ([9, 29, 39], [0, 1, 1])
    np.testing.assert_array_equal(loss.values, [6.5, np.nan, 2.5])
    assert (loss.last, log.epoch_ends, notes) == (2.5, {0: 19, 1: 39, 2: 40}, [])
    assert log.series["batch/ooms"].is_constant
    assert not loss.is_constant


@pytest.mark.parametrize(
    ("tail", "note"),
    [
        (",,,2,,4", "csv/metrics.csv: 1 line is damaged or cut off, and left out"),
        (
            "x,,,2,,41,,,,,\n,,,2,,4\0",
            "csv/metrics.csv: 2 lines are damaged or cut off, and left out",
        ),
    ],
)
def test_cut_lines_are_left_out_and_said(tmp_path: Path, tail: str, note: str) -> None:
    notes: list[str] = []
    log = read_log(make_run(tmp_path / "run", csv=CSV + tail), notes)
    assert log.series["val/dice"].values.tolist() == [0.5, 0.75, 0.8]
    assert notes == [note]


def test_no_log_and_an_empty_one_have_no_series(tmp_path: Path) -> None:
    notes: list[str] = []
    assert not read_log(make_run(tmp_path / "none", csv=None), notes).series
    assert not read_log(make_run(tmp_path / "empty", csv=""), notes).series
    assert notes == ["csv/metrics.csv has no columns"]


def test_score_after_training_is_no_part_of_the_curve(tmp_path: Path) -> None:
    curve, last = split_off_last(read_log(make_run(tmp_path / "run"), []).series["val/dice"])
    assert curve.values.tolist() == [0.5, 0.75]
    assert last is not None
    assert (last.steps.tolist(), last.values.tolist()) == ([40], [0.8])
    assert split_off_last(make_series([1, 2, 3]))[1] is None


def test_thinning_keeps_mean_range_and_gaps() -> None:
    thinned, low, high = thin(make_series([1, 3, 5, np.nan, np.nan, np.inf, 2]), 4)
    assert thinned.steps.tolist() == [0, 2, 4, 6]
    np.testing.assert_array_equal(thinned.values, [2, 5, np.nan, 2])
    np.testing.assert_array_equal(low, [1, 5, np.nan, 2])
    np.testing.assert_array_equal(high, [3, 5, np.nan, 2])
