"""Exported files as models: modules answer by them, and what does not fit is refused in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from torch import nn
from torch.testing import assert_close

from lit_data.app.exported import Graph, use_exported
from lit_data.app.record import read_record
from lit_data.core.errors import ConfigError, StoreError
from lit_data.models import AnomalyModule, ClassificationModule, SegmentationModule
from lit_data.models.scored import ScoredModule
from lit_data.wings.export import int8
from lit_data.wings.export.int8 import Int8Options
from tests.lit_inspect.boards import write_board

IMAGES = torch.rand(2, 1, 12, 9, generator=torch.Generator().manual_seed(0))
RECORD = {
    **{"experiment": "segmentation", "kind": "a.B", "data": {}, "scores": {}, "look": None},
    **{"model": {"_target_": "lit_data.models.SegmentationModule"}, "root": None, "epochs": 3},
}


def test_a_module_answers_by_the_file(tmp_path: Path) -> None:
    path = write_board(tmp_path / "a.inspect", threshold=0.3, image_threshold=0.8)
    model = SegmentationModule(nn.Identity(), anomaly_metrics=True)
    use_exported(model, Graph(path))
    assert_close(model(IMAGES).sigmoid(), IMAGES)
    assert float(model.predict_threshold) == pytest.approx(0.3)
    assert float(model.image_threshold) == pytest.approx(0.8)
    write_board(path, expand=[0, 0, 0])
    use_exported(model, Graph(path))
    assert_close(model(IMAGES.expand(-1, 3, -1, -1)).sigmoid(), IMAGES)
    assert float(model.image_threshold) == -1
    write_board(path, side=9)
    use_exported(model, Graph(path))
    with pytest.raises(
        ConfigError, match=r"takes only images of \[9, 9\] px, but samples have \[12"
    ):
        model(IMAGES)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5, -0.5])
def test_answers_that_are_no_probabilities_are_refused(value: float, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
    nodes = [onnx.helper.make_node("Add", ["images", "value"], ["probability"])]
    weights = [onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [], [value])]
    graph = Graph(write_board(tmp_path / "a.inspect", nodes=nodes, weights=weights))
    with pytest.raises(StoreError, match=r"a\.inspect: the net gives values .* not in 0\.\.1"):
        graph(IMAGES)


def test_what_a_module_gives_is_found_by_what_it_predicts() -> None:
    torch.manual_seed(0)
    model = SegmentationModule(nn.Conv2d(1, 3, 3), classes=["a", "b"])
    said = model.predict_step({"image": IMAGES}, 0)
    logits = model.invert(torch.cat((said["probability"], said["classes"]), 1), IMAGES)
    assert_close(logits.softmax(1), model(IMAGES).softmax(1))
    labels = ClassificationModule(
        nn.Sequential(nn.Flatten(), nn.Linear(108, 2)), classes=["a", "b"]
    )
    said = labels.predict_step({"image": IMAGES}, 0)
    assert_close(labels.invert(said, IMAGES).softmax(1), said)
    anomaly = AnomalyModule(nn.Identity())
    distances = torch.tensor([0.1, 1.0, 3.0])
    probability = (4 * distances.log()).sigmoid()
    assert_close(anomaly.invert(probability, IMAGES), distances)


class _Hooked(SegmentationModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize("kind", [_Hooked, LightningModule, ClassificationModule, ScoredModule])
def test_a_module_of_another_kind_is_refused(kind: Any, tmp_path: Path) -> None:
    path = write_board(tmp_path / "a.inspect")
    model = kind.__new__(kind)
    with pytest.raises(
        ConfigError, match=rf"holds maps, which cannot be scored as a {kind.__name__}"
    ):
        use_exported(model, Graph(path))


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = write_board(tmp_path / "a.inspect", trained=RECORD)
    record = read_record(path)
    assert record is not None
    assert record["epochs"] == 3
    data = path.read_bytes()
    checkpoint = tmp_path / "b.inspect"
    torch.save({"state_dict": {}}, checkpoint)
    damaged = tmp_path / "c.inspect"
    damaged.write_bytes(data[:400] + bytes([data[400] ^ 1]) + data[401:])
    for wrong in (checkpoint, damaged):
        with pytest.raises(
            StoreError, match=r"damaged, or not an \.inspect file: its SHA-256 differs"
        ):
            read_record(wrong)
    for change in ({"model": {"_target_": "${oc.env:HOME}"}}, {"epochs": "3"}, {"scores": 1}):
        write_board(path, trained={**RECORD, **change})
        with pytest.raises(StoreError, match="the record of its training cannot be read"):
            read_record(path)
    write_board(path)
    assert read_record(path) is None


@pytest.mark.parametrize(
    ("monitor", "mode", "scores", "is_int8"),
    [
        ("val/dice", "max", (0.9, 0.895), True),
        ("val/dice", "max", (0.9, 0.88), False),
        ("val/dice", "max", (0.9, float("nan")), False),
        ("val/loss", "min", (0.1, 0.105), True),
        ("val/loss", "min", (0.1, 0.12), False),
        (None, "max", (0.9, 0.88), False),
    ],
)
def test_float32_stays_where_int8_scores_worse(
    monitor: str | None,
    mode: str,
    scores: tuple[float, float],
    is_int8: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoded = write_board(tmp_path / "a.inspect").read_bytes()
    quantised = write_board(tmp_path / "a.inspect", threshold=0.4).read_bytes()
    by_file = dict(zip((0.5, 0.4), scores, strict=True))
    monkeypatch.setattr(int8, "build_datamodule", lambda cfg: LightningDataModule())
    monkeypatch.setattr(int8, "read_training", lambda *_: [IMAGES.numpy()])
    monkeypatch.setattr(int8, "encode_int8", lambda *_: quantised)
    monkeypatch.setattr(
        int8, "score_graph", lambda _cfg, _data, graph: by_file[graph.inspector.settings.threshold]
    )
    cfg = OmegaConf.create({"callbacks": {"checkpoint": {"monitor": monitor, "mode": mode}}})
    chosen = int8.choose_precision(encoded, cfg, Int8Options(int8=True))
    assert chosen == (quantised if is_int8 else encoded)
    # A memory bank trains in one pass, and no score chooses its checkpoint.
    name = monitor or "val/image_auroc"
    text = f"the file stays in float32, because the score drops by more than int8_drop=0.01: {name}"
    assert (text in caplog.text) != is_int8
