from typing import Any

import pytest

from lit_data.errors import ConfigError
from lit_data.synthesis.watermarks import WatermarkSpec
from lit_data.synthesis.watermarks.plan import draw_texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 1.5}, "probability=1.5 must lie between 0 and 1"),
        ({"jpeg": "often"}, "jpeg='often' must lie between 0 and 1"),
        ({"size_px": (30, 20)}, r"size_px=\[30, 20\] is not a range"),
        ({"size_px": (1, 20)}, r"size_px=\[1, 20\] must lie between 4 and 512"),
        ({"count": (0, 2)}, r"count=\[0, 2\] must lie between 1 and 16"),
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


def test_lists_of_a_configuration_are_accepted() -> None:
    given: dict[str, Any] = {
        "texts": ["a", "b"],
        "modes": ["screen"],
        "fonts": ["x.ttf"],
        "angle_deg": [-5, 5],
    }
    spec = WatermarkSpec(**given)
    assert (spec.words, spec.modes, spec.fonts, spec.angle_deg) == (
        ("a", "b"),
        ("screen",),
        ("x.ttf",),
        (-5, 5),
    )


def test_texts_are_drawn_from_their_seed_and_number() -> None:
    texts = draw_texts(300, 1)
    assert texts[:20] == draw_texts(20, 1)
    assert texts != draw_texts(300, 2)
    assert len(set(texts)) > 200
    assert all(text.strip() == text and text.isprintable() for text in texts)
    for part in ("\N{COPYRIGHT SIGN}", "www.", "-", "DRAFT"):
        assert any(part.casefold() in text.casefold() for text in texts), part
