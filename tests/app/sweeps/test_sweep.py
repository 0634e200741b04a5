"""A sweep from its command line to its table; its jobs run a command of the test's own."""

import csv
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import lit_data
from lit_data.app.cli import main
from lit_data.core.errors import DataError
from tests.helpers.families import list_children

ROOT = Path(lit_data.__file__).parents[1]
LIMIT_S = 120

FATES = """
import os, pathlib, signal
from lit_data.core.errors import BatchMemoryError
def run(cfg):
    fate = cfg.logger.fate
    with pathlib.Path("ran").open("a") as file:
        file.write(fate + " ")
    if fate == "killed" and not os.path.exists("healed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "oom" and not os.path.exists("healed"):
        raise BatchMemoryError("one sample does not fit")
    return {"test/score": len(fate) + 0.5, "val/loss": 0.25}
"""
WAITING = """
import threading
def run(cfg):
    print("ready", flush=True)
    threading.Event().wait()
"""

Install = Callable[..., None]
Site = Callable[[str], None]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def sweep(*words: str) -> int:
    words = ("hydra.sweep.dir=out", "sweep.isolate=none", *words)
    return main(["show", "+experiment=stripe", "-m", *words])


def read_json(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_rows() -> list[dict[str, str]]:
    with Path("out/sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_second_start_runs_the_killed_job_and_the_one_without_memory(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    site(FATES)
    words = [
        "show",
        "+experiment=stripe",
        "-m",
        "+logger.fate=fine,killed,oom",
        "sweep.columns=[val/loss]",
    ]
    words.append("hydra.sweep.dir=out")
    assert main(words) == 6
    out, err = capfd.readouterr()
    lines = [line.split("│")[1:-1] for line in out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    for row in cells:
        del row[3]  # seconds
    assert cells == [
        ["0", "fate=fine", "done", "4.5", "0.25", "0", ""],
        ["1", "fate=killed", "killed", "", "", "6", "ended by SIGKILL"],
        ["2", "fate=oom", "out of memory", "", "", "5", "one sample does not fit"],
    ]
    assert out.endswith(f"{Path.cwd()}/out/sweep.json\n")
    assert err.endswith("lit_data: 2 of 3 jobs did not finish; job 1: killed: ended by SIGKILL\n")
    summary = read_json("out/sweep.json")
    assert [summary[f"jobs_{name}"] for name in ("done", "killed", "out_of_memory")] == [1, 1, 1]

    Path("healed").touch()
    assert main([*words[:-1], "sweep.resume=out"]) == 0
    assert Path("ran").read_text() == "fine killed oom killed oom "
    assert "job 0: done before\n" in capfd.readouterr().out
    rows = [f"{row['logger.fate']} {row['status']} {row['test/score']}" for row in read_rows()]
    assert rows == ["fine done 4.5", "killed done 6.5", "oom done 3.5"]
    assert Path("out/sweep.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_whole_sweep(
    site: Site, start: Start, number: signal.Signals, code: int
) -> None:
    site(WAITING)
    with ending(
        start("show", "+experiment=stripe", "-m", "seed=1,2", "hydra.sweep.dir=out")
    ) as program:
        _wait_until_ready(program)
        family = list_children(program.pid, recursive=True)
        program.send_signal(number)
        out, err = program.communicate(timeout=LIMIT_S)
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert program.returncode == code
    states = [line.split("│")[3].strip() for line in out.splitlines() if "│" in line]
    assert states == ["interrupted"]
    assert (
        f"resume it with\nlit-data show -m +experiment=stripe seed=1,2 sweep.resume={Path.cwd()}/out\n"
        in err
    )
    assert read_json("out/sweep.json")["jobs_interrupted"] == 1


@pytest.mark.slow
def test_the_job_ends_with_a_sweep_that_is_killed(site: Site, start: Start) -> None:
    site(WAITING)
    with ending(
        start("show", "+experiment=stripe", "-m", "seed=1,2", "hydra.sweep.dir=out")
    ) as program:
        _wait_until_ready(program)
        family = list_children(program.pid, recursive=True)
        program.kill()
        program.wait()
        assert len(family) == 1
        assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.slow
def test_jobs_in_one_process_fail_alone_and_hold_no_memory(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    import weakref

    alive = []

    class Model:
        def __init__(self) -> None:
            self.itself = self  # only the collector frees it

    def run(cfg: Any) -> dict[str, Any]:
        assert [ref() for ref in alive] == [None] * len(alive)
        model = Model()
        alive.append(weakref.ref(model))
        if cfg.seed == 1:
            raise DataError("a.png is empty")
        if cfg.seed == 2:
            raise ZeroDivisionError("a bug")
        if cfg.seed == 3:
            raise MemoryError
        return {"test/score": 1.0}

    install(run)
    assert sweep("seed=1,2,3,4") == 3
    assert len(alive) == 4
    err = capfd.readouterr().err
    assert err.endswith("lit_data: 3 of 4 jobs did not finish; job 0: failed: a.png is empty\n")
    assert err.count("Traceback") == 2
    rows = [(row["status"], row["exit_code"], row["reason"]) for row in read_rows()]
    assert rows == [
        ("failed", "3", "a.png is empty"),
        ("failed", "1", "ZeroDivisionError: a bug"),
        ("out of memory", "5", "MemoryError"),
        ("done", "0", ""),
    ]


def test_a_sweep_grows_by_further_jobs_and_names_its_best(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(cfg: Any) -> dict[str, Any]:
        ran.append(cfg.seed)
        return {"test/score": cfg.seed * 2.0, "val/loss": 1.0 / cfg.seed}

    install(run)
    words = ["sweep.metric=val/loss", "sweep.mode=min"]
    assert sweep("seed=3", *words) == 0
    assert sweep("seed=3,2", "paths.cache=elsewhere", "sweep.resume=out", *words) == 0
    assert ran == [3, 2]
    summary = read_json("out/sweep.json")
    assert (summary["metric"], summary["best_job"]) == ("val/loss", 0)
    assert summary["best_overrides"] == "+experiment=stripe seed=3"
    assert summary["best_value"] == pytest.approx(1 / 3)
    assert "* best val/loss" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "seed=1,2 name=b sweep.resume=out",
            r"\(job 0 was show seed=1, now it is show seed=1 name=b",
        ),
        ("seed=1 sweep.resume=out", r"\(job 1 was show seed=2, now it is no job"),
        ("seed=2,1 sweep.resume=out", r"\(job 0 was show seed=1, now it is show seed=2"),
        ("sweep.resume=out", r"\(job 0 was show seed=1, now it is show\)"),
        (
            "seed=1,2 hydra.sweep.dir=out",
            "/out already holds a sweep: resume it with sweep.resume=",
        ),
    ],
)
def test_another_sweep_is_left_alone(
    words: str, message: str, install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(lambda cfg: pytest.fail("the command ran"))
    for number in range(2):
        Path(f"out/{number}").mkdir(parents=True)
        overrides = ["+experiment=stripe", f"seed={number + 1}"]
        record = {"number": number, "command": "show", "overrides": overrides}
        Path(f"out/{number}/job.json").write_text(json.dumps(record))
    assert main(["show", "+experiment=stripe", "-m", *words.split()]) == 2
    assert re.search(message, capfd.readouterr().err.replace(" +experiment=stripe", ""))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("-m seed=1,2 sweep.resume=latest", 3, "resume=latest: no sweep of show stripe below "),
        ("-m seed=1,2 sweep.resume=gone", 3, "gone is not the folder of a sweep: no job.json is"),
        ("sweep.resume=latest", 2, "sweep.resume resumes a sweep: add -m."),
        ("sweep={resume:latest}", 2, "sweep.resume resumes a sweep: add -m."),
        ("-m trainer.max_epochs=interval(1,2)", 2, "is a range without steps, which needs a swee"),
    ],
)
def test_mistakes_end_with_one_line(
    words: str, code: int, message: str, install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(lambda cfg: pytest.fail("the command ran"))
    assert main(["show", "+experiment=stripe", *words.split()]) == code
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["1", "0/show.log"])
def test_nothing_is_written_through_the_links_of_a_sweep_to_go_on_with(
    name: str, install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(lambda cfg: pytest.fail("the command ran"))
    Path("out/0").mkdir(parents=True)
    record = {"number": 0, "command": "show", "overrides": ["seed=1"], "status": "killed"}
    Path("out/0/job.json").write_text(json.dumps(record))
    aim = Path("precious").absolute()
    if Path(name).suffix in (".log", ".csv"):
        aim.write_text("mine")
    else:
        aim.mkdir()
    (Path("out") / name).symlink_to(aim)
    assert sweep("seed=1,2", "sweep.resume=out") == 2
    err = capfd.readouterr().err
    assert err.endswith(
        f"sweep.resume={Path('out').absolute()} holds a link, {name} to {aim}: nothing is written "
        "through links; remove it, or give another sweep.resume\n"
    )
    assert aim.read_text() == "mine" if aim.is_file() else not list(aim.iterdir())


@pytest.mark.slow
def test_the_latest_sweep_goes_on_from_the_last_whole_checkpoint(install: Install) -> None:
    import zipfile

    seen = []

    def run(cfg: Any) -> dict[str, Any]:
        seen.append((cfg.seed, cfg.ckpt))
        folder = Path(cfg.paths.run) / "checkpoints"
        folder.mkdir(exist_ok=True)
        for age_s, name in ((300, "step.ckpt"), (200, "last.ckpt"), (100, "interrupted.ckpt")):
            with zipfile.ZipFile(folder / name, "w") as archive:
                archive.writestr("data", os.urandom(1000))
            os.utime(folder / name, (1e9 - age_s, 1e9 - age_s))
        whole = (folder / "interrupted.ckpt").read_bytes()
        (folder / "interrupted.ckpt").write_bytes(whole[:600])  # the newest one was being written
        if len(seen) == 2:
            raise KeyboardInterrupt
        return {"test/score": 1.0}

    install(run, "fit")
    words = ["fit", "+experiment=stripe", "-m", "seed=1,2,3", "sweep.isolate=none", "name=mine"]
    assert main(words) == 130
    assert main([*words, "sweep.resume=latest"]) == 0
    [folder] = Path("runs/fit/mine").absolute().iterdir()
    checkpoint = f"{folder}/1/checkpoints/last.ckpt"
    assert seen == [(1, None), (2, None), (2, checkpoint), (3, None)]
    assert read_json(f"{folder}/1/job.json")["ckpt"] == checkpoint


@contextmanager
def ending(program: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Leaves no process of a program."""
    try:
        yield program
    finally:
        if program.poll() is None:
            for process in list_children(program.pid, recursive=True):
                process.kill()
            program.kill()
        program.communicate()


def _wait_until_ready(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    lines = iter(program.stdout.readline, "")
    assert any(line == "ready\n" for line in lines)
