import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig
from PIL import Image

import lit_data
from lit_data.app import COMMANDS, TOOLS
from lit_data.app.build import build_callbacks
from lit_data.app.cli import main
from lit_data.app.configuration.targets import instantiate
from lit_data.app.result import KEYS
from lit_data.core import errors
from tests.helpers.families import list_children
from tests.helpers.fork_server import FRESH
from tests.outputs import NO_TIMELINES, QUICK, STRIPES

ROOT = Path(lit_data.__file__).parents[1]
LIMIT_S = 60
ALL = ", ".join([*COMMANDS, *TOOLS])

Run = Callable[[DictConfig], dict[str, Any]]
Install = Callable[..., None]
Site = Callable[[str], None]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LIT_DATA_TRACEBACK", "HYDRA_FULL_ERROR", "RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def raising(error: BaseException) -> Run:
    def run(cfg: DictConfig) -> dict[str, Any]:
        raise error

    return run


def run_python(*words: str, paths: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = os.environ | FRESH | {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}
    words = (sys.executable, *words)
    return subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_help_names_commands_and_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, what in COMMANDS.items():
        assert f"  {name:9}  {what}\n" in text
    assert "  stripe " in text
    assert main(["-h"]) == 0
    assert capsys.readouterr().out == text
    assert main([]) == 2
    assert capsys.readouterr() == ("", text)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit_data {lit_data.__version__}\n"

    (tmp_path / "own" / "experiment" / "deep").mkdir(parents=True)
    mine = "# @package _global_\n# What mine is.\nseed: 3\n"
    (tmp_path / "own/experiment/deep/mine.yaml").write_text(mine)
    (tmp_path / "own/experiment/bare.yaml").write_text("seed: 3\n")
    assert main(["--help", "--config-dir", "own"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["deep/mine", "What mine is."] in lines
    assert ["bare"] in lines


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], {"torch", "lightning", "kornia", "hydra", "omegaconf", "numpy", "cv2"}),
        (["fit", "+experiment=stripe", "--cfg", "job"], {"torch", "lightning", "kornia", "cv2"}),
    ],
)
def test_nothing_heavy_is_imported_before_a_command_runs(words: list[str], heavy: set[str]) -> None:
    code = (
        f"import sys; from lit_data.app.cli import main; main({words}); "
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fitt", f"unknown command 'fitt'. Did you mean 'fit'? Commands: {ALL}."),
        ("fitt --help", f"unknown command 'fitt'. Did you mean 'fit'? Commands: {ALL}."),
        ("val", f"unknown command 'val'. Did you mean 'validate'? Commands: {ALL}."),
        ("zzz", f"unknown command 'zzz'. Commands: {ALL}."),
        ("-m", f"unknown command ''. Commands: {ALL}."),
        ("show --multrun", "unknown option '--multrun'. Did you mean '--multirun'? See lit-data"),
        # Hydra's own ways to another configuration, one of which unpickles a file
        ("show --config-path x", "unknown option '--config-path'. Did you mean '--config-dir'?"),
        ("show --experimental-rerun x", "unknown option '--experimental-rerun'. See "),
        ("show --config-dir", "argument --config-dir/-cd: expected one argument. See lit-data"),
        ("show --cfg jb", "argument --cfg/-c: invalid choice: 'jb'"),
        ("show --resolve", "--resolve belongs to --cfg: write --cfg job --resolve."),
        (
            "show +experiment=stripe --package ../x",
            "--package '../x' is not a package name such as my_project or ",
        ),
        ("show +experiment=stripe sed=3", "unknown key 'sed'. Did you mean 'seed'?"),
        (
            "show +experiment=stripe -m trainer=cpu,gpuu",
            "unknown option 'gpuu' of 'trainer'. Did you mean 'gpu'?",
        ),
    ],
)
def test_mistake_ends_with_one_line_and_exit_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str], install: Install
) -> None:
    install(raising(AssertionError("the command ran")))
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lit_data: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "show segmentation",
        "show experiment=segmentation",
        "show +experiment=segmentation",
        "show -m segmentation seed=1,2",
        "show -m experiment=segmentation,stripe",
        "show -m +experiment=segmentation,stripe",
    ],
)
def test_an_experiment_is_named_with_or_without_its_key(
    words: str, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = []

    def run(cfg: DictConfig) -> dict[str, Any]:
        names.append(cfg.name)
        return {}

    install(run)
    assert main([*words.split(), "sweep.isolate=none"]) == 0
    assert names[0] == "segmentation"
    assert len(names) == 1 + ("-m" in words)


def test_train_is_another_word_for_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "segmentation", "seed=3", "--cfg", "job"]) == 0
    said = capsys.readouterr()
    assert "name: segmentation\n" in said.out
    assert "seed: 3\n" in said.out
    assert said.err == "lit_data: the command is called fit, not train\n"


