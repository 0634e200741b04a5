"""``+experiment=anomaly`` from fit to predict, on the sets that people have."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.app.cli import main

QUICK = (
    "trainer=cpu",
    "trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
    "data.loader.batch_size=4",
    "data.loader.num_workers=0",
)
GAUSSIANS = ("+experiment=anomaly", "data.size_px=128")
TEXTURES = (
    "+experiment=anomaly",
    "model=anomaly_texture",
    "data.size_px=null",
    "model.normality.size=200",
    "model.normality.candidates=2000",
)
MEANS = "normality.scales.0.mean"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("without_pictures"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]


def _run(
    tmp_path: Path, command: str, *words: str, code: int = 0, model: Sequence[str] = GAUSSIANS
) -> dict[str, Any]:
    folder = tmp_path / command
    places = [f"paths.run={folder}", f"hydra.run.dir={folder}", f"paths.cache={tmp_path}/cache"]
    assert main([command, *model, *QUICK, *words, *places]) == code
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _write(
    folder: Path, count: int, *, defects: bool = False, seed: int = 0, dtype: Any = np.uint8
) -> Path:
    """Images of stripes; those with defects have a dark square, and no masks."""
    rng, highest = np.random.default_rng(seed), np.iinfo(dtype).max
    folder.mkdir(parents=True)
    for number in range(count):
        waves = np.tile(0.5 + 0.2 * np.sin(np.arange(96) + rng.uniform(0, 6)), (80, 1))
        image = (waves + rng.normal(0, 0.02, waves.shape)).clip(0, 1)
        if defects:
            image[30:44, 40:54] = 0.1
        cv2.imwrite(str(folder / f"{number}.png"), (image * highest).astype(dtype))
    return folder


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_good_images_alone_are_enough(dtype: Any, tmp_path: Path) -> None:
    root = _write(tmp_path / "good", 14, dtype=dtype)
    words = [f"data.root={root}", *(["data.read.gray_to_rgb=false"] if dtype == np.uint16 else [])]
    fitted = _run(tmp_path, "fit", *words)
    assert 0 <= fitted["val/false_alarms"] < 1
    assert "test/image_auroc" not in fitted
    path = tmp_path / "fit/checkpoints/best.ckpt"
    assert torch.load(path, weights_only=True)["state_dict"][MEANS].shape == (8, 8, 112)
    new = _write(tmp_path / "new", 3, seed=5, dtype=dtype)
    _write(tmp_path / "new" / "bad", 3, seed=6, defects=True, dtype=dtype)
    predicted = _run(tmp_path, "predict", f"data.root={new}", *words[1:], f"ckpt={path}")
    with (tmp_path / "predict/images.csv").open(newline="") as file:
        verdicts = {row["image"]: row["verdict"] for row in csv.DictReader(file)}
    assert {verdicts[f"bad/{number}.png"] for number in range(3)} == {"defect"}
    assert sum(verdict == "defect" for verdict in verdicts.values()) <= 4
    assert predicted["predict/defects"] >= 3
    scores = cv2.imread(str(tmp_path / "predict/maps/0.png.png"), cv2.IMREAD_UNCHANGED)
    assert scores.dtype == np.uint16


def test_segmentation_by_the_protocol_of_the_field_judges_by_good_parts(tmp_path: Path) -> None:
    root = tmp_path / "set"
    _write(root / "train/good", 12)
    _write(root / "test/good", 14, seed=1)  # enough pixels for a rate of 1e-5
    _write(root / "test/spot", 3, seed=2, defects=True)
    (root / "ground_truth/spot").mkdir(parents=True)
    mask = np.zeros((80, 96), np.uint8)
    mask[30:44, 40:54] = 255
    for number in range(3):
        cv2.imwrite(str(root / f"ground_truth/spot/{number}_mask.png"), mask)
    model = ("+experiment=segmentation", "model=unet", "model.net.width=4", "data.patch_px=64")
    words = [f"data.root={root}", "data.protocol=mvtec", "synthesis=library", "model.quantile=1"]
    words += ["data.sampling.positives=null", "callbacks.checkpoint.monitor=null"]
    words += ["trainer.max_epochs=2"]
    fitted = _run(tmp_path, "fit", *words, model=model)
    for name in ("aupimo", "aupro_30", "image_auroc", "pixel_auroc"):
        assert 0 <= fitted[f"test/{name}"] <= 1
    checkpoint = tmp_path / "fit/checkpoints/best.ckpt"
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert float(state["predict_threshold"]) == pytest.approx(fitted["val/good_threshold"])
    assert float(state["image_threshold"]) == pytest.approx(fitted["val/image_good_threshold"])
    _run(tmp_path, "predict", f"data.root={root}/test", f"ckpt={checkpoint}", model=model)
    with (tmp_path / "predict/images.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            is_defect = float(row["score"]) >= float(state["image_threshold"])
            assert row["verdict"] == ("defect" if is_defect else "good")


def test_textures_are_learned_in_patches_at_full_resolution(tmp_path: Path) -> None:
    root = _write(tmp_path / "parts" / "good", 14)
    _write(root.with_name("stained"), 4, seed=6, defects=True)
    words = [f"data.root={root.parent}", "data.patch_px=64"]
    fitted = _run(tmp_path, "fit", *words, model=TEXTURES)
    assert fitted["test/image_auroc"] == 1
    path = tmp_path / "fit/checkpoints/best.ckpt"
    assert torch.load(path, weights_only=True)["state_dict"]["normality.bank"].shape == (200, 96)


def test_wrong_use_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = _write(tmp_path / "good", 8)
    (tmp_path / "no.pt").write_bytes(b"no weights")
    _run(tmp_path, "fit", f"data.root={root}", f"model.net.weights={tmp_path}/no.pt", code=4)
    assert "no.pt is not a readable checkpoint" in capsys.readouterr().err
    words = ["data.samples={count: 16, size_px: [96, 96]}", "data.train_on=all"]
    _run(tmp_path, "fit", *words, code=2)
    assert "training images show defects" in capsys.readouterr().err
