import numpy as np
import pytest

from lit_data.errors import ConfigError
from lit_data.synthesis import DefectPlan, DefectSpec, SpotShape, sample_plan
from lit_data.synthesis.plan import distractor_patterns

SHAPE = (3, 128, 128)


def _plan(spec: DefectSpec, samples: int = 4000, epoch: int = 0, shape: tuple[int, int, int] = SHAPE) -> DefectPlan:
    return sample_plan(spec, seed=1, epoch=epoch, index=np.arange(samples), shape=shape)


def test_counts_follow_the_specification() -> None:
    plan = _plan(DefectSpec(probability=0.5, count=(3, 8), true_count=(0, 2)))
    counts = np.bincount(plan.row, minlength=4000)
    assert set(counts.tolist()) == {0, *range(3, 9)}
    assert 1900 < (counts == 0).sum() < 2100
    assert set(np.bincount(plan.row[plan.is_true], minlength=4000).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(("probability", "with_defects"), [(0.0, 0), (1.0, 200)])
def test_probability_at_its_ends(probability: float, with_defects: int) -> None:
    assert len(set(_plan(DefectSpec(probability=probability), samples=200).row.tolist())) == with_defects


def test_true_defects_lie_in_the_target_alone_and_distractors_never_do() -> None:
    plan = _plan(DefectSpec())
    true, others = plan.channels[plan.is_true], plan.channels[~plan.is_true]
    assert (true == [True, False, False]).all()
    assert {tuple(row) for row in others.tolist()} == {
        (True, True, False),
        (True, False, True),
        (True, True, True),
        (False, True, False),
        (False, False, True),
    }


def test_ranges_of_amplitude_and_place() -> None:
    plan = _plan(DefectSpec(amplitude=(0.1, 0.3), bright_fraction=0.25), shape=(3, 64, 200))
    magnitude = np.abs(plan.amplitude)
    assert magnitude.min() >= np.float32(0.1)
    assert magnitude.max() <= np.float32(0.3)
    assert 0.2 < (plan.amplitude > 0).mean() < 0.3
    assert plan.y.min() >= 0
    assert 60 < plan.y.max() < 64
    assert 190 < plan.x.max() < 200
    assert set((plan.y % 1 * 8).tolist()) == set(range(8))


def test_whole_pixel_centres() -> None:
    plan = _plan(DefectSpec(subpixel=False), samples=200)
    assert (plan.y % 1 == 0).all()
    assert (plan.x % 1 == 0).all()


def test_weights_choose_the_shape() -> None:
    spots = tuple(SpotShape(height_px=n, width_px=n, sigma_y_px=1, sigma_x_px=1, weight=n) for n in (1, 3))
    assert 0.7 < (_plan(DefectSpec(spots=spots)).spot == 1).mean() < 0.8


def test_a_plan_depends_on_seed_epoch_and_index_only() -> None:
    spec = DefectSpec()
    whole = sample_plan(spec, 5, 2, np.arange(40), SHAPE)
    for start in range(0, 40, 7):
        part = sample_plan(spec, 5, 2, np.arange(start, min(start + 7, 40)), SHAPE)
        chosen = (whole.row >= start) & (whole.row < start + 7)
        for name, array in part.arrays().items():
            expected = whole.arrays()[name][chosen]
            np.testing.assert_array_equal(array, expected - start if name == "row" else expected)
    assert sample_plan(spec, 5, 3, np.arange(40), SHAPE).y.tolist() != whole.y.tolist()
    assert sample_plan(spec, 6, 2, np.arange(40), SHAPE).y.tolist() != whole.y.tolist()


@pytest.mark.parametrize(("channels", "patterns"), [(1, 0), (2, 2), (3, 5), (5, 19)])
def test_distractor_patterns(channels: int, patterns: int) -> None:
    table = distractor_patterns(channels)
    assert table.shape == (patterns, channels)
    plan = _plan(DefectSpec(), samples=200, shape=(channels, 64, 64))
    assert plan.channels.shape[1] == channels
    assert plan.is_true.all() == (channels == 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 1.5}, r"probability=1.5 must lie between 0 and 1"),
        ({"bright_fraction": -0.1}, r"bright_fraction=-0.1 must lie between 0 and 1"),
        ({"count": (8, 3)}, r"count=\[8, 3\] is not a range"),
        ({"true_count": (-1, 2)}, r"true_count=\[-1, 2\] is not a range"),
        ({"amplitude": (0.4,)}, r"amplitude=\[0.4\] is not a range"),
        ({"spots": ()}, r"spots is empty"),
        ({"spots": ({"height_px": 0, "width_px": 3, "sigma_y_px": 1, "sigma_x_px": 1},)}, r"height_px=0 of a spot"),
    ],
)
def test_bad_specifications(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DefectSpec(**options)  # type: ignore[arg-type]
