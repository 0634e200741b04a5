from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import ConfigError
from lit_data.wings.watermarks import WatermarkPlan, WatermarkSpec, sample_watermarks
from lit_data.wings.watermarks.plan import MODES, draw_texts

SHAPE = (96, 128)
INDEX = np.arange(400)


def _sample(index: Any = INDEX, *, seed: int = 3, epoch: int = 2, **options: Any) -> WatermarkPlan:
    return sample_watermarks(WatermarkSpec(**options), seed, epoch, index, SHAPE)


def test_a_sample_has_the_same_watermark_whatever_is_beside_it() -> None:
    whole = _sample()
    for index in (0, 7, 399):
        alone = _sample(np.array([index]))
        chosen = whole.row == index
        for item in fields(WatermarkPlan)[1:]:
            name = item.name
            some = getattr(whole, name)[
                chosen if len(getattr(whole, name)) == len(whole) else [index]
            ]
            np.testing.assert_array_equal(
                getattr(alone, name), some if name != "row" else np.zeros_like(some)
            )


@pytest.mark.parametrize("changed", [{"seed": 4}, {"epoch": 3}, {"index": INDEX + 400}])
def test_seed_epoch_and_index_change_it(changed: dict[str, Any]) -> None:
    assert not np.array_equal(_sample().opacity, _sample(**changed).opacity)


def test_everything_lies_in_its_range() -> None:
    spec = WatermarkSpec()
    plan = _sample()
    assert np.isin(plan.row, np.flatnonzero(plan.present)).all()
    assert set(np.bincount(plan.row, minlength=400)[plan.present & ~plan.tiled].tolist()) == {1, 2}
    assert (np.bincount(plan.row, minlength=400)[plan.present & plan.tiled] == 1).all()
    for values, (low, high) in (
        (plan.size_px, spec.size_px),
        (plan.angle_deg, spec.angle_deg),
        (plan.opacity[plan.present], spec.opacity),
        (plan.colour, (0, 1)),
        (plan.gap, spec.spacing),
        (plan.outline[plan.outline > 0], spec.outline_share),
        (plan.soft_px, spec.soft_px),
        (plan.quality[plan.quality > 0], spec.jpeg_quality),
        (plan.centre, (0, max(SHAPE))),
        (plan.text, (0, 199)),
    ):
        assert low <= values.min() <= values.max() <= high
    for share, expected in (
        (plan.present, 0.9), (plan.tiled, 0.35), (plan.quality > 0, 0.5), (plan.outline > 0, 0.15),
        (plan.angle_deg == 0, 0.25), (np.ptp(plan.colour, axis=1) > 0, 0.3),
    ):  # fmt: skip
        assert abs(share.mean() - expected) < 0.08
    assert set(plan.mode.tolist()) == set(range(len(MODES)))


def test_options_say_what_is_drawn() -> None:
    plan = _sample(
        probability=1,
        tiling=0,
        count=(3, 3),
        modes=("screen",),
        coloured=0,
        jpeg=0,
        size_share=(0.5, 0.5),
    )
    assert len(plan) == 3 * 400
    assert set(plan.mode.tolist()) == {MODES.index("screen")}
    assert not np.ptp(plan.colour, axis=1).any()
    assert not plan.quality.any()
    np.testing.assert_allclose(plan.size_px, 48)
    assert not len(_sample(probability=0))
    assert not _sample(probability=0).opacity.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 1.5}, "probability=1.5 must be between 0 and 1"),
        ({"jpeg": "often"}, "jpeg='often' must be between 0 and 1"),
        ({"size_px": (30, 20)}, r"size_px=\[30, 20\] is not a range"),
        ({"size_px": (1, 20)}, r"size_px=\[1, 20\] must be between 4 and 512"),
        ({"count": (0, 2)}, r"count=\[0, 2\] must be between 1 and 16"),
        ({"count": (1, 2.5)}, "must be two whole numbers"),
        ({"angle_deg": (10, -10)}, r"angle_deg=\[10, -10\] must be \[smallest, largest\]"),
        ({"angle_deg": 30}, r"angle_deg=\[30\] must be"),
        ({"modes": ("normal", "dodge")}, "modes='dodge' is unknown"),
        ({"modes": ()}, r"modes=\(\) must be a list"),
        ({"mask": "soft"}, "mask='soft' is unknown"),
        ({"texts": ()}, r"texts=\(\) must be a list of lines"),
        ({"texts": "DRAFT"}, "texts='DRAFT' must be a list of lines"),
        ({"texts": ("two\nlines",)}, "must be a list of lines"),
        ({"text_count": 0}, "text_count=0 is not usable: choose a whole number of at least 1"),
        ({"text_seed": -1}, "seed=-1 is not usable"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WatermarkSpec(**options)


def test_texts_are_drawn_from_their_seed_and_number() -> None:
    texts = draw_texts(300, 1)
    assert texts[:20] == draw_texts(20, 1)
    assert texts != draw_texts(300, 2)
    assert len(set(texts)) > 200
    assert all(text.strip() == text and text.isprintable() for text in texts)
    for part in ("\N{COPYRIGHT SIGN}", "www.", "-", "DRAFT"):
        assert any(part.casefold() in text.casefold() for text in texts), part
