"""The table of kinds of data by commands in docs/commands.md: each cell works, or is refused as it says."""

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.app.cli import main
from tests import outputs
from tests.helpers.families import run_family

PAGE = (Path(__file__).resolve().parents[2] / "docs/commands.md").read_text(encoding="utf-8")
LIMIT_S = 600
QUICK = (*outputs.QUICK, *outputs.NO_TIMELINES)
TOYS = {
    "stripe": (*outputs.STRIPES, "data.synthesis.probability=1.0"),  # it has few patches
    "segmentation": (*outputs.PHOTOGRAPHS, "data.patch_px=32", "model.net.strides_px=[2,4]"),
    "classification": (
        "model=classifier",
        "model.net.width=4",
        "model.optimizer.lr=0.02",
        "data.size_px=32",
        "data.loader.batch_size=8",
        "augment=none",
    ),
    # The first blocks of the encoder: the exporter takes a second for each.
    "anomaly": (
        "data.samples={count: 40, size_px: [128, 128]}",
        "data.size_px=128",
        "model.net.strides_px=[4]",
    ),
    # Two ranks share the samples of each split, and some validate without a box.
    "detection": (
        *outputs.BOXES,
        "data.samples.count=70",
        "data.mosaic.probability=0",
        "model.net.finest_stride_px=4",
    ),
    "ct": (*outputs.VOLUMES, "data.samples.count=14"),
    "ct_segmentation": outputs.VOXELS,
    "watermark": outputs.MARKS,
    "gan": outputs.GENERATED,
}
EPOCHS = {"segmentation": 4, "classification": 4, "detection": 12}
"""Epochs of ``fit`` where a model must be better than chance to be calibrated; others have one."""
EXTRA = {
    ("classification", "test"): ["data.splits=fit/splits.csv", "data.split_seed=9"],
    ("detection", "predict"): ["predict.threshold=0", "model.score_threshold=0"],
}
"""Words of a command of a kind."""
SCORES = {
    "stripe": "average_precision",
    "segmentation": "average_precision",
    "classification": "accuracy",
    "anomaly": "image_auroc",
    "detection": "map50",
    "ct": "iou",
    "ct_segmentation": "mean_dice",
    "watermark": "dice",
}
"""What ``validate`` and ``test`` give again; tests/conf/test_gan_configs.py looks at the others."""
RANKS = " trainer=ddp_cpu"
MEASURED = (
    "benchmark.seconds_per_row=0.05",
    "benchmark.repeats=1",
    "benchmark.micro_batch_sizes=[2]",
    "benchmark.methods=[dataloader,inline,device]",
    "benchmark.workers=[1]",
    "benchmark.finish=true",
)
REASONS = {  # what a refusal says, by the number of its reason on the page
    "1": r"calibrate is for verdicts on whole images, but a \w+ has none",
    "2": r"pod searches maps of defects, but a \w+ has no maps",
    "3": r"a \w+ cannot be exported, because lit_inspect",
    "4": r"2 processes would each train on a part of the images",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.usefixtures("few_pictures"),
]


def _read_table() -> dict[str, dict[str, str]]:
    """Cells of the table of the page, by kind and command."""
    lines = PAGE.split("## Kinds and commands")[1].split("\n\n## ")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    kinds = [cell.strip("`") for cell in rows[0][1:]]
    table: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    for names, *cells in rows[2:]:
        for command in re.findall(r"`(.+?)`", names):
            for kind, cell in zip(kinds, cells, strict=True):
                table[kind][command] = cell
    return table


def _toy(kind: str, folder: Path) -> list[str]:
    places = [f"paths.runs={folder}/runs", f"paths.cache={folder}/cache"]
    if kind == "classification":  # classes that any net tells apart, as few images are ranked
        places.insert(0, f"data.root={_write_classes(folder / 'images')}")
    return [f"+experiment={kind}", *QUICK, *TOYS[kind], *places]


