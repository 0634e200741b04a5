from pathlib import Path

import numpy as np
import pytest

from lit_data.callbacks.timing.plot import BoundedSeries, Throughput, draw_throughput
from lit_data.callbacks.timing.step_clock import PARTS
from lit_data.callbacks.timing.totals import Ended


def make_history(steps: int, measured: int) -> Throughput:
    history = Throughput()
    history.add(
        [Ended(step, 16, 0.1 if step else None, 8, False, False) for step in range(steps)],
        [(step, (0.1,) * len(PARTS)) for step in range(1, measured + 1)],
    )
    return history


def test_a_series_keeps_every_row_while_there_is_room() -> None:
    series = BoundedSeries(most_rows=4)
    for step in range(4):
        series.add(step, (1, 10 * step))
    steps, rows = series.read()
    assert steps.tolist() == [0, 1, 2, 3]
    assert rows.tolist() == [[1, 0], [1, 10], [1, 20], [1, 30]]


@pytest.mark.parametrize("most_rows", [4, 5])
@pytest.mark.parametrize("count", range(3, 60, 4))
def test_a_long_series_is_added_up_and_loses_nothing(most_rows: int, count: int) -> None:
    series = BoundedSeries(most_rows)
    for step in range(count):
        series.add(step, (1, step))
        assert len(series) <= most_rows
    steps, rows = series.read()
    assert rows.sum(axis=0).tolist() == [count, sum(range(count))]
    assert len(set(rows[:-1, 0])) <= 1  # all but the last are of equally many steps
    assert steps.tolist() == [0, *np.cumsum(rows[:-1, 0])]


def test_steps_that_were_not_timed_are_not_drawn() -> None:
    steps, rows = make_history(3, 2).speed.read()
    assert steps.tolist() == [1, 2]
    assert rows.tolist() == [[1, 16, 0.1, 8]] * 2


def test_out_of_memory_is_marked_once_a_step_and_the_last_are_kept() -> None:
    history = Throughput(most_ooms=3)
    for step in (1, 1, 2, 5, 5, 9):
        history.mark_oom(step)
    assert history.ooms == [2, 5, 9]


@pytest.mark.parametrize(
    ("steps", "measured"),
    [
        (2, 1),  # one point
        (300, 299),  # all steps measured
        (5000, 40),  # a device: few of many
    ],
)
def test_the_plot_is_a_picture_of_a_fixed_size(tmp_path: Path, steps: int, measured: int) -> None:
    from PIL import Image

    history = make_history(steps, measured)
    history.mark_oom(1)
    draw_throughput(
        history,
        tmp_path / "throughput.png",
        "augmentation takes 61% of the time: " + "try this, " * 20,
    )
    with Image.open(tmp_path / "throughput.png") as picture:
        assert picture.size == (1210, 770)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > len(PARTS)
