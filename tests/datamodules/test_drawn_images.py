"""Whole images whose truth is synthetic, and a module that is scored on them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.augment import StripeAugment
from lit_data.datamodules import StripeDataModule
from lit_data.datamodules.drawn_images import DrawnImages
from lit_data.images.writing import write_png
from lit_data.loading import LoaderOptions
from lit_data.models import SegmentationModule
from lit_data.models.segmentation.anomaly_metrics import AnomalyMetrics
from lit_data.synthesis import DefectSpec
from tests.helpers.reading import opened
from tests.models.runs import make_trainer

SIZE = (72, 80)
SPLITS = {"train": 0.4, "val": 0.4, "test": 0.2}


def _open(folder: Path, *, layout: str = "channels", count: int = 5, **options: Any) -> Any:
    random = np.random.default_rng(0)
    files = {"pairs": {"target": "*_a.png", "ref1": "*_b.png"}}.get(layout)
    for number in range(count):
        pixels = np.repeat(random.integers(90, 160, (*SIZE, 1), dtype=np.uint8), 3, 2)
        if files:
            for letter in "ab":
                write_png(folder / "set" / f"{number}_{letter}.png", pixels[..., :1])
        else:
            write_png(folder / "set" / f"{number}.png", pixels)
    defaults: dict[str, Any] = {
        "synthesis": DefectSpec(probability=0.5, true_count=(0, 2), amplitude=(0.3, 0.4)),
        "loader": LoaderOptions(batch_size=4, num_workers=0),
        "splits": SPLITS,
    }
    data = StripeDataModule(
        str(folder / "set"),
        layout=layout,
        files=files,
        patch_px=32,
        stride_px=24,
        cache_dir=folder / "cache",
        **defaults | options,
    )
    return opened(data)


def _take(data: StripeDataModule, split: Any = "val") -> DrawnImages:
    drawn = data.draw_images(split)
    assert drawn is not None
    return drawn


@pytest.mark.parametrize("layout", ["channels", "pairs", "single"])
def test_each_image_is_there_as_it_is_and_with_true_defects(layout: str, tmp_path: Path) -> None:
    data = _open(tmp_path, layout=layout, augment={"val": StripeAugment()})
    drawn = _take(data)
    assert len(drawn) == 4
    assert drawn.image_kinds == ["good", "good", "synthetic", "synthetic"]
    assert drawn.names[2:] == [f"synthetic/{name}" for name in drawn.names[:2]]
    for number, stored in enumerate(data.split_images["val"].tolist()):
        good, defective = drawn[number], drawn[2 + number]
        assert good.shape == (3, *SIZE)
        if layout != "single":  # whose nuisance makes it another
            np.testing.assert_array_equal(good[0], data.bank[stored][0] / np.float32(255))
        assert not drawn.has_defect(number)
        assert drawn.has_defect(2 + number)
        mask = drawn.read_mask(2 + number) > 0
        assert (good[0] != defective[0])[mask].mean() > 0.5


def test_patches_put_together_are_the_image(tmp_path: Path) -> None:
    drawn = _take(_open(tmp_path))
    joined = np.zeros_like(drawn[3])
    marks = np.zeros(SIZE)
    for batch in drawn.batches([[3]], 0, 4):
        assert len(batch["image"]) <= 4
        assert set(batch["image_index"].tolist()) == {3}
        for row, (top, left) in enumerate(batch["position"].tolist()):
            part = slice(top, top + 32), slice(left, left + 32)
            joined[:, *part] = batch["image"][row]
            marks[part] = batch["mask"][row, 0]
    np.testing.assert_array_equal(joined, drawn[3])
    np.testing.assert_array_equal(marks, drawn.read_mask(3))


def test_all_ranks_take_as_many_steps(tmp_path: Path) -> None:
    drawn = _take(_open(tmp_path))
    shares = [[0], [3], []]
    batches = [list(drawn.batches(shares, rank, 2)) for rank in range(3)]
    assert len(batches[0]) == len(batches[1]) == len(batches[2]) > 0
    assert all(batch["drawn"].all() for batch in batches[0] + batches[1])
    metric = AnomalyMetrics(score_fraction=0.0)
    for batch in batches[2]:
        is_drawn = batch["drawn"]
        assert not is_drawn.any()
        scores = torch.rand(1, 1, 32, 32)[is_drawn]
        places = (batch["image_index"][is_drawn], batch["position"][is_drawn])
        metric.update(scores, batch["mask"][is_drawn], *places)
    assert [len(part) for part in metric.images] == [0]  # which is gathered, as nothing is not


@pytest.mark.parametrize(("limit", "numbers"), [(1.0, [0, 1, 2, 3]), (0.5, [0, 2]), (1, [0, 2])])
def test_a_limit_keeps_both_of_an_image(limit: float, numbers: list[int], tmp_path: Path) -> None:
    assert _take(_open(tmp_path)).choose(limit) == numbers


def test_nothing_is_drawn_beside_masks_or_without_synthesis(tmp_path: Path) -> None:
    for number in range(5):
        mask = np.zeros((*SIZE, 1), np.uint8)
        mask[8:12, 8:12] = 255 * (number % 2)
        write_png(tmp_path / "set" / "masks" / f"{number}.png", mask)
    data = _open(tmp_path, masks="masks")
    assert data.draw_images("test") is None
    assert data.draw_images("val") is not None
    for number in range(5):
        is_test = number in data.split_images["test"]
        assert data.has_defect(number) is (bool(number % 2) if is_test else None)
    unsplit = _open(tmp_path, masks="masks", mask_splits=[], splits={"train": 1.0})
    assert [unsplit.has_defect(number) for number in range(5)] == [False, True] * 2 + [False]
    masked = _open(tmp_path, masks="masks", synthesis=None, mask_splits=("train", "val", "test"))
    assert masked.draw_images("val") is None


class _Difference(nn.Module):
    """Logits that are high where the target differs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(40.0))

    def forward(self, images: Tensor) -> Tensor:
        difference: Tensor = (images[:, :1] - images[:, 1:].mean(1, keepdim=True)).abs()
        return self.scale * (difference - 0.2)


def _validate(data: StripeDataModule, folder: Path, **options: Any) -> SegmentationModule:
    model = SegmentationModule(_Difference(), **options)
    trainer = make_trainer(folder)
    trainer.validate(model, data, verbose=False)
    return model


def test_whole_images_are_scored_beside_patches(tmp_path: Path) -> None:
    data = _open(tmp_path)
    before = _validate(data, tmp_path)
    model = _validate(data, tmp_path, anomaly_metrics=True)
    patches, both = before.trainer.callback_metrics, model.trainer.callback_metrics
    # The scores of patches are what they are without whole images.
    assert {name: float(both[name]) for name in patches} == {
        name: float(value) for name, value in patches.items()
    }
    assert float(both["val/image_auroc"]) == 1
    assert model.confusion["val"].counts == [[2, 0], [0, 2]]
    assert model.confusion["val"].is_drawn
    assert 0 < float(model.image_threshold) < 1
    assert float(both["val/aupro_30"]) > 0.5
    assert model.reference_limits.tolist() == pytest.approx(data.find_reference_limits())
    assert data.describe_misfits(0, model.reference_limits.tolist()) == ""
