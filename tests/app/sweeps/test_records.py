"""Records of jobs, which may be anybody's files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lit_data.app.result import Outcome
from lit_data.app.sweeps.job import keep_computing
from lit_data.app.sweeps.records import JobRecord, read_record, settle, write_record


def make_record() -> JobRecord:
    return JobRecord(number=3, command="show", overrides=["seed=1"])


def test_overrides_of_a_job_are_those_that_change_what_it_computes() -> None:
    words = [
        "seed=1",
        "sweep.mode=min",
        "paths.runs=a",
        "+paths.cache=b",
        "hydra/launcher=slurm",
        "~callbacks.ema",
    ]
    assert keep_computing(words) == ["seed=1", "~callbacks.ema"]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    outcome = Outcome(status="failed", exit_code=3, reason="first line \nsecond")
    ended = make_record().end(outcome, 1.23456)
    write_record(tmp_path, ended)
    assert read_record(tmp_path) == ended == settle(ended)
    assert (ended.reason, ended.seconds) == ("first line", 1.235)


def test_a_job_that_seems_to_run_behind_its_sweep_was_lost() -> None:
    lost = settle(make_record())
    assert (lost.status, lost.exit_code, lost.reason) == (
        "interrupted",
        6,
        "it ended without a message",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"number": "3"},
        {"overrides": [1]},
        {"overrides": 5},
        {"command": None},
        {"status": "\x1b[2J"},
        {"reason": 5},
        {"seconds": "1"},
        {"exit_code": [1]},
        {"ckpt": 5},
        {"future": 1},
        {"number": True},
    ],
)
def test_a_record_of_other_types_is_none(fields: dict[str, Any], tmp_path: Path) -> None:
    whole = {"number": 3, "command": "show", "overrides": []}
    (tmp_path / "job.json").write_text(json.dumps(whole))
    assert read_record(tmp_path) == JobRecord(number=3, command="show", overrides=[])
    (tmp_path / "job.json").write_text(json.dumps(whole | fields))
    assert read_record(tmp_path) is None


@pytest.mark.parametrize("kind", ["cut", "nested", "endless", "pipe", "link"])
def test_a_record_that_is_no_small_file_is_none(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    if kind == "cut":
        path.write_text('{"number": 3')
    elif kind == "nested":
        path.write_text("[" * 200_000)
    elif kind == "endless":
        path.touch()
        os.truncate(path, 2**40)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert read_record(tmp_path) is None
