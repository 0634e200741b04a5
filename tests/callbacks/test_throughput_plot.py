from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lit_data.callbacks.timeline import draw_throughput
from lit_data.callbacks.timing.step_clock import PARTS
from lit_data.callbacks.timing.totals import EndedBatch, Throughput


def make_history(steps: int, measured: int) -> Throughput:
    history = Throughput()
    history.add(
        [EndedBatch(step, 16, 0.1 if step else None, 8, False, False) for step in range(steps)],
        [(step, (0.1,) * len(PARTS)) for step in range(1, measured + 1)],
    )
    return history


def test_steps_that_were_not_timed_are_not_drawn() -> None:
    steps, rows = make_history(3, 2).speed.read()
    assert steps.tolist() == [1, 2]
    assert rows.tolist() == [[1, 16, 0.1, 8]] * 2


def test_out_of_memory_is_marked_once_a_step() -> None:
    history = Throughput()
    for step in (1, 1, 2, 5, 5, 9):
        history.mark_oom(step)
    assert history.speed.marks["oom"].spans == [(1, 1), (2, 2), (5, 5), (9, 9)]


def test_batches_have_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    history = make_history(3, 2)
    draw_throughput(
        history.speed, history.parts, tmp_path / "throughput.png", "the model takes most"
    )
    ticks = drawn[0].axes[1].xaxis.get_majorticklocs()
    assert len(ticks) > 1
    assert all(float(tick).is_integer() for tick in ticks)


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
        history.speed,
        history.parts,
        tmp_path / "throughput.png",
        "augmentation takes 61% of the time: " + "try this, " * 20,
    )
    with Image.open(tmp_path / "throughput.png") as picture:
        assert picture.size == (1210, 770)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > len(PARTS)