def test_no_callbacks_are_those_that_were_asked_for_one_by_one(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = []

    def run(cfg: DictConfig) -> dict[str, Any]:
        names.append(sorted(build_callbacks(cfg)))
        return {}

    install(run)
    words = ["show", "segmentation", "callbacks=none"]
    own = "+callbacks.mine._target_=lightning.pytorch.callbacks.RichModelSummary"
    assert main(words) == 0
    assert main([*words, "extra_callbacks=[learning_rate]", own]) == 0
    assert names == [[], ["learning_rate", "mine"]]
    assert main([*words, "+callbacks.memory.every_n_steps=3"]) == 2


def test_command_runs_in_its_folder_and_prints_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], install: Install
) -> None:
    seen = []

    def run(cfg: DictConfig) -> dict[str, Any]:
        print("working")
        logging.getLogger("own.name").info("a message")
        logging.getLogger("own.name").debug("a detail")
        seen.append((cfg.seed, Path(cfg.paths.run), Path.cwd()))
        return {"test/score": 0.5, "samples_sha256": "ab", "seconds": -1.0}

    install(run)
    assert main(["show", "experiment=stripe", "seed=7", "name=mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    path = Path(lines[-1])
    assert lines == ["working", "a message", str(path)]
    assert path.parent.parent == tmp_path / "runs" / "show" / "mine"
    assert seen == [(7, path.parent, tmp_path)]
    names = sorted(item.name for item in path.parent.iterdir())
    assert names == [".hydra", "show.log", "summary.json"]
    assert (path.parent / "show.log").read_text().endswith(" INFO own.name: a message\n")
    values = json.loads(path.read_text(encoding="utf-8"))
    assert list(values) == [*KEYS, "test/score"]
    assert (values["command"], values["experiment"], values["test/score"]) == ("show", "mine", 0.5)
    assert values["samples_sha256"] == "ab"
    assert 0 < values["seconds"] < LIMIT_S
    assert values["peak_rss_bytes"] > 10_000_000


def test_a_command_composes_its_configuration_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = []
    load = ConfigLoaderImpl.load_configuration

    def count(*args: Any, **kwargs: Any) -> DictConfig:
        composed.append(kwargs["config_name"])
        return load(*args, **kwargs)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", count)
    words = ["+experiment=stripe", *QUICK, *STRIPES, *NO_TIMELINES, "paths.cache=cache"]
    words += ["report=false", "trainer.limit_train_batches=1"]
    commands = ["fit", "predict", "show"]
    for command in commands:
        typed = words if command == "fit" else [word for word in words if "report" not in word]
        assert main([command, *typed]) == 0
    assert composed == commands


def test_further_ranks_get_the_same_command_line_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    seen = []

    def run(cfg: DictConfig) -> dict[str, Any]:
        from lightning.fabric.strategies.launchers.subprocess_script import _hydra_subprocess_cmd

        os.environ["LOCAL_RANK"] = "0"  # as the launcher does
        seen.append(list(_hydra_subprocess_cmd(local_rank=1)[0]))
        return {}

    (tmp_path / "own").mkdir()
    install(run)
    monkeypatch.setattr(sys, "argv", ["lit-data", "something", "else"])
    words = ["-cd", "own", "experiment=stripe", "data.root=${paths.runs}", "--package=mine"]
    assert main(["show", *words, "hydra.run.dir=a b"]) == 0
    assert sys.argv == ["lit-data", "something", "else"]
    assert "LOCAL_RANK" not in os.environ
    own = ["show", "--package", "mine", "--config-dir", f"{tmp_path}/own", "hydra.run.dir=a b"]
    own += ["+experiment=stripe", "data.root=${paths.runs}", f'hydra.run.dir="{tmp_path}/a b"']
    child = seen[0][seen[0].index("show") :]
    assert child == [*own, "hydra.job.name=train_ddp_process_1", "hydra.output_subdir=null"]

    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / "a b/summary.json").unlink()
    assert main(child) == 0
    assert not (tmp_path / "a b/summary.json").exists()
    assert (tmp_path / "a b/train_ddp_process_1.log").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError, 2),
        (errors.DataError, 3),
        (errors.StoreCorruptError, 4),
        (errors.StoreSpaceError, 4),
        (errors.BatchMemoryError, 5),
        (errors.WorkerDiedError, 6),
        (errors.RankMismatchError, 6),
    ],
)
def test_error_ends_with_its_message_and_exit_code(
    error: type[errors.LitDataError], code: int, capsys: pytest.CaptureFixture[str],
    install: Install,
) -> None:  # fmt: skip
    install(raising(error("what, where, how")))
    assert main(["show", "+experiment=stripe", "hydra.run.dir=out"]) == code
    assert capsys.readouterr().err == "lit_data: what, where, how\n"


