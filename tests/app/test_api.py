"""Training, predicting and opening results from Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_data.app import api
from lit_data.core.errors import ConfigError, DataError
from lit_data.models import SegmentationModule
from tests.helpers.families import ROOT
from tests.helpers.fork_server import SCRIPTS_TOO

QUICK = (
    "debug=fast",
    "data.samples.count=4",
    "data.loader.num_workers=0",
    "model.net.width=4",
    "trainer.enable_progress_bar=false",
    "callbacks.checkpoint.monitor=null",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_a_run_is_trained_opened_scored_and_predicts(place: Path) -> None:
    run = api.fit("stripe", *QUICK)
    assert run.folder.is_relative_to(place / "runs/debug/stripe")
    assert 0 <= run.metrics["test/average_precision"] <= 1
    model = api.open_run(run.folder).load_model()
    assert isinstance(model, SegmentationModule)
    assert not model.training
    score = run.test().metrics["test/average_precision"]
    assert score == pytest.approx(run.metrics["test/average_precision"])
    found = run.predict("predict.threshold=0.4")
    assert found.metrics["predict/images"] == 2  # no other folder is named: those of the test split
    assert (found.folder / "defects.csv").is_file()


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_objects_of_a_training_are_built_and_train_without_the_command(place: Path) -> None:
    folder = place / "mine"
    objects = api.build("stripe", *QUICK, f"paths.run={folder}")
    assert not folder.exists()
    assert objects.folder == folder
    assert objects.start is None
    objects.trainer.fit(objects.model, objects.datamodule)
    last = folder / "checkpoints/last.ckpt"
    assert last.is_file()
    other = objects.build_model()
    assert type(other) is type(objects.model)
    assert other is not objects.build_model()
    again = api.build("stripe", *QUICK, f"paths.run={folder}", f"ckpt={last}")
    assert again.start == last
    interrupted = folder / "checkpoints/interrupted.ckpt"
    objects.trainer.save_checkpoint(interrupted)
    last.rename(folder / "checkpoints/step.ckpt")
    for run, start in ((folder, interrupted), (folder / "other", None)):
        objects = api.build("stripe", *QUICK, f"paths.run={run}", "resume=auto")
        assert objects.start == start


def test_an_engine_brings_a_strategy_and_processes_share_a_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = SingleDeviceStrategy("cpu")
    objects = api.build("stripe", *QUICK, trainer={"strategy": strategy, "max_epochs": 7})
    assert objects.trainer.strategy is strategy
    assert objects.trainer.max_epochs == 7
    assert len(objects.trainer.callbacks) > 5
    for trainer, message in (
        ({"callbacks": []}, "append to trainer.callbacks"),
        ({"logger": False}, "append to trainer.loggers"),
        ({"stratgy": strategy}, "Did you mean 'trainer.strategy'"),
    ):
        with pytest.raises(ConfigError, match=message):
            api.build("stripe", *QUICK, trainer=trainer)
    with pytest.raises(ConfigError, match=r"set paths\.run=FOLDER"):
        api.build("stripe", *QUICK, "resume=auto")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"set paths\.run=FOLDER"):
        api.build("stripe", *QUICK)
    assert api.build("stripe", *QUICK, "paths.run=shared").folder == Path("shared")


def test_errors_are_those_of_the_command_line(place: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'stripe'"):
        api.fit("strpe")
    with pytest.raises(DataError, match=r"no such folder; .* exists; check data.root"):
        api.start("prepare", "experiment=stripe", "data.root=nowhere")
    with pytest.raises(DataError, match="is neither a run"):
        api.open_run(place)
    with pytest.raises(DataError, match="has no summary"):
        _ = api.Run(place).metrics
    with pytest.raises(DataError, match="has no checkpoints"):
        _ = api.Run(place).best


@pytest.mark.slow
def test_further_ranks_of_a_script_run_the_command(place: Path) -> None:
    words = ", ".join(map(repr, ("trainer=ddp_cpu", *QUICK)))
    code = f"from lit_data.app import api\nprint('END', api.fit('stripe', {words}).folder)\n"
    (place / "script.py").write_text(code)
    words = [sys.executable, "script.py"]
    environment = os.environ | SCRIPTS_TOO | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.count("END") == 1
    assert len(list((place / "runs/debug/stripe").iterdir())) == 1
