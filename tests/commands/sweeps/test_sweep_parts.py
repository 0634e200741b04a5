import json
import logging
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lit_data.commands.configuration.compose import compose
from lit_data.commands.configuration.targets import read_options
from lit_data.commands.reports.results import shorten_keys
from lit_data.commands.result import Outcome, describe_failure, find_monitor
from lit_data.commands.sweeps import process as sweep_process
from lit_data.commands.sweeps.job import (
    JobRecord,
    Sweep,
    SweepOptions,
    choose_direction,
    optimized_metric,
    read_record,
    settle_direction,
    write_record,
)
from lit_data.commands.sweeps.overrides import keep_computing
from lit_data.commands.sweeps.process import run_process
from lit_data.commands.sweeps.report import (
    ReportedJob,
    collect_jobs,
    draw_sweep,
    print_jobs,
    report_folds,
)
from lit_data.commands.sweeps.run import JobWatch
from lit_data.errors import BatchMemoryError, ConfigError, StoreSpaceError

METRICS = {"val/loss": 0.5, "test/ap": 0.25, "test/count": 3, "test/name": "a", "test/none": None}


@pytest.mark.parametrize(
    ("metric", "monitor", "value"),
    [
        ("test/count", "val/loss", 3.0),
        (None, "val/loss", 0.5),
        (None, "val/gone", 0.25),
        (None, None, 0.25),
    ],
)
def test_a_sweeper_learns_from_the_metric(
    metric: str | None, monitor: str | None, value: float
) -> None:
    assert optimized_metric(SweepOptions(metric=metric), monitor, METRICS) == value


def test_a_job_may_have_no_metric_unless_it_is_asked_for() -> None:
    assert optimized_metric(SweepOptions(), None, {"seconds": 3.0}) is None
    text = r"holds no 'test/app', which sweep\.metric names\. Did you mean 'test/ap'\?"
    with pytest.raises(ConfigError, match=text):
        optimized_metric(SweepOptions(metric="test/app"), None, METRICS)
    text = r"sweep\.metric=test/name is 'a' in the job's summary\.json, which is not a"
    with pytest.raises(ConfigError, match=text):
        optimized_metric(SweepOptions(metric="test/name"), None, METRICS)
    with pytest.raises(ConfigError, match=r"sweep\.metric=test/none is None in the job's"):
        optimized_metric(SweepOptions(), "test/none", METRICS)  # of NaN, say


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"isolate": "thread"}, r"^'sweep\.isolate' is 'thread': give one of process, none$"),
        ({"mode": "most"}, r"^'sweep\.mode' is 'most': give one of auto, min, max$"),
        ({"columns": [1]}, r"^'sweep\.columns' is \[1\]: give a list, each text or null$"),
        ({"metric": 3}, r"^'sweep\.metric' is 3: give text or null$"),
        ({"resume": ""}, r"sweep\.resume='': give text or null$"),
        ({"metrik": "a"}, r"^unknown key 'sweep\.metrik'.* Did you mean 'sweep\.metric'\?$"),
        ("latest", r"^'sweep' is 'latest': it must hold names and values$"),
    ],
)
def test_options_are_checked(node: Any, message: str) -> None:
    cfg = OmegaConf.create({"sweep": node})
    with pytest.raises(ConfigError, match=message):
        read_options(SweepOptions, cfg.sweep, "sweep")


def test_the_checkpoint_says_what_is_good() -> None:
    monitored = find_monitor(compose("fit").callbacks)
    assert monitored == ("val/average_precision", "max")
    assert find_monitor({"last": {"filename": "last"}, "none": None}) == (None, None)
    assert choose_direction(SweepOptions(), "val/average_precision", monitored) == "max"
    assert choose_direction(SweepOptions(), "val/loss", monitored) is None
    assert choose_direction(SweepOptions(mode="min"), "val/loss", monitored) == "min"