@pytest.mark.parametrize("name", ["LIT_DATA_TRACEBACK", "HYDRA_FULL_ERROR"])
def test_traceback_on_request_and_of_a_bug(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], install: Install
) -> None:
    install(raising(RuntimeError("a bug")))
    assert main(["show", "+experiment=stripe", "hydra.run.dir=out"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):\n" in err
    assert err.endswith("RuntimeError: a bug\n")
    monkeypatch.setenv(name, "1")
    install(raising(errors.DataError("bad")))
    assert main(["show", "+experiment=stripe", "hydra.run.dir=out"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("lit_data: bad\n")


def lightning_exit() -> SystemExit:
    error = SystemExit(1)
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (lightning_exit(), 130),
        (SystemExit(9), 9),
        (SystemExit(None), 0),
        (SystemExit("text"), 1),
    ],
)
def test_other_ways_out(error: BaseException, code: int, install: Install) -> None:
    install(raising(error))
    assert main(["show", "+experiment=stripe", "hydra.run.dir=out"]) == code


def test_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], install: Install
) -> None:
    install(raising(AssertionError("the command ran")))
    (tmp_path / "file").write_text("")
    assert main(["show", "+experiment=stripe", "paths.runs=file"]) == 4
    text = f"{tmp_path}/file is not a writable folder (Not a directory). Set paths.runs or hydra.run.dir.\n"
    assert f"cannot be created: {text}" in capsys.readouterr().err
    for words in (["paths.runs=/proc/x"], ["paths.runs=/proc/x", "-m", "seed=1,2"]):
        assert main(["show", "+experiment=stripe", *words]) == 4
        assert "cannot be created: /proc is not a writable folder (" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_own_package_is_used_with_the_flag_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    install: Install,
) -> None:
    def run(cfg: DictConfig) -> dict[str, Any]:
        return {"val/width": instantiate(cfg.model).width}

    (tmp_path / "own_project.py").write_text(
        "class Net:\n    def __init__(self, width):\n        self.width = width\n"
    )
    (tmp_path / "own/model").mkdir(parents=True)
    (tmp_path / "own/model/own.yaml").write_text("_target_: own_project.Net\nwidth: 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    install(run)
    words = ["show", "+experiment=stripe", "hydra.run.dir=out", "--config-dir", "own", "model=own"]
    assert main([*words, "--package", "own_project"]) == 0
    assert json.loads(Path("out/summary.json").read_text(encoding="utf-8"))["val/width"] == 5
    assert main(words) == 2
    assert "'model._target_' is 'own_project.Net', which is not allowed" in capsys.readouterr().err


def test_configuration_is_printed_and_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], install: Install
) -> None:
    install(raising(AssertionError("the command ran")))
    assert main(["show", "+experiment=stripe", "--cfg", "job", "seed=3"]) == 0
    text = capsys.readouterr().out
    assert "\nseed: 3\n" in text
    assert "\n  run: ${hydra:runtime.output_dir}\n" in text
    assert "hydra:\n" not in text
    assert (
        main(["show", "+experiment=stripe", "--cfg", "job", "--resolve", "hydra.run.dir=out"]) == 0
    )
    assert f"\n  run: {tmp_path}/out\n" in capsys.readouterr().out
    assert main(["show", "+experiment=stripe", "--cfg", "hydra"]) == 0
    assert capsys.readouterr().out.startswith("hydra:\n")
    assert list(tmp_path.iterdir()) == []


