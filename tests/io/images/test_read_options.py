"""The rules for reading are checked when they are made."""

import json
from typing import Any, Literal

import pytest

from lit_data.errors import ConfigError
from lit_data.io.images.options import ReadOptions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha": "keep"}, "alpha='keep' is unknown: choose one of opaque, drop, error"),
        ({"exif": True}, "exif=True is unknown: choose one of ignore, apply"),
        ({"palette": "rgb"}, "palette='rgb' is unknown: choose one of error, expand, index"),
        (
            {"equal_channels": ""},
            "equal_channels='' is unknown: choose one of keep, collapse, brightest",
        ),
        ({"gray_to_rgb": "false"}, "gray_to_rgb='false' is unknown: choose one of false, true"),
        ({"cv2_order": 1}, "cv2_order=1 is unknown: choose one of false, true"),
        ({"invert": 1}, "invert=1 is unknown: choose one of false, true, photometric"),
        ({"invert": "yes"}, "invert='yes' is unknown: choose one of false, true, photometric"),
        ({"max_pixels": 0}, "max_pixels=0 is not usable: choose a whole number of at least 1"),
        (
            {"max_image_bytes": 1e9},
            "max_image_bytes=1000000000.0 is not usable: choose a whole number",
        ),
        ({"page": -1}, "page=-1 is not usable: choose a whole number of at least 0"),
        ({"page": True}, "page=True is not usable: choose a whole number"),
        ({"nan_fill": float("nan")}, "nan_fill=nan must be a finite number"),
        ({"gray_to_rgb": True, "equal_channels": "collapse"}, "undo each other; choose one"),
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReadOptions(**wrong)


def test_the_fingerprint_is_stable_json_of_every_option() -> None:
    options = ReadOptions(page=2, nan_fill=0.5)
    assert json.loads(options.fingerprint()) == {
        "alpha": "opaque",
        "as_float": False,
        "cv2_order": False,
        "equal_channels": "keep",
        "exif": "ignore",
        "gray_to_rgb": False,
        "invert": False,
        "max_image_bytes": 4294967296,
        "max_pixels": 178956970,
        "nan_fill": 0.5,
        "page": 2,
        "palette": "expand",
        "strict_extension": False,
    }
    assert options.fingerprint() == ReadOptions(nan_fill=0.5, page=2).fingerprint()
    assert options.fingerprint() != ReadOptions(nan_fill=0.5, page=1).fingerprint()
    rules: tuple[bool | Literal["photometric"], ...] = (False, True, "photometric")
    assert len({ReadOptions(invert=rule).fingerprint() for rule in rules}) == 3
