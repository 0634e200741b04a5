"""The trainers of other libraries in the benchmark of learning."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from benchmarks.learning_detection import Box, read_detections
from benchmarks.learning_peers import train_torchgeo, train_ultralytics
from tests.benchmarks.suites import write_masked


class _Yolo:
    """Finds one object of class 1 in each image, and keeps what it was given."""

    trained: dict[str, Any]

    def __init__(self, weights: object) -> None:
        self.weights = str(weights)

    def add_callback(self, event: str, callback: Callable[[object], None]) -> None:
        assert event == "on_train_start"

    def train(self, **options: Any) -> None:
        _Yolo.trained = options

    def predict(self, path: Path, **options: Any) -> list[SimpleNamespace]:
        assert self.weights.endswith("best.pt")
        boxes = SimpleNamespace(
            cls=torch.tensor([1.0]),
            xyxy=torch.tensor([[2.0, 3.0, 12.0, 7.0]]),
            conf=torch.tensor([0.5]),
        )
        return [SimpleNamespace(boxes=boxes)]


def test_ultralytics_gets_the_splits_and_gives_its_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("ultralytics")
    module.__dict__["YOLO"] = _Yolo
    monkeypatch.setitem(sys.modules, "ultralytics", module)
    (tmp_path / "classes.txt").write_text("red\nwhite\n")
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.txt").write_text(f"images/{split}.jpg\n")
    train_ultralytics(tmp_path, 0, 90, tmp_path / "out")
    data = yaml.safe_load((tmp_path / "out/data.yaml").read_text())
    assert data["names"] == {0: "red", 1: "white"}
    for split in ("train", "val"):
        listed = (Path(data["path"]) / data[split]).read_text()
        assert listed == f"{tmp_path}/images/{split}.jpg\n"
    assert _Yolo.trained["time"] == 0.025
    assert _Yolo.trained["pretrained"] is False
    assert read_detections(tmp_path / "out/detections.json") == {
        "test": [Box(1, (2.0, 3.0, 12.0, 7.0), 0.5)]
    }


@pytest.mark.slow
def test_torchgeo_writes_a_map_of_each_test_image(tmp_path: Path) -> None:
    pytest.importorskip("torchgeo", reason="needs torchgeo")
    write_masked(tmp_path / "set", images=20, side_px=140)
    train_torchgeo(tmp_path / "set", 0, 3, tmp_path / "out")
    rows = (tmp_path / "set/splits.csv").read_text().splitlines()
    stems = {Path(row.split(",")[0]).stem for row in rows if row.endswith(",test")}
    assert {path.stem for path in (tmp_path / "out/maps").iterdir()} == stems