WAITING = """
import threading
def run(cfg):
    print("ready", flush=True)
    threading.Event().wait()
"""
TRAINING = """
def run(cfg):
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=cfg.trainer.devices,
        max_epochs=cfg.trainer.max_epochs,
        limit_train_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(BoringModel())
    return {"train/steps": trainer.global_step, "train/ranks": trainer.world_size}
"""


def signal_when_ready(
    program: subprocess.Popen[str],
    number: signal.Signals,
    to: Callable[[int, signal.Signals], None] = os.kill,
) -> tuple[int, str]:
    """The program's exit code and last words; none of its processes is left."""
    family = []
    try:
        assert program.stdout is not None
        while line := program.stdout.readline():
            if line == "ready\n":
                family = list_children(program.pid, recursive=True)
                to(program.pid, number)
                break
        out, err = program.communicate(timeout=LIMIT_S)
        assert psutil.wait_procs(family, timeout=10)[1] == []
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        program.kill()
        program.wait()
    return program.returncode, out + err


ENDINGS = [
    (signal.SIGTERM, 143, "lit_data: stopped by SIGTERM.\n"),
    (signal.SIGINT, 130, "lit_data: interrupted.\n"),
]


@pytest.mark.parametrize(("number", "code", "message"), ENDINGS)
def test_signal_ends_a_command(
    site: Site, start: Start, number: signal.Signals, code: int, message: str
) -> None:
    site(WAITING)
    ended, text = signal_when_ready(start("show", "+experiment=stripe"), number)
    line = "lit-data show +experiment=stripe"
    again = f"lit_data: there is nothing to resume, start again with\n{line}\n"
    assert (ended, text) == (code, again + message)


