"""``model=compare_features`` from fit to an exported file, on pairs with and without masks."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.app.cli import main
from lit_inspect.__main__ import main as inspect
from tests.outputs import NO_TIMELINES

SIDE_PX = 96
PAIRS = (
    *("+experiment=stripe", "model=compare_features", "model.net.references=1"),
    *("data.layout=pairs", "data.files={target: target/*.png, ref1: ref/*.png}"),
    *("trainer=cpu", "trainer.enable_progress_bar=false", "+trainer.enable_model_summary=false"),
    *("data.patch_px=64", "data.stride_px=32", "data.loader.batch_size=8"),
    *("data.loader.num_workers=0", "model.places=5000", *NO_TIMELINES),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("without_pictures"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]


def _write_pairs(folder: Path, count: int, seed: int = 0) -> Path:
    """Pairs of which every second target of the last half shows a spot."""
    rng = np.random.default_rng(seed)
    for role in ("target", "ref", "masks"):
        (folder / role).mkdir(parents=True)
    rows = ["image,split"]
    for number in range(count):
        noise = rng.integers(60, 200, (SIDE_PX, SIDE_PX)).astype(np.uint8)
        blurred = cv2.GaussianBlur(noise, (0, 0), 4)
        target = np.interp(blurred, (blurred.min(), blurred.max()), (40, 160)).astype(np.uint8)
        reference = (
            (target + rng.normal(0, 2 + 2 * (number % 5), target.shape))
            .clip(0, 255)
            .astype(np.uint8)
        )
        images = {"ref": reference, "target": target, "masks": np.zeros_like(target)}
        split = "train" if number < count // 2 else ("val", "test")[number // 2 % 2]
        if split != "train" and number % 2:
            images["target"][30:40, 40:50] += 90
            images["masks"][30:40, 40:50] = 255
        for role, image in images.items():
            cv2.imwrite(str(folder / role / f"{number:02}.png"), image)
        rows.append(f"target/{number:02}.png,{split}")
    (folder / "splits.csv").write_text("\n".join(rows))
    return folder


def _call(command: str, *words: str) -> dict[str, Any]:
    folder = Path.cwd() / command
    shutil.rmtree(folder, ignore_errors=True)
    assert main([command, *words, f"paths.run={folder}", f"hydra.run.dir={folder}"]) == 0
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_command_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    root = _write_pairs(tmp_path / "set", 32)
    splits = [f"data.root={root}", f"data.splits={root}/splits.csv"]
    masks = ["data.masks=masks", "data.mask_splits=[train,val,test]", "synthesis=none"]
    fitted = _call("fit", *PAIRS, *splits, *masks)
    assert fitted["val/image_auroc"] == fitted["test/image_auroc"] == 1
    assert fitted["test/average_precision"] > 0.3
    run = f"run={tmp_path}/fit"
    tested = _call("test", *PAIRS, *splits, *masks, run)
    assert tested["test/average_precision"] == pytest.approx(fitted["test/average_precision"])
    new = _write_pairs(tmp_path / "new", 8, seed=1)
    # Images smaller than the patches of other trainings: these are as the checkpoint knows.
    _call("predict", "trainer=cpu", f"data.root={new}", run)
    verdicts = {row["image"]: row["verdict"] for row in _read(tmp_path / "predict/images.csv")}
    defective = {f"target/{number:02}.png" for number in (5, 7)}
    assert {name for name, verdict in verdicts.items() if verdict == "defect"} == defective
    _call("calibrate", "fit", "miss=0.5", "false_alarms=0.5", "confidence=0.9")
    _call("predict", *PAIRS, f"data.root={new}", run)
    predicted = {row["image"]: row for row in _read(tmp_path / "predict/images.csv")}
    assert all(row["guarantee"].startswith("misses <= 0.5") for row in predicted.values())
    assert main(["export", "fit", "pairs.inspect"]) == 0
    assert inspect(["pairs.inspect", "new", "--out", "verdicts"]) == 0
    for row in _read(tmp_path / "verdicts/images.csv"):
        assert row["verdict"] == predicted[row["image"]]["verdict"]
        assert float(row["score"]) == pytest.approx(
            float(predicted[row["image"]]["score"]), abs=1e-4
        )


def test_synthetic_defects_choose_the_thresholds_where_there_are_no_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    root = _write_pairs(tmp_path / "set", 16)
    words = [*PAIRS, f"data.root={root}", f"data.splits={root}/splits.csv"]
    fitted = _call("fit", *words, "trainer.max_epochs=7", "synthesis=library")
    assert 0 < fitted["val/image_f1_max_threshold"] < 1
    epochs = {row["epoch"] for row in _read(next((tmp_path / "fit/csv").rglob("metrics.csv")))}
    assert epochs <= {"", "0", "1"}  # one pass, and the test after it
