import logging
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from lit_data.commands.configuration.compose import compose
from lit_data.commands.configuration.targets import read_options
from lit_data.commands.sweeps import process as sweep_process
from lit_data.commands.sweeps.options import (
    SweepOptions,
    choose_direction,
    find_monitor,
    optimized_metric,
    settle_direction,
)
from lit_data.commands.sweeps.plan import (
    JobRecord,
    check_same,
    digest_config,
    read_record,
    write_record,
)
from lit_data.commands.sweeps.process import describe_failure, run_process
from lit_data.commands.sweeps.report import (
    ReportedJob,
    _print_table,
    draw_sweep,
    shorten_keys,
    sort_values,
)
from lit_data.commands.sweeps.run import JobWatch
from lit_data.errors import BatchMemoryError, ConfigError, StoreSpaceError

METRICS = {
    "command": "fit",
    "val/loss": 0.5,
    "test/ap": 0.25,
    "test/count": 3,
    "test/name": "a",
    "test/none": None,
}


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
    with pytest.raises(
        ConfigError,
        match=r"holds no 'test/app', which sweep\.metric names\. Did you mean 'test/ap'\?",
    ):
        optimized_metric(SweepOptions(metric="test/app"), None, METRICS)
    with pytest.raises(
        ConfigError,
        match=r"sweep\.metric=test/name is 'a' in the job's summary\.json, which is not a",
    ):
        optimized_metric(SweepOptions(metric="test/name"), None, METRICS)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"isolate": "thread"}, r"^'sweep\.isolate' is 'thread': give one of process, none$"),
        ({"mode": "most"}, r"^'sweep\.mode' is 'most': give one of auto, min, max$"),
        ({"columns": "a"}, r"^'sweep\.columns' is 'a': give a list, each text or null$"),
        ({"columns": [1]}, r"^'sweep\.columns' is \[1\]: give a list, each text or null$"),
        ({"metric": 3}, r"^'sweep\.metric' is 3: give text or null$"),
        ({"resume": ""}, r"sweep\.resume='': give text or null$"),
        ({"metrik": "a"}, r"^unknown key 'sweep\.metrik'.* Did you mean 'sweep\.metric'\?$"),
        ("latest", r"^'sweep' is 'latest': it must hold names and values$"),
    ],
)
def test_options_are_checked(node: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(
            SweepOptions, OmegaConf.create(node) if isinstance(node, dict) else node, "sweep"
        )


def test_the_checkpoint_says_what_is_good() -> None:
    monitored = find_monitor(compose("fit"))
    assert monitored == ("val/average_precision", "max")
    assert find_monitor(
        OmegaConf.create({"callbacks": {"last": {"filename": "last"}, "none": None}})
    ) == (None, None)
    assert choose_direction(SweepOptions(), "val/average_precision", monitored) == "max"
    assert choose_direction(SweepOptions(), "val/loss", monitored) is None
    assert choose_direction(SweepOptions(mode="min"), "val/loss", monitored) == "min"


@pytest.mark.slow
def test_the_digest_is_that_of_what_is_computed() -> None:
    one = digest_config(compose("fit", ["paths.run=a", "data.loader.batch_size=4"]))
    same = [
        "paths.run=b",
        "paths.runs=c",
        "paths.cache=d",
        "sweep.resume=e",
        "data.loader.batch_size=4",
    ]
    assert digest_config(compose("fit", same)) == one
    assert digest_config(compose("fit", ["paths.run=a", "data.loader.batch_size=5"])) != one


def make_record(**config: Any) -> JobRecord:
    return JobRecord(number=3, overrides=("seed=1",), digest=str(config), config=config)


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, r"\(a\.b: 1 then, 2 now\)"),
        ({"a": 1}, {"b": 1}, r"\(a: 1 then, nothing now; b: nothing then, 1 now\)"),
        (
            {"a": 1, "sweep": {"mode": "min"}},
            {"a": 2, "sweep": {"mode": "max"}},
            r"\(a: 1 then, 2 now\)",
        ),
        (dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2), r"c: 1 then, 2 now; 2 more\)"),
    ],
)
def test_the_difference_between_configurations_is_named(
    before: Any, now: Any, difference: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"^job 3 was another configuration when the sweep began .*{difference}"
    ):
        check_same(make_record(**before), make_record(**now))