@pytest.mark.parametrize(
    ("command", "file", "line"),
    [
        ("predict", "maps/a.png", " 'data.root=a b' predict.resume=true predict.folder={run}"),
        ("fit", "checkpoints/last.ckpt", " 'data.root=a b' resume={run}"),
        (
            "fit",
            "fit.csv",
            "start again with\nlit-data fit +experiment=stripe 'data.root",
        ),
        (
            "prepare",
            "a.json",
            "resume with\nlit-data prepare +experiment=stripe 'data.root",
        ),
    ],
)
def test_ctrl_c_tells_how_to_go_on(
    command: str, file: str, line: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []

    def stop(cfg: DictConfig) -> dict[str, Any]:
        folders.append(cfg.paths.run)
        path = Path(cfg.paths.run, file)
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        raise KeyboardInterrupt

    install(stop, command)
    assert main([command, "+experiment=stripe", "data.root=a b"]) == 130
    error = capsys.readouterr().err
    assert line.format(run=folders[0]) in error
    assert error.endswith("\nlit_data: interrupted.\n")


READY = """
import lightning as L
class Ready(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 7 and trainer.is_global_zero:
            print("ready", flush=True)
"""
FIT = [
    "fit",
    "+experiment=stripe",
    "--package=own_ready",
    "+callbacks.ready._target_=own_ready.Ready",
    "trainer.accelerator=cpu",
    *QUICK,
    *NO_TIMELINES,
    *STRIPES,
    "logger=none",
]
EPOCHS = "trainer.max_epochs=1000000"


def interrupt_fit(
    start: Start, *words: str, number: signal.Signals, to: Callable[..., None]
) -> tuple[int, str]:
    Path("site").mkdir()
    Path("site/own_ready.py").write_text(READY, encoding="utf-8")
    return signal_when_ready(start(*FIT, EPOCHS, *words, "hydra.run.dir=out"), number, to)


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize(
    ("to", "workers", "number", "code", "message"),
    [
        (os.kill, 0, *ENDINGS[0]),
        (os.killpg, 2, *ENDINGS[0]),
        (os.kill, 2, *ENDINGS[1]),
        (os.killpg, 0, *ENDINGS[1]),
    ],
)
def test_signal_leaves_a_checkpoint_that_fit_goes_on_from(
    tmp_path: Path, start: Start, to: Callable[..., None], workers: int, number: signal.Signals,
    code: int, message: str,
) -> None:  # fmt: skip
    words = f"data.loader.num_workers={workers}"
    ended, text = interrupt_fit(start, words, number=number, to=to)
    path = tmp_path / "out/checkpoints/interrupted.ckpt"
    saved = torch.load(path, weights_only=True)
    step = saved["global_step"]
    assert step >= 8
    assert f"{number.name}: stopped after step {step}; resume with ckpt={path}\n" in text
    assert text.endswith(message)
    assert ended == code
    if workers == 0:
        return
    again = [word for word in FIT if "own_ready" not in word]
    more = [f"trainer.max_epochs={saved['epoch'] + 2}", f"ckpt={path}", "hydra.run.dir=again"]
    assert main([*again, *more]) == 0
    assert torch.load("again/checkpoints/last.ckpt", weights_only=True)["global_step"] > step


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("target", "number", "code"),
    [("other rank", signal.SIGTERM, 143), ("group", signal.SIGINT, 130)],
)  # a scheduler tells one rank, a terminal all
def test_all_ranks_stop_after_the_same_step(
    start: Start, target: str, number: signal.Signals, code: int
) -> None:
    def send(pid: int, number: signal.Signals) -> None:
        ranks = list_children(pid)
        assert len(ranks) == 1
        if target == "group":
            os.killpg(pid, number)
        else:
            os.kill(ranks[0].pid, number)

    words = ["trainer.devices=2", "data.loader.num_workers=0"]
    ended, text = interrupt_fit(start, *words, number=number, to=send)
    assert ended == code, text
    saved = torch.load("out/checkpoints/interrupted.ckpt", weights_only=True)
    assert saved["global_step"] >= 8


