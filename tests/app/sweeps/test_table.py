"""Tables and the picture at the end of a sweep."""

from pathlib import Path

import pytest

from lit_data.app.result import Outcome
from lit_data.app.sweeps.records import JobRecord
from lit_data.app.sweeps.table import ReportedJob, draw_sweep, print_jobs, report_folds


def make_record(number: int) -> JobRecord:
    return JobRecord(number=number, command="show", overrides=["seed=1"])


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", ["$^$", "${x}$", "a\nb\x1b[2J", "\udcff"])
def test_any_value_that_is_swept_is_drawn(value: str, tmp_path: Path) -> None:
    records = [JobRecord(number=number, command="fit", overrides=()) for number in range(2)]
    jobs = [
        ReportedJob(record=record, metrics={"val/f1_$^$": 0.5}, swept={"data.root": value})
        for record in records
    ]
    draw_sweep(tmp_path / "sweep.png", jobs, "val/f1_$^$", title="fit")
    assert (tmp_path / "sweep.png").stat().st_size > 5000
