from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.wings.detection import DetectionModule, DetectorNet
from lit_data.wings.detection.model.module import find_objects
from lit_data.wings.detection.model.net import Predictions
from tests.models.runs import (
    assert_plain_checkpoint,
    assert_trains_accumulated,
    count_weights,
    load_batches,
    make_trainer,
)

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
        centre = (left + width / 2) / WIDTH_PX, (top + height / 2) / HEIGHT_PX
        boxes[number] = torch.tensor([row, kind, *centre, width / WIDTH_PX, height / HEIGHT_PX])
    return image, boxes


def _batch(images: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(0)
    drawn = [_draw(row, generator) for row in range(images)]
    return {
        "image": torch.stack([image for image, _ in drawn]),
        "boxes": torch.cat([boxes for _, boxes in drawn]),
    }


def _module(**options: Any) -> DetectionModule:
    torch.manual_seed(0)
    return DetectionModule(DetectorNet(2, width=8), **options)


class Learned(NamedTuple):
    """A module that was trained on four images, and the scores of its validation."""

    model: DetectionModule
    scores: dict[str, float]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    model, loader = _module(), load_batches(_batch())
    folder = tmp_path_factory.mktemp("learned")
    trainer = make_trainer(folder, max_epochs=100, check_val_every_n_epoch=100)
    trainer.fit(model, loader, loader)
    return Learned(model, {name: float(score) for name, score in trainer.callback_metrics.items()})


def test_it_learns_four_images_by_heart(learned: Learned, tmp_path: Path) -> None:
    model, loader, trainer = learned.model, load_batches(_batch()), make_trainer(tmp_path)
    assert learned.scores["val/map50"] > 0.9
    tested = trainer.test(model, loader, verbose=False)[0]
    assert {"test/map50", "test/map", "test/map_small", "test/froc_1"} <= set(tested)
    assert tested["test/map50"] > 0.9
    found = trainer.predict(model, loader)
    assert len(found[0]) == 4
    assert sorted(found[0][0]["classes"][:2].tolist()) == sorted(_batch()["boxes"][:2, 1].tolist())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_trains_in_any_precision_and_with_accumulated_gradients(
    precision: Any, tmp_path: Path
) -> None:
    model, batches = _module(schedule="none"), (_batch(2), _batch(1))
    trainer = assert_trains_accumulated(model, batches, tmp_path, precision=precision)
    assert {"train/loss", "val/loss", "val/map50", "val/map"} <= set(trainer.callback_metrics)


def test_the_threshold_of_the_last_validation_is_kept_and_predicted_with(
    learned: Learned, tmp_path: Path
) -> None:
    chosen = learned.scores["val/object_f1_max_threshold"]
    state = learned.model.state_dict()
    assert float(state["predict_threshold"]) == pytest.approx(chosen)
    loaded = _module()
    loaded.load_state_dict(state)
    found = make_trainer(tmp_path).predict(loaded, load_batches(_batch()))
    scores = torch.cat([image["scores"] for image in found[0]])
    assert chosen < scores.min()
    del state["predict_threshold"]  # as older checkpoints
    fresh = _module()
    fresh.load_state_dict(state)
    assert float(fresh.predict_threshold) == 0.25


def test_images_may_all_be_empty(tmp_path: Path) -> None:
    empty = {"image": torch.rand(2, 3, 40, 72), "boxes": torch.zeros(0, 6)}
    trainer = make_trainer(tmp_path)
    trainer.fit(_module(), load_batches(empty), load_batches(empty))
    assert trainer.callback_metrics["val/map50"].isnan()
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_objects_of_one_image_are_sorted_and_limited_in_number() -> None:
    boxes = torch.tensor([[0.0, 0.0, 8.0, 8.0], [0.0, 0.0, 8.0, 7.0], [20.0, 20.0, 28.0, 28.0]])
    logits = torch.tensor([[2.0, -1.5], [3.0, -9.0], [-9.0, 0.5]])
    found = find_objects(logits, boxes, score_threshold=0.1, iou_threshold=0.5)
    assert found["boxes"].tolist() == boxes[[1, 2, 0]].tolist()
    assert found["classes"].tolist() == [0, 1, 1]
    assert torch.equal(found["scores"], torch.tensor([3.0, 0.5, -1.5]).sigmoid())
    soft = find_objects(logits, boxes, score_threshold=0.1, iou_threshold=0.5, nms="soft")
    assert soft["boxes"].tolist() == boxes[[1, 2, 0, 0]].tolist()
    assert soft["classes"].tolist() == [0, 1, 1, 0]
    factors = torch.tensor([1, 1, 1, 1 / 8])  # of 56 and 64 px
    expected = torch.tensor([3.0, 0.5, -1.5, 2.0]).sigmoid() * factors
    assert soft["scores"].tolist() == pytest.approx(expected.tolist())
    with pytest.raises(ConfigError, match="nms='gaussian' is unknown: choose one of hard, soft"):
        _module(nms="gaussian")
    corners = torch.arange(300.0)[:, None] * 10 + torch.tensor([0, 0, 5, 5])
    many = torch.linspace(-1, 1, 300)[:, None]
    found = find_objects(many, corners, score_threshold=0.1, iou_threshold=0.5)
    assert torch.equal(found["boxes"], corners.flip(0)[:100])


def test_checkpoints_hold_plain_data(tmp_path: Path) -> None:
    plain = {"schedule": "cosine", "box_weight": 1.5, "score_threshold": 0.3, "iou_threshold": 0.5}
    plain |= {"nms": "soft", "size_limits_px": (16.0, 48.0)}
    model, trainer, path = _module(**plain), make_trainer(tmp_path), tmp_path / "a.ckpt"
    trainer.fit(model, load_batches(_batch(2)), load_batches(_batch(2)))
    net, weights = DetectorNet(2, width=8), count_weights(model.net)
    expected = plain | {"num_parameters": weights}
    assert_plain_checkpoint(model, DetectionModule(net), trainer, path, expected)
    loaded = DetectionModule.load_from_checkpoint(path, net=net, weights_only=True)
    assert (loaded.schedule, loaded.box_weight, loaded.score_threshold) == ("cosine", 1.5, 0.3)


@pytest.mark.parametrize("options", [{"score_threshold": 1.0}, {"iou_threshold": 0.0}])
def test_impossible_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="need 0 <= score_threshold < 1 and 0 < iou"):
        _module(**options)