def test_a_value_from_outside_may_differ() -> None:
    before, now = (
        JobRecord(number=0, overrides=(), digest="1", config={"a": "${b}"}),
        make_record(a="${b}"),
    )
    with pytest.raises(
        ConfigError, match=r"an interpolation such as \$\{oc\.env:NAME\} has another value"
    ):
        check_same(before, now)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    ended = make_record(a=[1, {"b": None}]).end("failed", 3, "first line \nsecond", 1.23456)
    write_record(tmp_path, ended)
    assert read_record(tmp_path) == ended
    assert (ended.reason, ended.seconds) == ("first line", 1.235)
    (tmp_path / "job.json").write_text('{"number": 3')
    assert read_record(tmp_path) is None
    (tmp_path / "job.json").write_text('{"number": 3, "overrides": [], "future": 1}')
    assert read_record(tmp_path) is None


@pytest.mark.parametrize(
    ("error", "status", "code", "reason"),
    [
        (StoreSpaceError("no room"), "failed", 4, "no room"),
        (BatchMemoryError("too large\nmore"), "out of memory", 5, "too large"),
        (
            RuntimeError("CUDA out of memory. Tried to allocate"),
            "out of memory",
            5,
            "RuntimeError: CUDA out of memory",
        ),
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


@pytest.mark.parametrize(
    ("code", "by_kernel", "status", "reason"),
    [
        (
            -signal.SIGKILL,
            True,
            "killed",
            "ended by SIGKILL, while the kernel ended processes for want of memory",
        ),
        (-signal.SIGSEGV, False, "killed", "ended by SIGSEGV"),
        (128 + signal.SIGTERM, False, "killed", "ended by SIGTERM"),
        (5, False, "out of memory", "its messages say why"),
        (9, False, "failed", "its messages say why"),
        (0, True, "done", ""),
    ],
)
def test_how_a_process_ended(
    code: int,
    by_kernel: bool,
    status: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert not Path(f"/proc/{note.read_text()}/cmdline").exists() or not (
        Path(
            f"/proc/{note.read_text()}/cmdline"
        ).read_bytes()  # ended, and not fetched yet by whoever adopted it
    )


def test_numbers_stand_before_texts() -> None:
    assert sort_values(["64", "8", "auto", "1e1", "8", "all"]) == ["8", "1e1", "64", "auto", "all"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"data.loader.batch_size": [("8", 0.5), ("16", None), ("8", 0.75)]},
        {
            "a": [(f"{10.0**-place}", float(place)) for place in range(14)],
            "b": [("x" * 60, 1.0), ("[1, 2]", 2.0)],
        },
        {name: [("1", 0.5)] for name in "abcd"},
    ],
)
def test_the_picture_has_a_panel_for_each_parameter(parameters: Any, tmp_path: Path) -> None:
    import cv2

    draw_sweep(tmp_path / "sweep.png", parameters, "test/score", title="fit stripe")
    image = cv2.imread(str(tmp_path / "sweep.png"))
    assert image is not None
    rows = 2 if len(parameters) == 4 else 1
    assert image.shape[0] == round(110 * (3.6 * rows + 0.8))


def test_jobs_elsewhere_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    write_record(tmp_path / "0", make_record().end("done", 0, "", 1.0))
    watch = JobWatch(tmp_path, 5)
    write_record(tmp_path / "1", make_record())
    watch.look()
    write_record(tmp_path / "1", make_record().end("killed", 6, "ended by SIGKILL", 1.0))
    watch.look()
    watch.look()
    assert caplog.messages == [
        "job 3 (4 of 5): running: seed=1",
        "job 3 (4 of 5): killed: ended by SIGKILL",
    ]


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
        (
            _with_sweeper("maximize"),
            SweepOptions(mode="min"),
            "sweep.mode=min and hydra.sweeper.direction=maximize con",
        ),
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
    keys = [
        "model.optimizer.lr",
        "seed",
        "model.net.width",
        "data.net.width",
        "val/dice",
        "net.width",
    ]
    assert list(shorten_keys(keys).values()) == [
        "lr",
        "seed",
        "model.net.width",
        "data.net.width",
        "val/dice",
        "net.width",
    ]


@pytest.mark.parametrize(("code", "reason"), [(0, ""), (3, "files are bad")])
def test_the_table_fits_80_columns_and_names_failures_where_there_are_any(
    code: int, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    record = JobRecord(
        number=0,
        overrides=(),
        config={},
        status="failed" if code else "done",
        exit_code=code,
        reason=reason,
    )
    swept = {"model.optimizer.lr": "0.001", "model.net.width": "32"}
    job = ReportedJob(record=record, metrics={"val/average_precision": 0.5}, swept=swept)
    plan = SimpleNamespace(command="fit", experiment="inspection")
    _print_table([job], plan, ["val/average_precision"], None)  # type: ignore[arg-type]  # has what is printed
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("lr=0.001 width=32" in line for line in lines) or code
    assert any("reason" in line for line in lines) == bool(code)
