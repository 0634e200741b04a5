import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_data.cli import main

Doctor = Callable[..., tuple[str, Path]]


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.setenv("COLUMNS", "250")

    def call(*words: str) -> tuple[str, Path]:
        assert main(["doctor", f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache", *words]) == 0
        printed = capsys.readouterr().out
        return printed, Path(printed.splitlines()[-1]).parent

    return call


def test_prints_what_it_found_and_writes_the_same_to_files(doctor: Doctor) -> None:
    printed, folder = doctor()
    report = json.loads((folder / "doctor.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    assert report["machine"]["python"] in printed
    assert {finding["what"] for finding in report["findings"]} >= {"versions", "cores", "memory", "paths.cache", "GPU"}
    assert all(finding["what"] in printed for finding in report["findings"])
    for level in ("fault", "warning", "note"):
        found = [finding for finding in report["findings"] if finding["level"] == level]
        assert summary[f"doctor/{level}s"] == len(found)
        assert all(finding["remedy"] for finding in found)


def test_faults_come_first_and_name_the_remedy(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    printed, folder = doctor()
    findings = json.loads((folder / "doctor.json").read_text())["findings"]
    levels = [finding["level"] for finding in findings]
    assert levels == sorted(levels, key=["fault", "warning", "note", "ok"].index)
    assert "unset WORLD_SIZE" in printed
    assert "CUDA_LAUNCH_BLOCKING" in printed


def test_looks_at_the_folders_of_the_configuration(doctor: Doctor, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    _, folder = doctor(f"paths.cache={blocked}/cache")
    findings = json.loads((folder / "doctor.json").read_text())["findings"]
    cache = next(finding for finding in findings if finding["what"] == "paths.cache")
    assert (cache["level"], "not a writable folder" in cache["found"]) == ("fault", True)
