from typing import Any

import pytest
from omegaconf import OmegaConf

from lit_data.core.errors import ConfigError
from lit_data.synthesis import DefectSpec
from lit_data.synthesis.families.region import Blur


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 1.5}, r"probability=1.5 must be between 0 and 1"),
        ({"bright_fraction": -0.1}, r"bright_fraction=-0.1 must be between 0 and 1"),
        ({"least_change": 2}, r"least_change=2 must be between 0 and 1"),
        ({"count": (8, 3)}, r"count=\[8, 3\] is not a range"),
        ({"true_count": (-1, 2)}, r"true_count=\[-1, 2\] is not a range"),
        ({"amplitude": (0.4,)}, r"amplitude=\[0.4\] is not a range"),
        ({"contrast": 3}, r"contrast=\[3\] is not a range"),
        ({"families": {}}, r"families is empty: give at least one of spot, scratch"),
        ({"families": ()}, r"families is empty"),
        ({"families": {"spot": None}}, r"families is empty"),
        ({"families": {"scrach": {}}}, r"families.scrach is unknown: choose from spot, scratch"),
        ({"families": {"blur": 3}}, r"families.blur=3: its options are weight"),
    ],
)
def test_bad_specifications(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DefectSpec(**options)


SHAPE = {"height_px": 0, "width_px": 3, "sigma_y_px": 1, "sigma_x_px": 1}


@pytest.mark.parametrize(
    ("family", "option", "value", "message"),
    [
        ("spot", "shape", (), r"families.spot={'shape': \(\)}: its options are weight, .*shapes"),
        ("spot", "shapes", (), r"spot.shapes is empty"),
        ("spot", "shapes", [SHAPE], r"height_px=0 of a spot"),
        ("stain", "weight", 0, r"weight=0 of stain must be greater than 0"),
        ("stain", "weight", "often", r"weight='often' of stain must be greater than 0"),
        ("stain", "size_px", ["6", "28"], r"stain.size_px=\['6', '28'\] is not a range"),
        ("stain", "size_px", [9, 4], r"stain.size_px=\[9, 4\] is not a range"),
        ("stain", "size_px", [0, 4], r"stain.size_px=\[0, 4\] must be between 0.1 and inf"),
        ("stain", "elongation", [0.5, 2], r"stain.elongation=.* must be between 1 and inf"),
        ("blur", "sigma_px", [0, 1], r"blur.sigma_px=\[0, 1\] must be between 0.1 and inf"),
        ("nick", "opacity", [0.5, 1.5], r"nick.opacity=.* must be between 0 and 1"),
        ("scratch", "taper", [0, 2], r"scratch.taper=\[0, 2\] must be between 0 and 1"),
        ("scratch", "interrupted", 2, r"scratch.interrupted=2 must be between 0 and 1"),
        ("line", "along", "rows ", r"line.along='rows ' is unknown: choose one of rows, columns"),
        ("line", "width_px", [1.5, 2], r"line.width_px=.* must be whole numbers from 1"),
        ("stripe_break", "reach_px", 0, r"stripe_break.reach_px=0 must be at least 1"),
        ("relief", "contrast", [2, 1], r"relief.contrast=\[2, 1\] is not a range"),
    ],
)
def test_bad_options_of_families(family: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DefectSpec(families={family: {option: value}})


def test_what_a_configuration_gives() -> None:
    """Hydra hands over lists and mappings of its own."""
    shape = SHAPE | {"height_px": 3}
    blur = Blur(sigma_px=(1.0, 2.0))
    given = {"count": [1, 2]}
    given["families"] = {"spot": {"shapes": [shape]}, "blur": {"sigma_px": [1, 2]}, "nick": None}
    for options in (given, OmegaConf.create(given)):
        spec = DefectSpec(**options)
        assert spec.count == (1, 2)
        assert [member.name for member in spec.members] == ["spot", "blur"]
        assert spec.members[1] == blur
        assert hash(spec) == hash(DefectSpec(count=(1, 2), families=spec.members))
    given["families"]["blur"] = blur
    assert DefectSpec(**given) == spec
