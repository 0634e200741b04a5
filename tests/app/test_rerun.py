"""A run is started again from its folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_data.app.cli import main
from lit_data.app.rerun import read_started, take_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a run, `first`."""
    folder = tmp_path_factory.mktemp("rerun")
    words = ["data.patch_px=64", "show.count=2", "hydra.run.dir=first", "data.samples.count=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LIT_DATA_CACHE", str(folder / "cache"))
        assert main(["show", "+experiment=stripe", *words]) == 0
    return folder


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run, whose folder a test may change."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LIT_DATA_CACHE", str(folder / "cache"))
    texts = {path: path.read_text() for path in (folder / "first/.hydra").iterdir()}
    yield folder / "first"
    for path, text in texts.items():
        path.write_text(text)
    (folder / "first/multirun.yaml").unlink(missing_ok=True)


def test_it_is_started_again_where_it_was_and_with_changes(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = read_started(run)
    assert (started.command, started.folder, started.sweeps) == ("show", folder, False)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    capsys.readouterr()
    assert main(["rerun", "../first", "--print", "data.patch_px=48"]) == 0
    line = "show +experiment=stripe show.count=2 data.samples.count=4 data.patch_px=48"
    assert capsys.readouterr().out == f"lit-data {line}\n"
    assert main(["rerun", "../first", "data.patch_px=48", "--cwd", ".."]) == 0
    second = Path(capsys.readouterr().out.splitlines()[-1])
    assert second.is_relative_to(folder / "runs/show/stripe")
    assert read_started(second.parent).overrides[-1] == "data.patch_px=48"


def test_another_folder_is_written_to_only_where_it_is_typed(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "victim").mkdir(exist_ok=True)
    path = run / ".hydra/hydra.yaml"
    path.write_text(path.read_text().replace(f"cwd: {folder}\n", f"cwd: {folder}/victim\n"))
    words = ["rerun", "first", "data.patch_px=48"]
    assert main(words) == 2
    line = f"type lit-data rerun first data.patch_px=48 --cwd {folder}/victim"
    assert line in capsys.readouterr().err
    assert not any((folder / "victim").iterdir())
    path.with_name("config.yaml").write_text("command: fit")
    assert main(["test", "first"]) == 3  # it has no checkpoint
    assert "--cwd" not in capsys.readouterr().err  # nothing is read by a relative path
    _add_words(run, "data.root=images")
    for command in ("calibrate", "pod", "test"):
        assert main([command, "first"]) == 2
        line = f"type lit-data {command} first --cwd {folder}/victim"
        assert line in capsys.readouterr().err
    assert main([*words, "--cwd", "nowhere"]) == 2
    assert "--cwd nowhere: there is no such folder" in capsys.readouterr().err
    assert main(["show", "--cwd", "."]) == 2
    assert "--cwd is only for reruns" in capsys.readouterr().err


def test_a_run_folder_does_not_choose_where_predictions_go(run: Path) -> None:
    path = run / ".hydra/config.yaml"
    path.write_text(path.read_text().replace("command: show", "command: fit"))
    _add_words(run, "predict.folder=/victim", "logger=csv", "data.root=/trained", "seed=3")
    assert "data.root=/trained" in take_run("test", str(run), []).overrides
    words = take_run("predict", str(run), ["data.patch_px=48"]).overrides
    assert "data.root=/trained" not in words  # nobody asks for what was trained on
    keys = {word.lstrip("+").partition("=")[0].partition(".")[0] for word in words}
    assert keys == {"experiment", "data", "seed", "run"}


@pytest.mark.parametrize(
    ("typed", "are_asked"),
    [
        ([], False),
        (["data.root=images"], False),
        (["data.root=others"], True),
        (["data.folds=4"], True),
    ],
)
def test_the_splits_of_a_run_are_those_of_its_table(
    typed: list[str], are_asked: bool, run: Path
) -> None:
    path = run / ".hydra/config.yaml"
    path.write_text(path.read_text().replace("command: show", "command: fit"))
    _add_words(run, "data.root=images", "data.split_seed=3", "data.groups=lot")
    words = {"data.split_seed=3", "data.groups=lot"}
    assert words <= set(take_run("test", str(run), typed).overrides)
    (run / "splits.csv").write_text("image,split\n")
    taken = words & set(take_run("test", str(run), typed).overrides)
    (run / "splits.csv").unlink()
    assert taken == (words if are_asked else set())


@pytest.mark.parametrize("key", ["paths.cache", "data.cache_dir"])
def test_a_run_folder_does_not_choose_where_decoded_data_lie(
    key: str, run: Path, folder: Path
) -> None:
    _add_words(run, f"{key}={folder}/stolen")
    assert main(["rerun", "first"]) == 0
    assert not (folder / "stolen").exists()
    assert main(["rerun", "first", f"{key}={folder}/typed"]) == 0
    assert (folder / "typed").exists()


def test_a_sweep_is_started_again_as_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / ".hydra/hydra.yaml").read_text() + "command: show\n"
    (run / "multirun.yaml").write_text(text)
    assert main(["rerun", "first", "--print", "--package", "mine"]) == 0
    assert " show -m +experiment=stripe " in capsys.readouterr().out


def test_what_decides_which_code_runs_is_left_out(run: Path) -> None:
    _add_words(run, "hydra.job.env_set.LD_PRELOAD=x.so", "+hydra/launcher=slurm")
    assert not any("hydra" in override for override in read_started(run).overrides)


def _add_words(run: Path, *words: str) -> None:
    """Let a run folder say that it was started with more words."""
    path, first = run / ".hydra/hydra.yaml", "- +experiment=stripe\n"
    text = path.read_text()
    assert first in text
    more = "".join(f"    - {word}\n" for word in words)
    path.write_text(text.replace(first, first + more, 1))


def test_a_run_folder_does_not_choose_where_results_go(run: Path) -> None:
    _add_words(run, "paths.runs=/nowhere")
    assert not any("paths.runs" in word for word in read_started(run).overrides)


def test_a_run_folder_names_no_code(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _add_words(run, "callbacks.memory._target_=os.system")
    assert main(["rerun", "first"]) == 2
    assert "_target_' is 'os.system', which is not allowed" in capsys.readouterr().err


def test_a_run_is_started_again_below_its_own_runs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(run, Path("mine/show/stripe/first"))
    _add_words(own, "paths.runs=mine")
    assert main(["rerun", str(own)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("hydra", "message"),
    [
        (None, "is neither a run nor a sweep of lit_data: it has no .hydra/hydra.yaml"),
        ("a: [", "does not record how it was started"),
        ("hydra: {overrides: {task: 3}}", "not from lit_data"),
    ],
)
def test_what_is_no_run_is_named(
    hydra: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if hydra is not None:
        (tmp_path / ".hydra").mkdir()
        (tmp_path / ".hydra/hydra.yaml").write_text(hydra)
        (tmp_path / ".hydra/config.yaml").write_text("command: fit")
    assert main(["rerun", str(tmp_path)]) == 3
    assert message in capsys.readouterr().err


def test_without_a_folder_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rerun"]) == 2
    assert "needs the folder of a run" in capsys.readouterr().err
    assert main(["rerun", "--help"]) == 0
    assert "usage: lit-data rerun RUN" in capsys.readouterr().out
