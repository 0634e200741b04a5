"""What a checkpoint says of its training, and what ``predict`` and ``test`` take from it."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import cv2
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import DictConfig, OmegaConf

from lit_data.app import predict
from lit_data.app.build import load_trained
from lit_data.app.checkpoints import TrainedRecord
from lit_data.app.cli import main
from lit_data.app.configuration.names import resolve_target, to_plain
from lit_data.app.quality import find_doubt
from lit_data.app.record import read_record
from lit_data.app.trained import list_targets, take_model, take_trained, warn_of_other_data
from lit_data.core.errors import ConfigError, StoreError
from lit_data.testing import QUIET
from tests.outputs import NO_TIMELINES

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["trainer=cpu", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"]
SMALL += ["report=false", "trainer.log_every_n_steps=1"]
SMALL += NO_TIMELINES
NET = ["model=unet", "model.net.width=2", "model.net.depth=1"]


pytestmark = pytest.mark.usefixtures("few_pictures")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``set``, images of which half have a mask with grey edges, and ``runs`` with a run on them."""
    root_log, level = logging.getLogger(), logging.getLogger().level
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    (folder / "set" / "masks").mkdir(parents=True)
    for number in range(16):
        image, mask = rng.integers(100, 140, (70, 90), dtype=np.uint8), np.zeros((70, 90), np.uint8)
        if number % 2:
            cv2.circle(mask, (40, 30), 9, 255, -1)
        image[mask > 0] = 220
        grey_edges = cv2.GaussianBlur(mask, (0, 0), 0.8)
        cv2.imwrite(str(folder / "set" / f"{number}.png"), image)
        cv2.imwrite(str(folder / "set" / "masks" / f"{number}.png"), grey_edges)
    options = ["data.patch_px=64", "data.scale=0.9", "data.near_duplicates=apart"]
    options += ["data.splits={train: 0.5, val: 0.25, test: 0.25}"]
    options += [f"data.root={folder}/set", f"hydra.run.dir={folder}/runs/fit/segmentation/1"]
    words = ["fit", "+experiment=segmentation", *SMALL, *NET, *options]
    assert main([*words, *_places(folder)]) == 0
    root_log.setLevel(level)  # the command sets it for its process
    return folder


def _places(folder: Path) -> list[str]:
    return [f"paths.runs={folder}/runs", f"paths.cache={folder}/cache"]


