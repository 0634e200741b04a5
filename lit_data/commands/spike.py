"""``spike``: make the training batches of the highest loss again."""

import sys
from collections.abc import Sequence

import numpy as np

from lit_data.checks import check_count
from lit_data.commands.replay import Record, Request
from lit_data.commands.result import print_table
from lit_data.errors import DataError
from lit_data.files import write_table

_HELP = """\
usage: python -m lit_data spike RUN [count=10] [out=FOLDER] [key=value ...] [--package NAME]

Makes the training batches of the highest loss again, a loss that is no number first, and writes
their pictures and arrays as replay does, and spike.csv, into RUN/spike. `times` is the loss
divided by the median of the 50 steps on either side. Other words are overrides."""
_NEIGHBOURS = 50
_MOST = 1000  # batches, of which each is made and drawn
_HEADINGS = ("step", "epoch", "loss", "times", "first sample", "picture")


def find_spikes(record: Record, count: int) -> list[int]:
    """Return the steps of the highest loss, the highest first; NaN and infinity before all.

    A model without a loss has no number at any step.

    Args:
        record: Of the run.
        count: Number of steps.

    Raises:
        DataError: There is no step, or none has a loss.
    """
    steps = np.flatnonzero(record.steps["samples"])
    losses = record.steps["loss"][steps]
    if not len(steps):
        raise DataError("the run has no step: it ended before its first batch")
    if not np.isfinite(losses).any():
        raise DataError("no step of the run has a loss: its training_step returns none")
    # Of equal ones the first comes first.
    order = np.argsort(-np.where(np.isfinite(losses), losses, np.inf), kind="stable")
    spikes: list[int] = steps[order[:count]].tolist()
    return spikes


def compare_with_neighbours(record: Record, step: int) -> float:
    """Return the loss of a step divided by the median of those around it; NaN where that is 0."""
    first = max(0, step - _NEIGHBOURS)
    around = record.steps[first : step + _NEIGHBOURS + 1]
    losses = around["loss"][(around["samples"] > 0) & np.isfinite(around["loss"])]
    median = float(np.median(losses)) if len(losses) else 0.0
    return float(record.steps["loss"][step]) / median if median else float("nan")


def main(words: Sequence[str]) -> None:
    """Make the batches again and write them.

    Args:
        words: Those behind ``spike``.

    Raises:
        LitDataError: There is no such run, no loss, or its data are bad.
    """
    request = Request.parse("spike", words, {"count": 10}, _HELP)
    if request is None:
        return
    check_count("count", request.numbers["count"], 1, _MOST)
    rows = []
    with request.open("spike") as (replay, folder):
        record = replay.record
        for step in find_spikes(record, request.numbers["count"]):
            replayed = replay.make(step)
            print(replayed.verdict, file=sys.stderr)
            path = replay.write(replayed, folder)
            epoch, loss = int(record.steps["epoch"][step]), float(record.steps["loss"][step])
            times = compare_with_neighbours(record, step)
            cells = (step, epoch, f"{loss:.6g}", f"{times:.3g}", replayed.names[0], path.name)
            rows.append(dict(zip(_HEADINGS, cells, strict=True)))
    table = folder / "spike.csv"
    write_table(table, _HEADINGS, rows)
    cells_of_rows = [tuple(row.values()) for row in rows]
    print_table(_HEADINGS, cells_of_rows, texts=("first sample", "picture"))
    print(table)
