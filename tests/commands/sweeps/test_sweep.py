"""A sweep from its command line to its table; its jobs run a command of the test's own."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import lit_data
from lit_data.cli import main
from lit_data.errors import DataError
from tests.families import list_children

ROOT = Path(lit_data.__file__).parents[1]
LIMIT_S = 120

FATES = """
import os, pathlib, signal
from lit_data.errors import BatchMemoryError
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
SEARCHED = """
import os, pathlib, time
def run(cfg):
    time.sleep(0.5)
    with pathlib.Path("ran").open("a") as file:
        file.write(pathlib.Path(cfg.paths.run).name + " ")
    if os.path.exists("stuck") and cfg.paths.run.endswith("1"):
        print("ready", flush=True)
        time.sleep(600)
    return {"test/score": cfg.data.loader.timeout_s}
"""
SEARCHING = [
    "show",
    "+experiment=stripe",
    "-m",
    "hydra/sweeper=search",
    "data.loader.timeout_s=interval(1.0,99.0)",
]
SEARCHING += ["sweep.metric=test/score", "sweep.mode=max"]
WAITING = """
import threading
def run(cfg):
    print("ready", flush=True)
    threading.Event().wait()
"""
SEARCH = "-m hydra/sweeper=search sweep.mode=max"

Install = Callable[..., None]
Site = Callable[[str], None]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def sweep(*words: str) -> int:
    return main(
        ["show", "+experiment=stripe", "-m", "hydra.sweep.dir=out", "sweep.isolate=none", *words]
    )


