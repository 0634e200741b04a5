"""What ``predict`` and pictures say about images with a label each."""

import logging
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Batch
from lit_data.datamodules import LabelledImageDataModule
from lit_data.loading import LoaderOptions
from lit_data.predict import find_task
from tests.helpers.reading import opened
from tests.predict.running import predict, read_rows

pytestmark = pytest.mark.usefixtures("few_pictures")

GREYS = {"ok/1.png": 20, "ok/2.png": 120, "dent/3.png": 100, "dent/4.png": 220}


class Greyer(LightningModule):
    """Takes the brightness of an image for the probability of the other classes, in equal parts."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.classes = classes

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        grey = batch["image"].mean((1, 2, 3))[:, None]
        others = grey.expand(-1, self.classes - 1) / (self.classes - 1)
        return torch.cat((1 - grey, others), 1)


def _open(
    folder: Path, greys: dict[str, int], stage: Any = "predict", **options: Any
) -> LabelledImageDataModule:
    for name, grey in greys.items():
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.full((16, 16, 3), grey, np.uint8))
    data = LabelledImageDataModule(
        str(folder / "images"),
        **{"size_px": 16, "splits": {"train": 1.0}, "near_duplicates": "apart", **options},
        cache_dir=str(folder / "cache"),
        loader=LoaderOptions(batch_size=2, worker_kind="inline"),
    )
    return opened(data, stage)


def test_images_get_verdicts_by_what_is_of_no_good_class(tmp_path: Path) -> None:
    data = _open(tmp_path, GREYS)
    assert data.good_classes == ("ok",)
    metrics = predict(data, Greyer(), tmp_path / "out", image_threshold=0.45).metrics
    rows = {row["image"]: row for row in read_rows(tmp_path / "out/images.csv")}
    assert list(rows["ok/1.png"]) == ["image", "score", "verdict", "truth", "kind"]
    verdicts = {name: (row["truth"], row["verdict"]) for name, row in rows.items()}
    assert verdicts == {
        "ok/1.png": ("good", "good"),
        "ok/2.png": ("good", "defect"),
        "dent/3.png": ("defect", "good"),
        "dent/4.png": ("defect", "defect"),
    }
    assert float(rows["dent/4.png"]["score"]) == pytest.approx(220 / 255, abs=1e-4)
    assert (metrics["predict/missed"], metrics["predict/false_alarms"]) == (1, 1)
    assert metrics["predict/image_auroc"] == 0.75
    assert cv2.imread(str(tmp_path / "out/worst.png")) is not None
    labels = read_rows(tmp_path / "out/labels.csv")
    assert list(labels[0]) == ["image", "label", "score", "truth"]


def test_without_a_threshold_the_likeliest_class_decides(tmp_path: Path) -> None:
    metrics = predict(_open(tmp_path, GREYS), Greyer(), tmp_path / "out").metrics
    assert (metrics["predict/missed"], metrics["predict/false_alarms"]) == (1, 0)


def test_two_good_classes_are_both_good(tmp_path: Path) -> None:
    greys = {"ok/1.png": 10, "type a/2.png": 180, "dent/3.png": 250}
    data = _open(tmp_path, greys, good=["ok", "type*"], classes=["ok", "type a", "dent"])
    assert data.good_classes == ("ok", "type a")
    predict(data, Greyer(3), tmp_path / "out")
    rows = {row["image"]: row for row in read_rows(tmp_path / "out/images.csv")}
    assert rows["type a/2.png"]["verdict"] == "good"  # for 0.35 of the likeliest, which is good
    assert float(rows["dent/3.png"]["score"]) == pytest.approx(125 / 255, abs=1e-4)


def test_without_a_good_class_there_is_no_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = _open(tmp_path, {"left/1.png": 20, "right/2.png": 120})
    with caplog.at_level(logging.INFO):
        metrics = predict(data, Greyer(), tmp_path / "out").metrics
    assert "predict/missed" not in metrics
    assert not (tmp_path / "out/images.csv").exists()
    assert any("no class is known to hold good parts" in line for line in caplog.messages)
    with pytest.raises(
        ConfigError, match=r"image_threshold=0.5: no class .*data.good=\[\"NAME\"\]"
    ):
        predict(data, Greyer(), tmp_path / "other", image_threshold=0.5)


@pytest.mark.parametrize("form", ["labels.csv", "train.txt", "pattern"])
def test_images_without_a_label_are_predicted(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    greys = {"ok1.png": 20, "dent2.png": 220, "new.png": 240, "3.png": 10}
    options: dict[str, Any] = {"classes": ["ok", "dent"], "splits": "none"}
    if form == "pattern":
        options["class_pattern"] = "^(ok|dent)"
    else:
        (tmp_path / "images").mkdir()
        separator = "," if form == "labels.csv" else " "
        rows = ["image,label"] if form == "labels.csv" else []
        rows += [f"{name}.png{separator}{name[:-1]}" for name in ("ok1", "dent2", "ok9")]
        (tmp_path / "images" / form).write_text("\n".join(rows))
    with caplog.at_level(logging.INFO):
        data = _open(tmp_path, greys, **options)
    predict(data, Greyer(), tmp_path / "out")
    truth = {row["image"]: row["truth"] for row in read_rows(tmp_path / "out/labels.csv")}
    assert truth == {"ok1.png": "ok", "dent2.png": "dent", "new.png": "", "3.png": ""}
    verdicts = {row["image"]: row["verdict"] for row in read_rows(tmp_path / "out/images.csv")}
    assert verdicts["new.png"] == "defect"
    if form != "pattern":
        assert "1 label is bad" in caplog.text
        assert "ok9.png" in caplog.text
        assert f"2 of 4 images have no label in {tmp_path}/images/{form}" in caplog.text or (
            "2 of 4 images have no label in train.txt" in caplog.text
        )
        with pytest.raises(DataError, match="3 labels are bad"):
            _open(tmp_path, greys, **{**options, "splits": {"train": 1.0}})


def test_only_defects_have_no_auroc(tmp_path: Path) -> None:
    greys = {name: grey for name, grey in GREYS.items() if name.startswith("dent")}
    data = _open(tmp_path, greys, classes=["ok", "dent"])
    metrics = predict(data, Greyer(), tmp_path / "out", image_threshold=0.45).metrics
    assert np.isnan(metrics["predict/image_auroc"])
    assert metrics["predict/missed"] == 1
    assert cv2.imread(str(tmp_path / "out/worst.png")) is not None


@pytest.mark.parametrize("good", [["left"], ["*"]])
def test_good_classes_that_are_none_or_all_are_refused(good: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.good=.* must name some of the classes, and not all"
    ):
        _open(tmp_path, GREYS, good=good)


def test_pictures_show_misses_first_and_then_false_alarms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _open(tmp_path, GREYS, "fit")
    model = Greyer()
    model.register_buffer("image_threshold", torch.tensor(0.45))
    dataset = data.dataset("train")
    loader = data.make_loader("train")
    batch = data.finish_batch(
        data.plan_batch(loader.read(np.arange(len(dataset)), 0), "train"), "train"
    )
    titles: list[str] = []
    set_title = "matplotlib.axes.Axes.set_title"
    monkeypatch.setattr(set_title, lambda self, text, **_: titles.append(text))
    assert find_task(data).draw_predictions(model, batch, tmp_path / "a.png", "", count=4)
    words = [title.split("\n")[1].partition(",")[0].partition(":")[0] for title in titles]
    assert words == ["missed", "false alarm", "model", "model"]
    assert [title.split("\n")[0] for title in titles] == ["dent", "ok", "dent", "ok"]
