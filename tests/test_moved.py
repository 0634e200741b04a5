"""Old names of modules work, with a warning."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lit_data.io
from lit_data import augment
from lit_data.cli import main
from lit_data.moved import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_new_module(old: str, new: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=rf"{old} is {new} now"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    assert found.__name__ == new
    assert found.__spec__ is not None
    assert found.__spec__.name == new


def test_a_configuration_may_hold_an_old_name(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules.pop("lit_data.io.options", None)
    vars(lit_data.io).pop("options", None)  # where an earlier import has put it
    words = ["data.read._target_=lit_data.io.options.ReadOptions", "prepare.check=true"]
    toys = ["data.samples={count: 6, height_px: 128, width_px: 128}", "data.patch_px=64"]
    with pytest.warns(FutureWarning, match="lit_data.io.options is"):
        assert main(["prepare", *words, *toys, f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]) == 0


def test_a_script_may_import_an_old_name() -> None:
    code = "from lit_data.io.options import ReadOptions; print(ReadOptions().alpha)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "FutureWarning: lit_data.io.options is lit_data.io.images.options now" in done.stderr


def test_a_class_may_have_its_old_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(FutureWarning, match=r"lit_data.augment.Foreign is ExternalTransform now"):
        assert augment.Foreign is augment.ExternalTransform
    with pytest.raises(AttributeError, match="no attribute 'Foreigner'"):
        _ = augment.Foreigner
    words = ["augment=kornia", "data.augment._target_=lit_data.augment.Foreign"]
    toys = ["data.samples={count: 6, height_px: 128, width_px: 128}", "data.patch_px=64"]
    with pytest.warns(FutureWarning, match="is ExternalTransform now"):
        assert main(["show", *words, *toys, f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]) == 0