def _write_classes(root: Path) -> Path:
    """Dark images of good parts and bright ones of a defect."""
    rng = np.random.default_rng(0)
    for kind, level in (("good", 60), ("burn", 190)):
        (root / kind).mkdir(parents=True, exist_ok=True)
        for number in range(20):
            pixels = rng.normal(level, 20, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            cv2.imwrite(str(root / kind / f"{number}.png"), pixels)
    return root


def _words(kind: str, command: str, folder: Path) -> list[str]:
    run, toy = str(folder / "fit"), _toy(kind, folder)
    places = toy[-2:]
    epochs = EPOCHS.get(kind)
    longer = [f"trainer.{name}={epochs}" for name in ("max_epochs", "check_val_every_n_epoch")]
    words = {
        "fit": [*toy, *(longer if epochs else []), f"hydra.run.dir={run}"],
        "fit -m": [*toy, "seed=1,2", "sweep.isolate=none", f"hydra.sweep.dir={folder}/sweep"],
        "prepare": [*toy, "prepare.check=true"],
        "show": [*toy, "show.count=3"],
        "report": [run],
        "export": [run, f"{folder}/part.inspect"],
        "calibrate": [run, "images=val", "miss=0.96", "false_alarms=0.96", *places],
        "pod": [run, *places],
        "benchmark": [*toy, *MEASURED],
        "doctor": toy,
    }
    words[f"fit{RANKS}"] = toy
    own = words.get(command, [*toy, f"ckpt={run}/checkpoints/best.ckpt"])
    return [*command.split(), *own, *EXTRA.get((kind, command), [])]


def test_the_table_names_each_kind_and_each_reason() -> None:
    table = _read_table()
    assert table.keys() == TOYS.keys()
    cells = {cell for kind in table.values() for cell in kind.values()}
    assert cells == {"yes", *REASONS}
    for number in REASONS:
        assert re.search(rf"^{number}\. ", PAGE.split("## Kinds and commands")[1], re.MULTILINE)


Results = dict[str, dict[str, Any]]


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("kind", TOYS)
def test_each_cell_works_or_says_why_not(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    patch = request.getfixturevalue("monkeypatch")
    patch.chdir(tmp_path)
    results: Results = {}

    def run(command: str) -> tuple[int, str]:
        words = _words(kind, command, tmp_path)
        if command.endswith(RANKS):
            lit_data = [sys.executable, "-W", "ignore", "-m", "lit_data"]
            return run_family([*lit_data, *words], limit_s=LIMIT_S, cwd=tmp_path)
        code = main(words)
        if code == 0:
            results[command] = _read_newest(tmp_path)
        if command == "fit":
            request.getfixturevalue("without_pictures")  # those of one training are enough
        return code, request.getfixturevalue("capsys").readouterr().err

    _check_cells(_read_table()[kind], run)
    assert len(list((tmp_path / "sweep").glob("*/checkpoints/best.ckpt"))) == 2
    assert main(["prepare", *_toy(kind, tmp_path), "prepare.verify=true"]) == 0
    results["prepare verified"] = _read_newest(tmp_path)
    _check_pictures(kind, results)
    if kind in SCORES:
        _check_scores(SCORES[kind], results)
    CHECKS.get(kind, lambda results: None)(results)


def _read_newest(folder: Path) -> dict[str, Any]:
    """Summary and folder of the last command that left one."""
    path = max(folder.rglob("summary.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(path.read_text()) | {"folder": path.parent}


def _check_cells(cells: dict[str, str], run: Callable[[str], tuple[int, str]]) -> None:
    for command, cell in cells.items():
        code, said = run(command)
        if cell == "yes":
            assert code == 0, (command, said)
        else:
            assert code == 2, (command, said)
            assert re.search(REASONS[cell], said), (command, said)


def _check_pictures(kind: str, results: Results) -> None:
    """A training left pictures and checkpoints, and ``show`` as many samples as it was asked for."""
    fitted = results["fit"]
    assert fitted["experiment"] == kind
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 300
    for name in ("best.ckpt", "last.ckpt"):
        assert (fitted["folder"] / "checkpoints" / name).is_file()
    assert results["show"]["show/patches"] == 3


def _check_scores(score: str, results: Results) -> None:
    """``test`` and ``validate`` give the scores of the training."""
    for stage, command in (("test", "test"), ("val", "validate")):
        key = f"{stage}/{score}"
        assert 0 <= results["fit"][key] <= 1
        assert results[command][key] == pytest.approx(results["fit"][key], abs=1e-6)


def _read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _check_images(results: Results) -> None:
    count = results["prepare"]["prepare/images"]
    verified = results["prepare verified"]
    assert (verified["prepare/images"], verified["prepare/skipped"]) == (count, 0)
    assert results["predict"]["predict/images"] == count


def _check_segmentation(results: Results) -> None:
    _check_images(results)
    assert results["prepare verified"]["prepare/layout"] == "beside"
    fitted, folder = results["fit"], results["predict"]["folder"]
    rows = _read_rows(folder / "images.csv")
    assert len(rows) == len(list((folder / "maps").rglob("*.png"))) == 24
    assert all(0 <= float(row["score"]) <= 1 for row in rows)
    assert (folder / "defects.csv").is_file()
    assert (results["show"]["folder"] / "augment.png").is_file()
    best = fitted["folder"] / "checkpoints/best.ckpt"
    weights = torch.load(best, weights_only=True)["state_dict"]
    chosen = json.loads((folder / "fingerprint.json").read_text())["predict"]
    assert chosen["threshold"] == pytest.approx(float(weights["predict_threshold"]))
    assert chosen["threshold"] == pytest.approx(fitted["val/f1_max_threshold"])
    least = chosen["image_threshold"]
    if least is None:  # all images of this validation show a defect
        assert float(weights["image_threshold"]) == -1
        assert all((row["verdict"] == "defect") == (int(row["defects"]) > 0) for row in rows)
    else:
        assert least == pytest.approx(fitted["val/image_f1_max_threshold"])
        clear = [row for row in rows if abs(float(row["score"]) - least) > 1e-6]
        assert all((row["verdict"] == "defect") == (float(row["score"]) >= least) for row in clear)


def _check_classification(results: Results) -> None:
    """Splits of one run give those of another, and labels of all images are counted."""
    assert len(_read_rows(results["fit"]["folder"] / "splits.csv")) == 40
    first, again = (
        json.loads((results[command]["folder"] / "confusion.json").read_text())
        for command in ("fit", "test")
    )
    assert first.keys() == {"classes", "val", "test", "verdicts"}
    assert first["test"] == again["test"]
    predicted = results["predict"]
    rows = _read_rows(predicted["folder"] / "labels.csv")
    assert len(rows) == predicted.get("predict/good", 0) + predicted.get("predict/burn", 0) == 40
    assert {row["truth"] for row in rows} == {"good", "burn"}
    right = sum(row["label"] == row["truth"] for row in rows)
    assert predicted["predict/accuracy"] == pytest.approx(right / 40, abs=1e-4)
    assert results["prepare"]["prepare/images"] == 40


def _check_detection(results: Results) -> None:
    _check_images(results)
    assert results["prepare verified"]["prepare/classes"].count(", ") == 2
    assert 0 <= results["fit"]["test/map"] <= results["fit"]["test/map50"]
    assert (results["show"]["folder"] / "augment.png").is_file()
    predicted = results["predict"]
    assert predicted["predict/images"] == predicted["predict/images_with_objects"]
    assert predicted["predict/objects"] > predicted["predict/images"]


def _check_points(results: Results) -> None:
    assert results["fit"]["test/iou"] <= results["fit"]["test/f1"] <= 1
    prepared = results["prepare verified"]
    assert (prepared["prepare/volumes"], prepared["prepare/refused"]) == (14, 0)
    assert results["prepare"]["prepare/points"] == prepared["prepare/points"]
    assert results["predict"]["predict/volumes"] == 14


def _check_voxels(results: Results) -> None:
    fitted, predicted = results["fit"], results["predict"]
    assert fitted["test/mean_dice"] == fitted["test/dice_tumour"]
    assert fitted["test/true_ml_tumour"] == fitted["test/mean_true_ml"] > 0
    assert predicted["predict/volumes"] == 6
    assert 0 <= predicted["predict/dice_tumour"] <= 1
    folder = predicted["folder"]
    words = _words("ct_segmentation", "predict", fitted["folder"].parent)
    assert main([*words, f"predict.folder={folder}", "predict.resume=true"]) == 0
    again = _read_newest(folder.parent)
    assert again["predict/images_kept"] == 6
    assert again["predict/mean_dice"] == predicted["predict/mean_dice"]


def _check_watermarks(results: Results) -> None:
    _check_images(results)
    assert results["show"]["show/defects"] >= 1


CHECKS: dict[str, Callable[[Results], None]] = {
    "stripe": _check_images,
    "segmentation": _check_segmentation,
    "classification": _check_classification,
    "detection": _check_detection,
    "ct": _check_points,
    "ct_segmentation": _check_voxels,
    "watermark": _check_watermarks,
}