def test_overrides_of_a_job_are_those_that_change_what_it_computes() -> None:
    words = ["seed=1", "sweep.mode=min", "paths.runs=a", "+paths.cache=b", "~callbacks.ema"]
    assert keep_computing(words) == ("seed=1", "~callbacks.ema")


def make_record(number: int = 3) -> JobRecord:
    return JobRecord(number=number, command="show", overrides=("seed=1",))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    outcome = Outcome(status="failed", exit_code=3, reason="first line \nsecond")
    ended = make_record().end(outcome, 1.23456)
    write_record(tmp_path, ended)
    assert read_record(tmp_path) == ended
    assert (ended.reason, ended.seconds) == ("first line", 1.235)


def test_options_of_a_sweep_are_none_of_its_jobs(tmp_path: Path) -> None:
    options = read_options(SweepOptions, {}, "sweep")
    words = ("seed=1", "hydra.sweep.dir=a"), ("seed=2", "hydra.sweep.dir=a")
    sweep = Sweep(
        options=options,
        folder=tmp_path,
        command="fit",
        experiment="stripe",
        flags=(),
        packages=(),
        jobs=words,
        total=2,
    )
    (tmp_path / "0").mkdir()
    write_record(tmp_path / "0", JobRecord(number=0, command="fit", overrides=("seed=1",)))
    assert [job.swept for job in collect_jobs(sweep)] == [{"seed": "1"}, {"seed": "2"}]


@pytest.mark.parametrize(
    "fields",
    [
        *({"number": "3"}, {"overrides": [1]}, {"overrides": 5}, {"command": None}),
        *({"status": "\x1b[2J"}, {"reason": 5}, {"seconds": "1"}, {"exit_code": [1]}),
        *({"ckpt": 5}, {"future": 1}, {"number": True}, {"number": -1}, {"seconds": math.nan}),
    ],
)
def test_a_record_of_other_types_is_none(fields: dict[str, Any], tmp_path: Path) -> None:
    whole = {"number": 3, "command": "show", "overrides": []}
    (tmp_path / "job.json").write_text(json.dumps(whole))
    assert read_record(tmp_path) == replace(make_record(), overrides=())
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


@pytest.mark.parametrize(
    ("error", "status", "code", "reason"),
    [
        (StoreSpaceError("no room"), "failed", 4, "no room"),
        (BatchMemoryError("too large\nmore"), "out of memory", 5, "too large"),
        (RuntimeError("CUDA out of memory"), "out of memory", 5, "RuntimeError: CUDA out of m"),
        (KeyError(), "failed", 1, "KeyError"),
    ],
)
def test_a_failure_is_one_line(error: Exception, status: str, code: int, reason: str) -> None:
    import torch  # noqa: F401 - its texts are looked at where a job has imported it

    outcome = describe_failure(error)
    assert (outcome.status, outcome.exit_code) == (status, code)
    assert outcome.reason.startswith(reason)


class _Ended:
    """Stands for a job's process that has ended."""

    pid, stdin = 2**22 + 1, None  # more than the largest number of a process

    def __init__(self, code: int) -> None:
        self.returncode = code

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    poll = wait


BY_KERNEL = "while the kernel ended processes for want of memory"


