"""The forms in which other people's modules take batches."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.datamodules.batch_format import check_format, format_batch

MASKED = {
    "image": torch.rand(3, 3, 4, 6),
    "mask": torch.tensor([0.0, 1.0, 0.0]).reshape(3, 1, 1, 1).expand(3, 1, 4, 6),
    "index": torch.arange(3),
}
BOXED = {
    "image": torch.rand(3, 3, 40, 60),
    "boxes": torch.tensor(
        [[0, 2, 0.5, 0.5, 0.2, 0.1], [0, 0, 0.1, 0.2, 0.2, 0.4], [2, 1, 0.75, 0.5, 0.5, 1.0]]
    ),
    "boxes_count": torch.tensor([2, 0, 1]),
    "image_index": torch.tensor([7, 8, 9]),
    "shape": torch.tensor([[400, 600]] * 3),
    "path": ["a.png", "b.png", "c.png"],
}


def test_classes_are_whole_numbers_without_a_channel() -> None:
    found = format_batch(MASKED, "classes", {})
    assert found["mask"].dtype == torch.int64
    assert found["mask"].shape == (3, 4, 6)
    assert found["mask"][:, 0, 0].tolist() == [0, 1, 0]
    assert found["image"] is MASKED["image"]
    assert format_batch({"image": MASKED["image"]}, "classes", {}).keys() == {"image"}


def test_torchvision_takes_lists_with_corners_in_pixels_and_a_background() -> None:
    images, targets = format_batch(BOXED, "torchvision", {})
    assert [image.shape for image in images] == [(3, 40, 60)] * 3
    assert [target["labels"].tolist() for target in targets] == [[3, 1], [], [2]]
    corners = [[24.0, 18, 36, 22], [0, 0, 12, 16]]
    assert_close(targets[0]["boxes"], torch.tensor(corners))
    assert_close(targets[2]["boxes"], torch.tensor([[30.0, 0, 60, 40]]))
    assert targets[1]["boxes"].shape == (0, 4)
    assert [target["image_id"].item() for target in targets] == [7, 8, 9]


def test_ultralytics_takes_a_dict_whose_objects_name_their_image() -> None:
    found = format_batch(BOXED, "ultralytics", {})
    assert found["cls"].tolist() == [[2], [0], [1]]
    assert found["batch_idx"].tolist() == [0, 0, 2]
    assert_close(found["bboxes"], BOXED["boxes"][:, 2:])
    assert found["im_file"] == ["a.png", "b.png", "c.png"]
    assert found["ori_shape"] == ((400, 600),) * 3


@dataclass
class ImageBatch:
    image: Tensor
    gt_mask: Tensor | None = None
    gt_label: Tensor | None = None


def test_anomalib_gets_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anomalib", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "anomalib.data", SimpleNamespace(ImageBatch=ImageBatch))
    found = format_batch(MASKED, "anomalib", {})
    assert found.gt_label.tolist() == [False, True, False]
    assert (found.gt_mask.shape, found.gt_mask.dtype) == ((3, 4, 6), torch.bool)
    assert format_batch({"image": MASKED["image"]}, "anomalib", {}).gt_mask is None
    monkeypatch.setitem(sys.modules, "anomalib", None)
    monkeypatch.setitem(sys.modules, "anomalib.data", None)
    with pytest.raises(ConfigError, match=r"anomalib needs its package: pip install anomalib"):
        format_batch(MASKED, "anomalib", {})


@pytest.mark.parametrize(
    ("batch_format", "keys", "known"),
    [
        ("torchvision", ("image", "mask"), "dict, classes, anomalib"),
        ("classes", ("image", "boxes"), "dict, torchvision, ultralytics, yolo"),
        ("anomalib", ("coords", "feats"), "dict"),
    ],
)
def test_a_preset_that_the_batch_cannot_fill_is_refused(
    batch_format: str, keys: tuple[str, ...], known: str
) -> None:
    refused = f"batch_format='{batch_format}' is unknown here: choose {known}, a mapping"
    with pytest.raises(ConfigError, match=refused):
        check_format(batch_format, keys, {})
    check_format(lambda batch: batch["image"].sum(), (), {})  # makes what it likes
    assert format_batch(MASKED, lambda batch: (batch["image"], 1), {})[1] == 1
