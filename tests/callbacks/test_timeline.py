import math
import pickle

import numpy as np
import pytest
from numpy.typing import NDArray

from lit_data.callbacks.timeline import Timeline, add_rows, widen_rows


def _range(value: float, other: float = math.nan) -> NDArray[np.float64]:
    return np.array([[value, other]] * 2)


def test_a_timeline_keeps_every_row_while_there_is_room() -> None:
    timeline = Timeline(add_rows, most_rows=4)
    for step in range(4):
        timeline.add(step, (1, 10 * step))
    steps, rows = timeline.read()
    assert steps.tolist() == [0, 1, 2, 3]
    assert rows.tolist() == [[1, 0], [1, 10], [1, 20], [1, 30]]


@pytest.mark.parametrize("most_rows", [4, 5])
@pytest.mark.parametrize("count", range(3, 60, 4))
def test_a_long_timeline_is_added_up_and_loses_nothing(most_rows: int, count: int) -> None:
    timeline = Timeline(add_rows, most_rows=most_rows)
    for step in range(count):
        timeline.add(step, (1, step))
        assert len(timeline) <= most_rows
    steps, rows = timeline.read()
    assert rows.sum(axis=0).tolist() == [count, sum(range(count))]
    assert len(set(rows[:-1, 0])) <= 1  # all but the last are of equally many steps
    assert steps.tolist() == [0, *np.cumsum(rows[:-1, 0])]


@pytest.mark.parametrize("samples", [5, 6, 8, 9, 17, 1000, 4321])
def test_thinning_keeps_the_extremes_and_the_order(samples: int) -> None:
    timeline, stride = Timeline(widen_rows, most_rows=4), 1
    values = np.random.default_rng(samples).normal(size=samples)
    for step, value in enumerate(values):
        timeline.add(float(step), _range(value, value if step % 7 == 0 else math.nan))
    while samples > 4 * stride:
        stride *= 2
    times_s, rows = timeline.read()
    # Each point stands for `stride` samples one after another, the last one for what is left.
    runs = [values[start : start + stride] for start in range(0, samples, stride)]
    assert times_s.tolist() == list(range(0, samples, stride))
    assert rows[:, 0, 0].tolist() == [run.min() for run in runs]
    assert rows[:, 1, 0].tolist() == [run.max() for run in runs]
    assert np.nanmax(rows[:, 1, 1]) == values[::7].max()


def test_days_of_samples_stay_small() -> None:
    timeline = Timeline(widen_rows)
    for step in range(20_000):
        timeline.add(float(step), _range(1e9 if step == 777 else 1.0))
    times_s, rows = timeline.read()
    assert len(times_s) == len(timeline) == 1250
    assert (rows[:, 0, 0].min(), rows[:, 1, 0].max()) == (1.0, 1e9)


def test_marks_are_thinned_evenly_and_all_counted() -> None:
    marks = Timeline(add_rows, most_marks=4).marks["release"]
    for step in range(17):
        marks.add(float(step))
    marks.add(17.0, 19.0)
    assert marks.count == 18
    assert marks.spans == [(0.0, 0.0), (8.0, 8.0), (16.0, 16.0)]


def test_it_can_be_sent_to_other_processes() -> None:
    timeline = Timeline(add_rows)
    timeline.marks["oom"].add(1.0, 2.0)
    assert pickle.loads(pickle.dumps(timeline)).marks["oom"].spans == [(1.0, 2.0)]