def _predict(folder: Path, out: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code of predict, what decided its predictions, and its log."""
    run = ["trainer=cpu", "trainer.enable_progress_bar=false", f"hydra.run.dir={out}"]
    code = main(["predict", "+experiment=segmentation", *_places(folder), *run, *words])
    path = out / "fingerprint.json"
    identity = json.loads(path.read_text()) if path.is_file() else {}
    log = out / "predict.log"
    return code, identity, log.read_text() if log.is_file() else ""


def test_nothing_that_training_knew_is_typed_again(trained: Path, tmp_path: Path) -> None:
    code, identity, said = _predict(trained, tmp_path, f"data.root={trained}/set")
    assert code == 0
    assert (identity["model"]["net"]["width"], identity["data"]["scale"]) == (2, 0.9)
    assert f"trained on {trained}/set, 1 epoch; val/average_precision" in said
    (taken,) = [line for line in said.splitlines() if "from the checkpoint: " in line]
    for change in ("model.net.width=2", "model.net.depth=1", "data.patch_px=64"):
        assert change in taken
    assert "unlike" not in said


def test_what_is_typed_stays_and_is_told(trained: Path, tmp_path: Path) -> None:
    root = f"data.root={trained}/set"
    code, identity, said = _predict(trained, tmp_path, root, "data.size_px=[64,96]")
    assert code == 0
    assert (identity["data"]["size_px"], identity["data"]["scale"]) == ([64, 96], None)
    assert "was trained with data.patch_px=64, data.scale=0.9: results may be worse" in said
    assert _predict(trained, tmp_path / "net", root, "model.net.width=4")[0] == 4


def test_a_run_is_chosen_by_its_folder(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = f"data.root={trained}/set"
    run = trained / "runs/fit/segmentation/1"
    assert _predict(trained, tmp_path, root, "run=latest", "ckpt=last")[0] == 0
    capsys.readouterr()
    assert _predict(trained, tmp_path / "both", root, f"run={run}", "ckpt=a.ckpt")[0] == 2
    assert "give one of them" in capsys.readouterr().err
    assert _predict(trained, tmp_path / "none", root, f"run={tmp_path}/nowhere")[0] == 3


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["{run}"], 4),
        (["{run}", "data.splits=auto"], 2),
        (["run={run}", "data.root={set}"], 4),
        (["ckpt={run}/checkpoints/best.ckpt", "data.root={set}"], 4),
    ],
)
def test_a_checkpoint_tells_its_experiment_and_its_splits(
    words: list[str], count: int, trained: Path, tmp_path: Path
) -> None:
    places = {"run": trained / "runs/fit/segmentation/1", "set": trained / "set"}
    out = [*_places(trained), f"hydra.run.dir={tmp_path}/out", "trainer.enable_progress_bar=false"]
    assert main(["test", *(word.format(**places) for word in words), *out, "trainer=cpu"]) == 0
    said = (tmp_path / "out/test.log").read_text()
    assert re.search(rf"splits: train .*, test {count}\b", said)
    assert ("the same splits as in training" in said) == ("data.splits=auto" not in words)
    assert json.loads((tmp_path / "out/summary.json").read_text())["experiment"] == "segmentation"


def test_a_checkpoint_of_another_experiment_is_refused_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained / "runs/fit/segmentation/1"
    words = [*_places(trained), f"run={run}", f"hydra.run.dir={tmp_path}/out"]
    for other in ("detection", "stripe"):
        assert main(["test", f"+experiment={other}", *words]) == 2
        error = capsys.readouterr().err
        assert "is from the experiment segmentation" in error
    assert "trained on" not in error
    assert "write experiment=segmentation, or give ckpt=FILE without" in error


def test_a_model_of_images_is_not_scored_on_synthetic_ones_unasked(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"run={trained}/runs/fit/segmentation/1"
    words = ["+experiment=segmentation", *_places(trained), run, f"hydra.run.dir={tmp_path}"]
    assert main(["test", *words]) == 2
    assert f"set data.root={trained}/set or another folder" in capsys.readouterr().err
    assert _predict(trained, tmp_path / "synthetic", run, "data.root=null")[0] == 0


def test_images_that_trained_and_models_of_no_use_bound_nothing(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["calibrate", str(trained / "runs/fit/segmentation/1"), "data.scale=null"]
    words += [*_places(trained), f"hydra.run.dir={tmp_path}"]
    assert main([*words, "images=all"]) == 2
    assert "holds the training images of the model" in capsys.readouterr().err
    monkeypatch.setattr(predict, "find_doubt", lambda record: "AUROC is 0.5")
    assert main([*words, "images=val"]) == 2
    assert "AUROC is 0.5: train longer, or choose another run" in capsys.readouterr().err


def test_images_of_another_kind_are_told(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for number in range(3):
        cv2.imwrite(str(tmp_path / "other" / f"{number}.png"), np.full((300, 300), 10, np.uint8))
    code, _, said = _predict(trained, tmp_path / "out", f"data.root={tmp_path}/other")
    assert code == 0
    assert "these images differ from those that the model was trained on" in said
    assert "mean gray level 0.04 of the range, not 0." in said


def test_a_model_near_chance_gives_no_verdicts(trained: Path, tmp_path: Path) -> None:
    weak = _change_record(trained, tmp_path, scores={"val/image_auroc": 0.5})
    words = [f"data.root={trained}/set", f"ckpt={weak}"]
    code, _, said = _predict(trained, tmp_path / "out", *words)
    assert code == 0
    assert (
        "val/image_auroc of the model is 0.5, which is no better than chance: all verdicts are unsure"
        in said
    )
    rows = (tmp_path / "out" / "images.csv").read_text().splitlines()[1:]
    assert {row.split(",")[3] for row in rows} == {"unsure"}


def _change_record(trained: Path, folder: Path, **changes: Any) -> Path:
    """A checkpoint that says something else of its training."""
    best = trained / "runs/fit/segmentation/1/checkpoints/best.ckpt"
    content = torch.load(best, weights_only=True)
    content["lit_data"] |= changes
    torch.save(content, folder / "changed.ckpt")
    return folder / "changed.ckpt"


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"_target_": "${oc.env:HOME}"}},
        {"scores": {"val/f1_max": "1"}},
        {"look": {"channels": 1}},
        {"look": {"channels": "a", "size_px": [1, 1], "grey": 0.0, "spread": 0.0}},
        {"data": [1]},
        {"experiment": 3},
    ],
)
def test_a_hostile_record_is_refused(trained: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    path = _change_record(trained, tmp_path, **change)
    with pytest.raises(StoreError, match="the record of its training cannot be read"):
        read_record(path)


def test_classes_of_a_foreign_record_are_not_built(trained: Path, tmp_path: Path) -> None:
    target = "lightning.pytorch.loggers.CSVLogger"
    record = read_record(trained / "runs/fit/segmentation/1/checkpoints/best.ckpt")
    model = record["model"] | {"loss": {"_target_": target}}
    cfg = _configuration()
    with pytest.raises(ConfigError, match=rf"{target}.*: add model\.loss\._target_={target}$"):
        take_trained(cfg, _change_record(trained, tmp_path, model=model))
    assert cfg.model.net.width == 16


@pytest.mark.parametrize("name", ["read", "batch_format"])
def test_no_function_of_a_foreign_record_reads_data(
    name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = _configuration()
    option = {"_target_": "mine.batches.make", "_partial_": True}
    path = _change_record(trained, tmp_path, data={name: option})
    words = f"'data.{name}={{_target_: mine.batches.make, _partial_: True}}' --package mine"
    with pytest.raises(ConfigError, match=f"mine.batches.make, .*: add {re.escape(words)}$"):
        take_trained(cfg, path)
    cfg.data[name] = {"x": "image"}
    monkeypatch.setattr("lit_data.app.trained.find_typed", lambda: {f"data.{name}.x"})
    take_trained(cfg, path)
    assert cfg.data[name] == {"x": "image"}


def test_a_model_gets_batches_of_the_format_that_it_was_trained_with(
    trained: Path, tmp_path: Path
) -> None:
    cfg = _configuration()
    take_trained(cfg, _change_record(trained, tmp_path, data={"batch_format": {"x": "image"}}))
    assert cfg.data.batch_format == {"x": "image"}


@pytest.mark.parametrize("path", sorted((ROOT / "lit_data/conf/model").glob("*.yaml")), ids=str)
def test_a_checkpoint_may_name_the_nets_of_each_model_option(path: Path) -> None:
    cfg = _configuration()
    options = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    named = [name for name in list_targets(options) if name.startswith("lit_data.")]
    nets: dict[str, Any] = {"_target_": "lit_data.models.SegmentationModule"}
    for number, name in enumerate(named):
        part = resolve_target(name, "model")
        if isinstance(part, type) and issubclass(part, torch.nn.Module):
            nets[f"net{number}"] = {"_target_": name}
    take_model(cfg, nets, set(), Path("best.ckpt"))
    assert list_targets(to_plain(cfg.model)) == list_targets(nets)


def test_a_checkpoint_may_name_no_other_class_of_a_wing() -> None:
    cfg = _configuration()
    foreign = {"_target_": "lit_data.wings.detection.DetectionDataModule"}
    with pytest.raises(ConfigError, match=r"add model\.net\._target_=.*DetectionDataModule$"):
        take_model(cfg, {**to_plain(cfg.model), "net": foreign}, set(), Path("best.ckpt"))


def _configuration() -> DictConfig:
    net = {"_target_": "lit_data.models.UNet", "width": 16}
    model = {"_target_": "lit_data.models.SegmentationModule", "net": net}
    data = {"_target_": "lit_data.datamodules.InspectionDataModule", "scale": None}
    data |= {"read": {"alpha": "opaque"}, "batch_format": "dict"}
    return OmegaConf.create({"model": model, "data": data})


def test_a_checkpoint_of_another_program_changes_nothing(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "a.ckpt")
    cfg = _configuration()
    assert take_trained(cfg, tmp_path / "a.ckpt") is None
    assert cfg == _configuration()
    assert find_doubt(None) is None
    assert find_doubt({"scores": {"val/map50": 0.0121}}) == (
        "val/map50 of the model is 0.0121, which is no better than chance"
    )
    assert find_doubt({"scores": {"val/f1_max": float("nan")}}) is None  # no defect was validated
    warn_of_other_data(None, None, None)


def test_classes_come_from_the_data_and_go_into_the_checkpoint(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for place, kind in enumerate(("dent", "good", "hole")):
        (tmp_path / "set" / kind).mkdir(parents=True)
        for number in range(8):
            image = rng.integers(60 * place, 60 * place + 50, (40, 40), dtype=np.uint8)
            cv2.imwrite(str(tmp_path / "set" / kind / f"{kind}{number}.png"), image)
    run = tmp_path / "run"
    words = [f"data.root={tmp_path}/set", "data.size_px=32", "data.near_duplicates=apart"]
    words += ["model=classifier", "model.net.width=4", "model.net.depth=2"]
    words += [f"hydra.run.dir={run}", *SMALL]
    assert main(["fit", "+experiment=classification", *words, *_places(tmp_path)]) == 0
    record = read_record(run / "checkpoints/best.ckpt")
    assert record is not None
    assert record["data"]["classes"] == record["model"]["classes"] == ["good", "dent", "hole"]
    module = load_trained(run, run / "checkpoints/best.ckpt")
    assert module.classes == ("good", "dent", "hole")
    (tmp_path / "new").mkdir()
    cv2.imwrite(str(tmp_path / "new" / "1.png"), np.full((40, 40), 20, np.uint8))
    words = ["trainer=cpu", f"data.root={tmp_path}/new", f"hydra.run.dir={tmp_path}/out"]
    words += [f"run={run}", *_places(tmp_path)]
    assert main(["predict", "+experiment=classification", *words]) == 0
    row = (tmp_path / "out" / "labels.csv").read_text().splitlines()[1]
    assert row.split(",")[1] in module.classes


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("save_weights_only", [True, False])
def test_every_kind_of_checkpoint_says_what_it_is_trained_on(
    tmp_path: Path, save_weights_only: bool
) -> None:
    record = TrainedRecord("mine", {"_target_": "lit_data.datamodules.X"}, {"width": 2})
    last = ModelCheckpoint(tmp_path, filename="a", save_weights_only=save_weights_only)
    options = QUIET | {"enable_checkpointing": True, "max_steps": 1, "limit_val_batches": 0}
    trainer = L.Trainer(**options, callbacks=[record, last])
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "b.ckpt", weights_only=save_weights_only)
    for name in ("a.ckpt", "b.ckpt"):
        written = read_record(tmp_path / name)
        assert written is not None
        assert (written["experiment"], written["model"]) == ("mine", {"width": 2})
