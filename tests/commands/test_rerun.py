"""A run is started again from its folder."""

from pathlib import Path

import pytest

from lit_data.cli import main
from lit_data.commands.rerun import read_started


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    words = ["data.patch_px=64", "show.count=2", "hydra.run.dir=first", "data.samples.count=4"]
    assert main(["show", "+experiment=stripe", *words]) == 0
    return tmp_path / "first"


def test_it_is_started_again_where_it_was_and_with_changes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = read_started(run)
    assert (started.command, started.folder, started.sweeps) == ("show", tmp_path, False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["rerun", "../first", "--print", "data.patch_px=48"]) == 0
    line = "python -m lit_data show +experiment=stripe show.count=2 data.samples.count=4 data.patch_px=48\n"
    assert capsys.readouterr().out == line
    assert main(["rerun", "../first", "data.patch_px=48"]) == 0
    second = Path(capsys.readouterr().out.splitlines()[-1])
    assert second.is_relative_to(tmp_path / "runs/show/stripe")
    assert read_started(second.parent).words[-1] == "data.patch_px=48"


def test_a_sweep_is_started_again_as_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / ".hydra/hydra.yaml").read_text() + "command: show\n"
    (run / "multirun.yaml").write_text(text)
    assert main(["rerun", "first", "--print", "--package", "mine"]) == 0
    assert " show -m +experiment=stripe " in capsys.readouterr().out


def test_what_decides_which_code_runs_is_left_out(run: Path) -> None:
    path = run / ".hydra/hydra.yaml"
    hostile = "- +experiment=stripe\n    - hydra.job.env_set.LD_PRELOAD=x.so\n    - +hydra/launcher=slurm\n"
    path.write_text(path.read_text().replace("- +experiment=stripe\n", hostile, 1))
    assert "LD_PRELOAD" in path.read_text()
    assert not any("hydra" in word for word in read_started(run).words)


def test_what_a_run_folder_says_does_not_write_outside(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, place = run / ".hydra/hydra.yaml", "callbacks.memory.path=/nowhere"
    path.write_text(
        path.read_text().replace(
            "- +experiment=stripe\n", f"- +experiment=stripe\n    - {place}\n", 1
        )
    )
    assert main(["rerun", "first"]) == 2
    assert (
        "'callbacks.memory.path' is '/nowhere': only the command line may"
        in capsys.readouterr().err
    )
    assert main(["rerun", "first", place]) == 0
    path.write_text(path.read_text().replace(place, "paths.runs=/nowhere", 1))
    assert main(["rerun", "first"]) == 2
    assert "'paths.runs' is '/nowhere': only the command line may" in capsys.readouterr().err


def test_a_run_is_started_again_below_its_own_runs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path("mine/show/stripe/first")
    own.parent.mkdir(parents=True)
    run.rename(own)
    path = own / ".hydra/hydra.yaml"
    path.write_text(
        path.read_text().replace(
            "- +experiment=stripe\n", "- +experiment=stripe\n    - paths.runs=mine\n", 1
        )
    )
    assert main(["rerun", str(own)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: None,
            "is no run and no sweep of lit_data: there is no .hydra/hydra.yaml in it",
        ),
        (lambda folder: _write(folder, "a: [", "command: fit"), "does not say how it was started"),
        (
            lambda folder: _write(folder, "hydra: {overrides: {task: 3}}", "command: fit"),
            "not one of lit_data",
        ),
    ],
)
def test_what_is_no_run_is_named(
    make: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)  # type: ignore[operator]
    assert main(["rerun", str(tmp_path)]) == 3
    assert message in capsys.readouterr().err


def _write(folder: Path, hydra: str, config: str) -> None:
    (folder / ".hydra").mkdir()
    (folder / ".hydra/hydra.yaml").write_text(hydra)
    (folder / ".hydra/config.yaml").write_text(config)


def test_without_a_folder_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rerun"]) == 2
    assert "needs the folder of a run" in capsys.readouterr().err
    assert main(["rerun", "--help"]) == 0
    assert "usage: python -m lit_data rerun RUN" in capsys.readouterr().out