class Named(LightningDataModule):
    """A set of some classes, of which nothing else is known."""

    def __init__(self, classes: Any) -> None:
        super().__init__()
        self.classes = classes

    def predict_dataloader(self) -> DataLoader[Any]:
        return load_batches(_batch(1))


def test_a_set_must_not_have_more_classes_than_the_net(tmp_path: Path) -> None:
    trainer, module = make_trainer(tmp_path), _module()
    for classes in (("a", "b"), ("a",), 3, None):
        assert trainer.predict(module, datamodule=Named(classes))
    with pytest.raises(
        ConfigError,
        match=r"the dataset has 3 classes, but the net has 2: set model\.net\.classes=3",
    ):
        trainer.predict(module, datamodule=Named(("a", "b", "c")))
    del module.net.classes  # a net of another make may not tell
    assert trainer.predict(module, datamodule=Named(("a", "b", "c")))


class _WholeSample(nn.Module):
    """Finds two objects of class 0 in each image: one beside it, and one as large as the sample."""

    def forward(self, images: Tensor) -> Predictions:
        count, _, height, width = images.shape
        boxes = torch.tensor([[[0.0, 0, width, 9], [0, 0, width, height]]]).repeat(count, 1, 1)
        logits = torch.tensor([[[9.0, -9], [5, -9]]]).repeat(count, 1, 1)
        return Predictions(logits, boxes, ())


def test_boxes_are_scored_as_far_as_their_image_reaches() -> None:
    """As `predict` writes them: what lies on the grey beside an image is cut off, but for a pixel."""
    model = DetectionModule(_WholeSample())
    batch = {
        "image": torch.zeros(1, 3, 64, 64),
        "shape": torch.tensor([[20, 40]]),  # in the middle of the sample, 32 px high
        "boxes": torch.tensor([[0, 0, 0.5, 0.5, 1, 0.5]]),
    }
    model.score(batch, "test")
    scores = model.scores["test"].compute()  # at an IoU of 32 / 34, 0.5 without the cut
    assert float(scores["map"]) == pytest.approx(0.9)
