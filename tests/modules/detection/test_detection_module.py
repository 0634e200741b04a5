from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.commands.checkpoints import load_weights
from lit_data.errors import ConfigError
from lit_data.modules import DetectionModule, DetectorNet
from lit_data.modules.detection.module import find_objects
from lit_data.testing import QUIET
from lit_data.types import Batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.usefixtures("small_runs_are_fast"),
]

HEIGHT_PX, WIDTH_PX = 96, 64


def _draw(row: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An image of two rectangles, bright ones of class 0 and dark ones of class 1."""
    image = 0.5 + 0.02 * torch.randn(3, HEIGHT_PX, WIDTH_PX, generator=generator)
    boxes = torch.zeros(2, 6)
    for number, top in enumerate((4, 52)):
        height, width = torch.randint(14, 38, (2,), generator=generator).tolist()
        left = int(torch.randint(2, WIDTH_PX - 40, (1,), generator=generator))
        kind = int(torch.randint(0, 2, (1,), generator=generator))
        image[:, top : top + height, left : left + width] += 0.4 if kind == 0 else -0.4
        place = [
            (left + width / 2) / WIDTH_PX,
            (top + height / 2) / HEIGHT_PX,
            width / WIDTH_PX,
            height / HEIGHT_PX,
        ]
        boxes[number] = torch.tensor([row, kind, *place])
    return image, boxes


def _batch(images: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(0)
    drawn = [_draw(row, generator) for row in range(images)]
    return {
        "image": torch.stack([image for image, _ in drawn]),
        "boxes": torch.cat([boxes for _, boxes in drawn]),
    }


def _loader(*batches: Batch) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def _trainer(folder: Path, **options: Any) -> L.Trainer:
    return L.Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": folder, **options})


def _module(**options: Any) -> DetectionModule:
    torch.manual_seed(0)
    return DetectionModule(DetectorNet(2, width=8), **options)


def test_it_learns_four_images_by_heart(tmp_path: Path) -> None:
    model, loader = _module(), _loader(_batch())
    trainer = _trainer(tmp_path, max_epochs=100, check_val_every_n_epoch=100)
    trainer.fit(model, loader, loader)
    assert trainer.callback_metrics["val/map50"] > 0.9
    tested = trainer.test(model, loader, verbose=False)[0]
    assert set(tested) == {"test/map50", "test/map"}
    assert tested["test/map50"] > 0.9
    found: Any = trainer.predict(model, loader)
    assert len(found[0]) == 4
    assert sorted(found[0][0]["classes"][:2].tolist()) == sorted(_batch()["boxes"][:2, 1].tolist())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_trains_in_any_precision_and_with_accumulated_gradients(
    precision: Any, tmp_path: Path
) -> None:
    model = _module(schedule="none")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer = _trainer(tmp_path, precision=precision, accumulate_grad_batches=2)
    trainer.fit(model, _loader(_batch(2), _batch(1)), _loader(_batch(2)))
    assert trainer.global_step == 1
    assert set(trainer.callback_metrics) == {"train/loss", "val/map50", "val/map"}
    assert trainer.callback_metrics["train/loss"].dtype == torch.float32
    assert torch.isfinite(trainer.callback_metrics["train/loss"])
    assert all(not torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_images_may_all_be_empty(tmp_path: Path) -> None:
    empty = {"image": torch.rand(2, 3, 40, 72), "boxes": torch.zeros(0, 6)}
    trainer = _trainer(tmp_path)
    trainer.fit(_module(), _loader(empty), _loader(empty))
    assert trainer.callback_metrics["val/map50"] == 0
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_a_piece_of_a_batch_keeps_its_boxes(tmp_path: Path) -> None:
    model, whole = _module().eval(), _batch(3)
    model.trainer = _trainer(tmp_path)
    model.log = lambda *_, **__: None  # type: ignore[assignment,method-assign]
    expected = model.training_step(
        {"image": whole["image"][1:], "boxes": whole["boxes"][2:] - torch.eye(6)[0]}, 0
    )
    piece = {
        "image": whole["image"][1:],
        "boxes": whole["boxes"][2:],
        "boxes_count": torch.tensor([2, 2]),
    }
    assert float(model.training_step(piece, 0).detach()) == float(expected.detach())


def test_predictions_lie_in_the_image_and_above_the_threshold(tmp_path: Path) -> None:
    model = _module(score_threshold=0.008, iou_threshold=0.9)
    found: Any = _trainer(tmp_path).predict(model, _loader(_batch(2)))
    assert [set(image) for image in found[0]] == [{"boxes", "scores", "classes"}] * 2
    for image in found[0]:
        assert 0 < len(image["boxes"]) == len(image["scores"]) == len(image["classes"]) <= 100
        assert image["boxes"].min() >= 0
        assert (image["boxes"].amax(0) <= torch.tensor([WIDTH_PX, HEIGHT_PX] * 2)).all()
        assert image["scores"].min() > 0.008
        assert torch.equal(image["scores"], image["scores"].sort(descending=True).values)


def test_objects_of_one_image() -> None:
    boxes = torch.tensor([[0.0, 0.0, 8.0, 8.0], [0.0, 0.0, 8.0, 7.0], [20.0, 20.0, 28.0, 28.0]])
    logits = torch.tensor([[2.0, -1.5], [3.0, -9.0], [-9.0, 0.5]])
    found = find_objects(logits, boxes, score_threshold=0.1, iou_threshold=0.5)
    assert found["boxes"].tolist() == boxes[[1, 2, 0]].tolist()
    assert found["classes"].tolist() == [0, 1, 1]
    assert found["scores"].tolist() == pytest.approx(
        torch.tensor([3.0, 0.5, -1.5]).sigmoid().tolist()
    )


def test_objects_are_limited_in_number() -> None:
    places = torch.arange(300.0)[:, None] * 10
    boxes = torch.cat((places, places, places + 5, places + 5), dim=1)
    found = find_objects(
        torch.linspace(-1, 1, 300)[:, None], boxes, score_threshold=0.1, iou_threshold=0.5
    )
    assert torch.equal(found["boxes"], boxes.flip(0)[:100])


def test_checkpoints_hold_plain_data(tmp_path: Path) -> None:
    plain = {"schedule": "cosine", "box_weight": 1.5, "score_threshold": 0.3, "iou_threshold": 0.5}
    model, loader = _module(**plain), _loader(_batch(2))
    trainer = _trainer(tmp_path)
    trainer.fit(model, loader, loader)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    other = DetectionModule(DetectorNet(2, width=8))
    load_weights(other, path)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"] == {
        **plain,
        "num_parameters": sum(weight.numel() for weight in model.net.parameters()),
    }
    loaded = DetectionModule.load_from_checkpoint(
        path, net=DetectorNet(2, width=8), weights_only=True
    )
    assert (loaded.schedule, loaded.box_weight, loaded.score_threshold) == ("cosine", 1.5, 0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"score_threshold": 1.0},
            "score_threshold=1.0, iou_threshold=0.6: need 0 <= score_threshold < 1 and 0 < iou",
        ),
        (
            {"iou_threshold": 0.0},
            "score_threshold=0.25, iou_threshold=0.0: need 0 <= score_threshold < 1 and 0 < iou",
        ),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _module(**options)


class Named(L.LightningDataModule):
    """A set of some classes, of which nothing else is known."""

    def __init__(self, classes: Any) -> None:
        super().__init__()
        self.classes = classes

    def predict_dataloader(self) -> DataLoader[Any]:
        return _loader(_batch(1))


@pytest.mark.parametrize("classes", [("a", "b"), ("a",), 3, None])
def test_a_set_must_not_have_more_classes_than_the_net(classes: Any, tmp_path: Path) -> None:
    trainer, module = _trainer(tmp_path), _module()
    assert trainer.predict(module, datamodule=Named(classes))
    with pytest.raises(
        ConfigError, match=r"the dataset has 3 classes, the net 2: set model\.net\.classes=3"
    ):
        trainer.predict(module, datamodule=Named(("a", "b", "c")))
    del module.net.classes  # a net of another make may not tell
    assert trainer.predict(module, datamodule=Named(("a", "b", "c")))
