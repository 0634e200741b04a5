"""``COMMAND --help``: values of the experiment with what YAML files say, in the width of the terminal."""

import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from lit_data.app import COMMANDS
from lit_data.app.cli import main
from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.rows import CONF, Files
from lit_data.core.files import flatten

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OPEN = ("bccd", "gan_images")
"""Experiments that ask for a folder."""


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_help_has_the_values_that_a_run_has(experiment: str) -> None:
    words = [f"+experiment={experiment}", "seed=3", "callbacks=safe"]
    words += ["data.root=parts"] if experiment in OPEN else []
    shown = {}
    for row in Files([CONF]).compose("fit", words).values():
        shown |= flatten({row.key: yaml.safe_load(row.value)})
    cfg = compose("fit", words)
    values = flatten(OmegaConf.to_container(cfg, resolve=False))
    differing = {key for key, value in shown.items() if values[key] != value}
    assert differing == set()
    missing = {key for key in values if key not in shown}
    assert len(missing - {"command"}) <= 1  # a list over several lines


@pytest.mark.parametrize("command", COMMANDS)
def test_all_keys_of_a_command_are_listed(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help", "all"]) == 0
    page = capsys.readouterr().out
    assert COMMANDS[command] in page
    assert "  seed=0 " in page
    own = {
        "fit": "resume=null",
        "predict": "predict.tile_px=512",
        "show": "show.count=6",
        "prepare": "prepare.check=false",
    }
    for other, key in own.items():
        # Verdicts are those of predict, whose keys hold for both too.
        takers = ("predict", "calibrate", "pod") if other == "predict" else (other,)
        assert (f"\n  {key}" in page) == (command in takers)
    assert "trainer.max_epochs=10" in page
    assert "_target_" not in page
    assert [line for line in page.splitlines() if len(line) > 80 and "=" not in line] == []


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        ("segmentation", ("model=unet_lite0", "model.optimizer.lr=0.001", "model.net=LiteUNet")),
        ("detection", ("data=detection", "data.loader.batch_size=4", "trainer.max_epochs=100")),
        ("bccd", ("data.root=???", "trainer.max_epochs=60", "monitor=val/map50")),
        ("ct", ("model=voxel_autoencoder", "trainer.max_epochs=40", "monitor=val/iou")),
        ("gan", ("data.image_px=32", "model.generator_optimizer.lr=0.001", "callbacks=gan")),
    ],
)
def test_the_usual_keys_of_an_experiment_come_first_on_one_screen(
    experiment: str,
    expected: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["fit", f"+experiment={experiment}", "--help"]) == 0
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) <= 100
    assert all(text in page for text in expected)
    keys = [line.split("=")[0].strip() for line in lines if line.startswith("  ")]
    assert keys[0] == "data.root"
    assert "--help all lists all" in page


def test_what_is_typed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["segmentation", "trainer.max_epochs=3", "model=smp_unet"]
    assert main(["fit", *words, "--help"]) == 0
    page = capsys.readouterr().out
    assert "trainer.max_epochs=3 " in page
    assert "model=smp_unet" in page
    assert "model.optimizer.lr=0.001" in page


def test_without_an_experiment_the_experiments_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["predict", "--help"]) == 0
    page = capsys.readouterr().out
    assert "of experiment=anomaly, bccd" in page
    assert "\n  predict.threshold=null" in page


def test_help_waits_for_no_library() -> None:
    code = (
        "import sys; from lit_data.app.cli import main; main(['fit', '+experiment=ct', '--help']); "
        "sys.exit(bool({'numpy', 'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_comment_stands_beside_its_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    main(["benchmark", "--help", "all"])
    page = capsys.readouterr().out
    assert (
        "  benchmark.mode=loaders          the ways to load | headroom: training without the cost of data"
        in page
    )  # it stands above it
    assert (
        "  benchmark.repeats=3             measurements of each row, in turn; the table holds medians"
        in page
    )