# --- wrong values and places


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("data.root=", "root is empty: is it a shell variable that is not set?"),
        ("data.patch_px=1e9", "patch_px=1000000000.0 is not usable: give one positive number"),
        ("model.optimizer.lr=nan", "'model.optimizer.lr' is nan: give a number."),
        ("ckpt=", "ckpt='': give the path of a checkpoint, best or last; null for none"),
        ("seed=abc", "'seed' is 'abc': give a whole number"),
        ("data.root=[a,b]", "root is ('a', 'b'): give one folder or address"),
        ("data.synthesis=true", "'data.synthesis' is True: give a DefectSpec or null"),
        ("data.patterns=*.png", "'data.patterns' is '*.png': give a list, each text"),
        ("resume=", "resume='': give latest, or the folder of a run"),
        ("resume=latest ckpt=best", "resume=latest and ckpt=best: give one of them"),
        (
            "resume=auto",
            "but each start gets a new folder, named by the time: give hydra.run.dir=F",
        ),
        ("paths.runs=", "paths.runs is empty: is it a shell variable that is not set?"),
        (
            "paths.cache=s3://bucket/runs",
            "cache=s3://bucket/runs is an address, but it must be on a",
        ),
        ("hydra.run.dir=s3://bucket/a", "s3:/bucket/a is an address"),
        ("paths.run=a", "only some files of the run: set hydra.run.dir=a, which moves all"),
        ("-m seed=1,2 paths.run=a", "set hydra.sweep.dir=a, which moves all"),
        ("run=latest", "of other commands: fit resumes with resume=latest"),
        ("name=../..", "name='../..' is part of the run folder: choose a plain name"),
        ("data.samples=count:16", "samples='count:16' must hold names and values: in a shell, qu"),
        ("model.width=3", "unknown key 'model.width'. Did you mean 'model.net.width'?"),
        ("-m trainer.limit_train_batchs=3,4", "Did you mean 'trainer.limit_train_batches'?"),
    ],
)
def test_a_wrong_value_is_one_line_and_leaves_nothing(
    words: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "+experiment=stripe", *words.split()]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "code", "text"),
    [
        ("ckpt=nope.ckpt", 3, "ckpt=nope.ckpt: no such file; the nearest existing folder is"),
        ("ckpt=last", 3, "no last.ckpt below runs/fit/stripe: run fit first, or give ckpt=<path>"),
        ("resume=latest", 3, "no last.ckpt or interrupted.ckpt or step.ckpt below runs/fit/stripe"),
        ("resume=nowhere", 3, "resume=nowhere is not a folder: give latest, or the folder of a"),
        ("ckpt=text.ckpt", 4, "text.ckpt is not a readable checkpoint: it is damaged, or"),
        ("ckpt=fifo.ckpt", 3, "ckpt=fifo.ckpt: not a regular file (a named pipe); give"),
        ("ckpt=empty.ckpt", 3, "ckpt=empty.ckpt: 0 bytes; give the path of a checkpoint"),
        ("ckpt=number.ckpt", 4, "number.ckpt is not a checkpoint: it holds a int"),
        (
            "ckpt=weights.ckpt",
            4,
            "weights.ckpt holds no loops, optimizer_states: training resumes only",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused(
    word: str, code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    (tmp_path / "empty.ckpt").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo.ckpt")
    torch.save(3, tmp_path / "number.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    assert main(["fit", "+experiment=stripe", word]) == code
    err = capsys.readouterr().err
    assert text in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line(
    install: Install, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    install(raising(OSError(number, os.strerror(number), "metrics.csv")))
    assert main(["show", "+experiment=stripe"]) == 4
    err = capsys.readouterr().err
    assert f"lit_data: {os.strerror(number)} (metrics.csv): free some space" in err
    assert "start again with\nlit-data show +experiment=stripe\n" in err
    assert "Traceback" not in err
    assert "Error executing job" not in err


@pytest.mark.parametrize(
    ("command", "word"),
    [("prepare", "prepare.export=images/out"), ("predict", "predict.folder=images")],
)
def test_nothing_is_written_into_the_folder_that_is_read(
    command: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.effect_noise((64, 64), 50).convert("RGB").save(tmp_path / f"images/{number}.png")
    (tmp_path / "best.ckpt").write_text("any")
    before = sorted((tmp_path / "images").iterdir())
    words = ["+experiment=stripe", "data.root=images", "data.patch_px=32", "paths.cache=cache"]
    words.append("ckpt=best.ckpt")
    assert main([command, word, *words]) == 2
    assert "is inside data.root=images, where it would be read as data" in capsys.readouterr().err
    assert sorted((tmp_path / "images").iterdir()) == before


def test_a_picture_that_cannot_be_written_is_told_with_its_exit_code(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(cfg: DictConfig) -> dict[str, Any]:
        from lit_data.predict.figures import new_axes, save_figure

        figure, _ = new_axes(1, 1, 1.0)
        folder = Path(cfg.paths.run) / "pictures"
        folder.write_text("a file where a folder should be")
        save_figure(figure, folder / "samples.png", "", ())
        return {}

    install(draw)
    assert main(["show", "+experiment=stripe"]) == 4
    assert (
        "samples.png: File exists; remove what is in its place, or set paths.runs"
        in capsys.readouterr().err
    )


def test_a_torchvision_of_another_build_is_named_with_its_remedy(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "site/torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('no operator nms')")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    install(lambda cfg: vars(import_module("torchvision")))
    assert main(["show", "+experiment=stripe", f"paths.runs={tmp_path}/runs"]) == 2
    error = capsys.readouterr().err
    assert (
        "are not from the same build (RuntimeError: no operator nms): pip uninstall -y torch"
        in error
    )
    assert not (tmp_path / "runs").exists()  # as after any other refusal