def read_json(path: str) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_rows() -> list[dict[str, str]]:
    with Path("out/sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def score(cfg: Any) -> dict[str, Any]:
    return {"test/score": cfg.seed * 2.0, "val/loss": 1.0 / cfg.seed}


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
    assert err.endswith("lit_data: 2 of 3 jobs did not end well; job 1: killed: ended by SIGKILL\n")
    summary = read_json("out/sweep.json")
    assert [summary[f"jobs_{name}"] for name in ("done", "killed", "out_of_memory")] == [1, 1, 1]

    Path("healed").touch()
    assert main([*words[:-1], "sweep.resume=out"]) == 0
    assert Path("ran").read_text() == "fine killed oom killed oom "
    assert "job 0 (1 of 3): done before: logger.fate=fine\n" in capfd.readouterr().out
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
    assert states == ["interrupted", "not run"]
    assert (
        f"go on with\npython -m lit_data show -m +experiment=stripe seed=1,2 sweep.resume={Path.cwd()}/out\n"
        in err
    )
    assert read_json("out/sweep.json")["jobs_not_run"] == 1


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
    assert err.endswith("lit_data: 3 of 4 jobs did not end well; job 0: failed: a.png is empty\n")
    assert err.count("Traceback") == 2
    rows = [(row["status"], row["exit_code"], row["reason"]) for row in read_rows()]
    assert rows == [
        ("failed", "3", "a.png is empty"),
        ("failed", "1", "ZeroDivisionError: a bug"),
        ("out of memory", "5", "MemoryError"),
        ("done", "0", ""),
    ]


@pytest.mark.slow
def test_the_best_job_is_named_where_it_is_known_what_is_good(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(score)
    assert sweep("seed=3,1,2", "sweep.metric=val/loss", "sweep.mode=min") == 0
    summary = read_json("out/sweep.json")
    assert (summary["metric"], summary["best_job"]) == ("val/loss", 0)
    assert summary["best_overrides"] == "+experiment=stripe seed=3"
    assert summary["best_value"] == pytest.approx(1 / 3)
    assert sweep("seed=1,2", "sweep.metric=test/scor", "hydra.sweep.dir=other") == 0
    message = "holds no 'test/scor', which sweep.metric names. Did you mean 'test/score'?"
    assert capfd.readouterr().out.count(message) == 1
    assert not Path("other/sweep.png").exists()


@pytest.mark.slow
def test_other_overrides_are_named_and_a_sweep_is_left_alone(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(score)
    assert sweep("seed=1") == 0
    for words, message in (
        ("seed=1,2 name=b sweep.resume=out", "began otherwise (job 0: name: nothing then, b now)"),
        (
            "name=b sweep.resume=out",
            "(job 0: seed: 1 then, nothing now; name: nothing then, b now)",
        ),
        ("seed=1 hydra.sweep.dir=out", "/out holds a sweep already: go on with sweep.resume="),
    ):
        capfd.readouterr()
        assert main(["show", "+experiment=stripe", "-m", *words.split()]) == 2
        assert message in capfd.readouterr().err


@pytest.mark.slow
def test_a_sweep_grows_by_values_behind_the_others_and_shrinks_with_an_error(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(cfg: Any) -> dict[str, Any]:
        ran.append(cfg.seed)
        return score(cfg)

    install(run)
    assert sweep("seed=1,2") == 0
    words = ["sweep.resume=out", "sweep.isolate=none"]
    assert (
        main(["show", "+experiment=stripe", "-m", "seed=1,2,3", "paths.cache=elsewhere", *words])
        == 0
    )
    assert ran == [1, 2, 3]
    assert main(["show", "+experiment=stripe", "-m", "seed=1", *words]) == 2
    assert "(it had a job 1, now there are 1 jobs)" in capfd.readouterr().err
    assert main(["fit", "+experiment=stripe", "-m", "seed=1,2,3", *words]) == 2
    assert "(the command was show, now it is fit)" in capfd.readouterr().err
    assert ran == [1, 2, 3]


@pytest.mark.slow
def test_the_latest_sweep_of_the_experiment_goes_on(install: Install) -> None:
    ran = []

    def run(cfg: Any) -> dict[str, Any]:
        ran.append(cfg.seed)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return score(cfg)

    install(run)
    words = ["show", "+experiment=stripe", "-m", "seed=4,5,6", "sweep.isolate=none", "name=mine"]
    assert main(words) == 130
    assert main([*words, "sweep.resume=latest"]) == 0
    assert ran == [4, 5, 5, 6]
    assert len(list(Path("runs/show/mine").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("-m seed=1,2 sweep.resume=latest", 3, "resume=latest: no sweep of show stripe below "),
        ("-m seed=1,2 sweep.resume=gone", 3, "gone is not the folder of a sweep: no job.json is"),
        ("sweep.resume=latest", 2, "sweep.resume goes on with a sweep: add -m."),
        ("-m trainer.max_epochs=interval(1,2)", 2, "is a range without steps, which needs a swee"),
        (f"{SEARCH} trainer.max_epoch=1,2", 2, "Did you mean 'trainer.max_epochs'?"),
        (f"{SEARCH} seed=1,2 hydra.sweeper.n_trials=0", 2, "n_trials=0 is not usable: choose a wh"),
        (f"{SEARCH} seed=1", 2, "a search needs keys with values to choose from"),
        (
            f"{SEARCH} hydra.sweeper.storage=a seed=1,2",
            2,
            "Could not override 'hydra.sweeper.storage'",
        ),
        (
            f"{SEARCH} seed=1,2 hydra.sweeper.sampler._target_=optuna.samplers.CmaEsSampler",
            2,
            "'optuna.samplers.CmaEsSampler', which is not allowed",
        ),
        (
            f"{SEARCH} seed=1,2 hydra.sweeper.direction=maximize sweep.mode=min",
            2,
            "sweep.mode=min and hydra.sweeper.direction=maximize contradict each other",
        ),
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


@pytest.mark.parametrize("name", ["0/show.log", "0/.hydra", "1", "search", "sweep.csv"])
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


def test_only_the_command_line_names_a_sweep_elsewhere_to_go_on_with(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(lambda cfg: pytest.fail("the command ran"))
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text(
        "# @package _global_\nsweep:\n  resume: /elsewhere\n"
    )
    words = ["show", "-m", "--config-dir", "conf", "+experiment=mine", "seed=1,2"]
    assert main(words) == 2
    assert (
        "'sweep.resume' is '/elsewhere': only the command line may write outside of paths.runs"
        in capfd.readouterr().err
    )
    assert main([*words, "sweep.resume=latest"]) == 3


@pytest.mark.slow
def test_fit_goes_on_from_the_last_whole_checkpoint(install: Install) -> None:
    import zipfile

    seen = []

    def run(cfg: Any) -> dict[str, Any]:
        seen.append(cfg.ckpt)
        folder = Path(cfg.paths.run) / "checkpoints"
        folder.mkdir(exist_ok=True)
        for age_s, name in ((300, "step.ckpt"), (200, "last.ckpt"), (100, "interrupted.ckpt")):
            with zipfile.ZipFile(folder / name, "w") as archive:
                archive.writestr("data", os.urandom(1000))
            os.utime(folder / name, (1e9 - age_s, 1e9 - age_s))
        whole = (folder / "interrupted.ckpt").read_bytes()
        (folder / "interrupted.ckpt").write_bytes(whole[:600])  # the newest one was being written
        if len(seen) == 1:
            raise DataError("the disk is gone")
        return {"test/score": 1.0}

    install(run, "fit")
    words = ["fit", "+experiment=stripe", "-m", "seed=1", "sweep.isolate=none"]
    assert main([*words, "hydra.sweep.dir=out"]) == 3
    assert main([*words, "sweep.resume=out"]) == 0
    assert seen == [None, f"{Path.cwd()}/out/0/checkpoints/last.ckpt"]
    assert read_json("out/0/job.json")["ckpt"] == seen[1]


@pytest.mark.slow
def test_an_unheard_of_folder_name_reaches_the_job(site: Site) -> None:
    site("def run(cfg):\n    return {'test/is_own': float(cfg.paths.run.endswith('0'))}\n")
    folder = Path("it's, a=b {c} ü").absolute()
    assert main(["show", "+experiment=stripe", "-m", "seed=1", f'hydra.sweep.dir="{folder}"']) == 0
    assert read_json(f"{folder}/0/summary.json")["test/is_own"] == 1.0


@pytest.mark.slow
def test_optuna_learns_from_the_metric_and_from_failures(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(cfg: Any) -> dict[str, Any]:
        ran.append(cfg.data.loader.timeout_s)
        if len(ran) == 2:
            raise DataError("a.png is empty")
        return {"test/score": (cfg.data.loader.timeout_s - 40.0) ** 2}

    install(run)
    words = ["show", "+experiment=stripe", "-m", "hydra/sweeper=search", "hydra.sweeper.n_trials=4"]
    words += ["hydra.sweeper.direction=minimize", "data.loader.timeout_s=interval(1.0,99.0)"]
    words += ["seed=3", "sweep.isolate=none"]
    assert main([*words, "hydra.sweep.dir=out"]) == 3
    first = ran.copy()
    assert len(set(first)) == 4
    best = re.search(r"Best value: (\S+)", capfd.readouterr().out)
    assert best is not None
    scores = [(value - 40.0) ** 2 for place, value in enumerate(first) if place != 1]
    assert float(best[1]) == pytest.approx(min(scores))

    # The search goes on with the one job that has no result.
    assert main([*words, "sweep.resume=out"]) == 0
    assert ran == [*first, first[1]]
    assert [row["status"] for row in read_rows()] == ["done"] * 4


@pytest.mark.slow
def test_a_search_grows_by_further_jobs(install: Install) -> None:
    install(score)
    words = [
        "show",
        "+experiment=stripe",
        "-m",
        "hydra/sweeper=search",
        "hydra/sweeper/sampler=seeded_random",
    ]
    words += ["seed=range(1,1000)", "sweep.mode=max", "sweep.metric=test/score"]
    words += ["sweep.isolate=none"]
    assert main([*words, "hydra.sweep.dir=out", "hydra.sweeper.n_trials=1"]) == 0
    before = read_json("out/0/job.json")
    assert main([*words, "sweep.resume=out", "hydra.sweeper.n_trials=3"]) == 0
    assert read_json("out/0/job.json") == before
    assert len({row["seed"] for row in read_rows()}) == 3
    assert read_json("out/sweep.json")["best_value"] == max(
        float(row["test/score"]) for row in read_rows()
    )


@pytest.mark.slow
def test_two_controllers_share_a_search(
    site: Site, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    site(SEARCHED)
    words = [*SEARCHING, "hydra.sweeper.n_trials=6"]
    with ending(start(*words, "hydra.sweep.dir=out")) as first:
        until_s = time.monotonic() + LIMIT_S
        while not Path("out/0/job.json").exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert main([*words, "sweep.resume=out"]) == 0
        first_out, first_err = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0, first_err
    outs = [first_out, capfd.readouterr().out]
    assert sorted(Path("ran").read_text().split()) == ["0", "1", "2", "3", "4", "5"]
    assert min(out.count(": done in ") for out in outs) >= 1
    assert [out.count("│ done ") for out in outs] == [6, 6]  # both tables are whole
    assert len({row["data.loader.timeout_s"] for row in read_rows()}) == 6


@pytest.mark.slow
def test_a_search_goes_on_after_its_controller_was_killed(site: Site, start: Start) -> None:
    site(SEARCHED)
    words = [*SEARCHING, "hydra.sweeper.n_trials=3"]
    assert main([*words, "hydra.sweep.dir=whole"]) == 0
    Path("ran").unlink()
    Path("stuck").touch()
    with ending(start(*words, "hydra.sweep.dir=out")) as program:
        _wait_until_ready(program)
        family = list_children(program.pid, recursive=True)
        program.kill()
        program.wait()
        psutil.wait_procs(family, timeout=10)
    Path("stuck").unlink()
    assert main([*words, "sweep.resume=out"]) == 0
    assert Path("ran").read_text() == "0 1 1 2 "
    for number in range(3):
        again, whole = (read_json(f"{top}/{number}/job.json") for top in ("out", "whole"))
        assert again["overrides"] == whole["overrides"]
    assert read_json("out/sweep.json")["best_value"] == read_json("whole/sweep.json")["best_value"]


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