@pytest.mark.parametrize(
    ("code", "by_kernel", "status", "reason"),
    [
        (-signal.SIGKILL, True, "killed", f"ended by SIGKILL, {BY_KERNEL}"),
        (-signal.SIGSEGV, False, "killed", "ended by SIGSEGV"),
        (128 + signal.SIGTERM, False, "killed", "ended by SIGTERM"),
        (5, False, "out of memory", "its messages say why"),
        (9, False, "failed", "its messages say why"),
        (0, True, "done", ""),
    ],
)
def test_how_a_process_ended(
    code: int, by_kernel: bool, status: str, reason: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom_kill 4\n")
    monkeypatch.setattr(sweep_process, "OUT_OF_MEMORY_EVENTS", events)

    def start(*words: object, **options: object) -> _Ended:
        events.write_text(f"low 0\noom_kill {4 + by_kernel}\n")
        return _Ended(code)

    monkeypatch.setattr(subprocess, "Popen", start)
    outcome = run_process(["show"], tmp_path)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert outcome.exit_code == {"killed": 6, "out of memory": 5}.get(status, code)


def test_what_a_job_leaves_behind_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000']); open(sys.argv[-1], 'w').write(str(p.pid))"
    start = subprocess.Popen

    def leave(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-S", "-c", code, str(note)], **options)

    monkeypatch.setattr(sweep_process.subprocess, "Popen", leave)
    monkeypatch.setattr(sweep_process, "LEFTOVERS_S", 0.05)
    assert run_process([], tmp_path).status == "done"
    command_line = Path(f"/proc/{note.read_text()}/cmdline")
    # It may have ended without being fetched yet by whoever adopted it.
    assert not command_line.exists() or not command_line.read_bytes()


@pytest.mark.parametrize("count", [1, 70])
def test_the_picture_has_a_row_for_each_job(count: int, tmp_path: Path) -> None:
    import cv2

    jobs = []
    for number in range(count):
        record = make_record(number).end(Outcome(status="failed" if number == 1 else "done"), 1.0)
        metrics = {} if number == 1 else {"test/score": number / 2}
        swept = {"model.optimizer.lr": f"{number}"}
        jobs.append(ReportedJob(record=record, metrics=metrics, swept=swept))
    draw_sweep(tmp_path / "sweep.png", jobs, "test/score", title="fit stripe")
    height = cv2.imread(str(tmp_path / "sweep.png")).shape[0]
    assert height == pytest.approx(110 * (0.25 * min(count, 60) + 1.4), abs=1)


def test_jobs_elsewhere_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    write_record(tmp_path / "0", make_record().end(Outcome(status="done"), 1.0))
    watch = JobWatch(tmp_path, 5)
    write_record(tmp_path / "1", make_record())
    watch.look()
    killed = Outcome(status="killed", exit_code=6, reason="ended by SIGKILL")
    write_record(tmp_path / "1", make_record().end(killed, 1.0))
    watch.look()
    watch.look()
    states = ["running: seed=1", "killed: ended by SIGKILL"]
    assert caplog.messages == [f"job 3 (4 of 5): {state}" for state in states]


# --- one direction


def _with_sweeper(direction: object, mode: str = "max", monitor: str | None = "val/score") -> Any:
    callbacks = {"checkpoint": {"monitor": monitor, "mode": mode}} if monitor else {}
    return OmegaConf.create(
        {"hydra": {"sweeper": {"direction": direction}}, "callbacks": callbacks}
    )


@pytest.mark.parametrize(
    ("cfg", "options", "mode", "word"),
    [
        (_with_sweeper(None), SweepOptions(mode="min", metric="val/loss"), "min", "minimize"),
        (_with_sweeper(None), SweepOptions(mode="max", metric="val/loss"), "max", "maximize"),
        (_with_sweeper(None), SweepOptions(), "max", "maximize"),
        (_with_sweeper(None, "min"), SweepOptions(metric="val/score"), "min", "minimize"),
        (_with_sweeper("minimize"), SweepOptions(metric="x"), "min", "minimize"),
        (_with_sweeper("maximize"), SweepOptions(mode="max"), "max", "maximize"),
    ],
)
def test_sweeper_and_table_have_one_direction(
    cfg: Any, options: SweepOptions, mode: str, word: str
) -> None:
    settled, words = settle_direction(cfg, options)
    assert (settled.mode, words) == (mode, [f"hydra.sweeper.direction={word}"])


@pytest.mark.parametrize(
    ("cfg", "options", "text"),
    [
        (_with_sweeper("maximize"), SweepOptions(mode="min"), "direction=maximize con"),
        (_with_sweeper(None), SweepOptions(metric="other"), "which values of other are good"),
        (_with_sweeper(None, monitor=None), SweepOptions(), "which values of the metric are good"),
        (_with_sweeper("upwards"), SweepOptions(), "hydra.sweeper.direction=upwards is unknown"),
    ],
)
def test_a_direction_that_is_unclear_or_contradicts_is_refused(
    cfg: Any, options: SweepOptions, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        settle_direction(cfg, options)


def test_a_sweeper_without_a_direction_gets_none() -> None:
    cfg = OmegaConf.create({"hydra": {"sweeper": {"params": None}}})
    assert settle_direction(cfg, SweepOptions()) == (SweepOptions(), [])
    several = _with_sweeper(["minimize", "maximize"])
    assert settle_direction(several, SweepOptions())[1] == []


def test_keys_of_the_table_are_as_short_as_can_be_told_apart() -> None:
    keys = ["model.optimizer.lr", "seed", "model.net.width", "data.net.width", "val/dice"]
    assert list(shorten_keys(keys).values()) == ["lr", *keys[1:]]
    assert list(shorten_keys(["net.width", *keys]).values()) == ["net.width", "lr", *keys[1:]]


@pytest.mark.parametrize(("code", "reason"), [(0, ""), (3, "files are bad")])
def test_the_table_fits_80_columns_and_names_failures_where_there_are_any(
    code: int, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = Outcome(status="failed" if code else "done", exit_code=code, reason=reason)
    record = make_record(0).end(outcome, 1.0)
    swept = {"model.optimizer.lr": "0.001", "model.net.width": "32"}
    job = ReportedJob(record=record, metrics={"val/average_precision": 0.5}, swept=swept)
    print_jobs([job], "fit inspection", ["val/average_precision"], None)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("lr=0.001 width=32" in line for line in lines) or code
    assert any("reason" in line for line in lines) == bool(code)


def test_escapes_of_another_persons_reason_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = make_record(0).end(Outcome(status="failed", exit_code=3, reason="\x1b[2Jgood"), 1.0)
    print_jobs([ReportedJob(record=record, metrics={}, swept={})], "fit", [], None)
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "x1b[2Jgood" in "".join(out.split())


def test_scores_are_averaged_over_the_folds_that_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = []
    for number, score in enumerate([0.5, 0.7, 0.9, 0.25]):
        width = "16" if number < 3 else "32"
        swept = {"data.fold": f"{number}", "model.net.width": width}
        record = make_record(number).end(Outcome(status="done"), 1.0)
        metrics = {"command": "fit", "seconds": 3.0, "test/dice": score}
        if number:  # the first fold has no dent
            metrics["test/iou_dent"] = 0.5
        jobs.append(ReportedJob(record=record, metrics=metrics, swept=swept))
    failed = make_record(4).end(Outcome(status="failed"), 1.0)
    jobs.append(ReportedJob(record=failed, metrics={}, swept=jobs[0].swept))
    report_folds(jobs, tmp_path / "folds.csv")
    lines = (tmp_path / "folds.csv").read_text().splitlines()
    assert lines[0] == "overrides,metric,folds,mean,deviation"
    (label, name, count, mean, deviation), of_dent, last, _ = (
        line.split(",") for line in lines[1:]
    )
    assert (label, name, count) == ("model.net.width=16", "test/dice", "3")
    assert float(mean) == pytest.approx(0.7, abs=1e-12)
    assert float(deviation) == pytest.approx(0.2, abs=1e-12)
    assert of_dent == ["model.net.width=16", "test/iou_dent", "2", "0.5", "0.0"]
    assert last == ["model.net.width=32", "test/dice", "1", "0.25", ""]
    assert "over the folds" in capsys.readouterr().out
    alone = [ReportedJob(record=failed, metrics={}, swept={"seed": "1"})]
    report_folds(alone, tmp_path / "folds.csv")
    assert not (tmp_path / "folds.csv").exists()
