"""Loggers get figures, pictures and the table of scores; each is run as its users run it, offline."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CometLogger, WandbLogger

from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.targets import instantiate
from lit_data.core.errors import ConfigError
from tests.helpers.families import ROOT

FIT = ["fit", "experiment=stripe", "debug=fast", "hydra.run.dir=run", "data.samples.count=4"]
FIT += ["model.net.width=4", "trainer.enable_progress_bar=false", "data.loader.num_workers=0"]


def _fit(folder: Path, *words: str) -> Path:
    command = [sys.executable, "-W", "ignore", "-m", "lit_data", *FIT, *words]
    environment = os.environ | {"LIT_DATA_CACHE": str(folder / "cache"), "WANDB_MODE": "offline"}
    environment |= {"COMET_START_ONLINE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "what the loggers take" not in done.stderr
    return folder / "run"


@pytest.mark.slow
def test_wandb_keeps_pictures_and_the_table_of_scores(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    media = next(_fit(tmp_path, "logger=wandb").glob("wandb/offline-run-*")) / "files" / "media"
    pictures = {path.name.split("_")[0] for path in media.glob("images/*.png")}
    assert pictures == {"samples", "predictions"}
    table = json.loads(next(media.glob("table/*.json")).read_text())
    assert "test/average_precision" in dict(table["data"])
    assert (tmp_path / "run/csv/metrics.csv").is_file()


@pytest.mark.slow
def test_mlflow_keeps_figures_pictures_and_the_table_of_scores(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    _fit(tmp_path, "logger=mlflow")
    code = (
        "import mlflow, json; mlflow.set_tracking_uri('sqlite:///runs/mlflow.db');"
        "[run] = mlflow.search_runs(search_all_experiments=True, output_format='list');"
        "print(json.dumps(run.data.metrics))"
    )
    words = [sys.executable, "-W", "ignore", "-c", code]
    metrics = json.loads(subprocess.check_output(words, cwd=tmp_path, text=True, timeout=100))
    assert {"train/loss", "val/average_precision", "test/average_precision"} <= metrics.keys()
    [folder] = (tmp_path / "runs/mlflow").glob("*/artifacts")
    pictures = {path.name.split("+")[0] for path in folder.glob("images/*.png")}
    assert pictures == {"samples", "predictions"}
    assert "test/average_precision" in json.loads((folder / "scores.json").read_text())
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.slow
def test_tensorboard_keeps_pictures_and_the_table_of_scores(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(_fit(tmp_path, "logger=tensorboard") / "tensorboard")).Reload()
    assert set(events.Tags()["images"]) == {"samples", "predictions"}
    assert "scores/text_summary" in events.Tags()["tensors"]
    assert not (tmp_path / "run/csv").exists()


@pytest.mark.slow
@pytest.mark.strangers
def test_comet_keeps_figures_pictures_and_the_table_of_scores(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    [archive] = (_fit(tmp_path, "logger=comet") / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as content:
        messages = content.read("messages.json").decode()
        starts = [content.read(name)[:4] for name in content.namelist()]
    for name in ("train/loss", "val/loss", "test/average_precision", "samples", "predictions"):
        assert f'"{name}"' in messages
    assert '"scores.csv"' in messages
    assert starts.count(b"\x89PNG") == 2


def test_a_logger_whose_package_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", False)
    target = f"{WandbLogger.__module__}.{WandbLogger.__qualname__}"
    with pytest.raises(ConfigError, match="WandbLogger needs a package"):
        instantiate({"_target_": target, "project": "x"})


def test_comet_is_the_class_of_lightning_and_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = compose("fit", ["+experiment=stripe", "logger=comet", f"paths.run={tmp_path}"]).logger
    monkeypatch.setattr("lightning.pytorch.loggers.comet._COMET_AVAILABLE", False)
    with pytest.raises(ConfigError, match="CometLogger needs a package"):
        instantiate(node.comet)
    built: list[dict[str, object]] = []
    monkeypatch.setattr(CometLogger, "__init__", lambda _, **options: built.append(options))
    assert isinstance(instantiate(node.comet), CometLogger)
    assert built == [
        {
            "project": "lit_data",
            "name": "stripe",
            "online": None,
            "offline_directory": f"{tmp_path}/comet",
        }
    ]
