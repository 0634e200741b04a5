from pathlib import Path

import cv2
import lightning as L
import pytest

from lit_data.augment import segmentation_augment
from lit_data.datamodules import WatermarkDataModule
from lit_data.loading import LoaderOptions
from lit_data.modules import SegmentationModule
from lit_data.synthesis.watermarks import WatermarkSpec
from lit_data.tasks import find_task
from lit_data.types import Batch
from tests.reading import opened, plan


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> WatermarkDataModule:
    data = WatermarkDataModule(
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        samples={"count": 3, "size_px": [96, 96]},
        patch_px=48,
        synthesis=WatermarkSpec(probability=0.7),
        augment=segmentation_augment(),
        clean=True,
        loader=LoaderOptions(worker_kind="inline"),
    )
    return opened(data)


def test_samples_are_drawn_those_with_the_largest_mark_first(
    data: WatermarkDataModule, tmp_path: Path
) -> None:
    planned = plan(data, 10)
    batch = data.finish_batch(planned, "train")

    def draw(batch: Batch, name: str, count: int) -> list[int]:
        path = tmp_path / name
        task = find_task(data)
        return task.draw_samples(planned, batch, path, "samples", stage="train", count=count)

    rows = draw(batch, "samples.png", 3)
    sizes = batch["mask"].flatten(1).sum(1)
    assert sizes[rows].tolist() == sorted(sizes.tolist(), reverse=True)[:3]
    unmarked = {key: value for key, value in batch.items() if key not in ("mask", "clean")}
    assert draw(unmarked, "plain.png", 2) == [0, 1]
    with_clean, plain = (cv2.imread(str(tmp_path / name)) for name in ("samples.png", "plain.png"))
    assert with_clean.shape[1] > plain.shape[1]


def test_predictions_are_drawn_if_there_are_any(data: WatermarkDataModule, tmp_path: Path) -> None:
    batch = data.finish_batch(plan(data, 10), "train")
    path, task = tmp_path / "predictions.png", find_task(data)
    assert task.draw_predictions(SegmentationModule(), batch, path, "predictions", count=4)
    assert cv2.imread(str(path)).shape[1] > 500

    class Silent(L.LightningModule):
        def predict_step(self, batch: Batch, batch_idx: int) -> None:
            return None

    assert not task.draw_predictions(Silent(), batch, tmp_path / "none.png", "title", count=4)
    assert not (tmp_path / "none.png").exists()


def test_augmentation_is_drawn_where_there_is_any(
    data: WatermarkDataModule, tmp_path: Path
) -> None:
    path, task = tmp_path / "augment.png", find_task(data)
    task.draw_augmented(plan(data, 10), [0, 3], path, stage="train")
    assert cv2.imread(str(path)).shape[1] > 500
    task.draw_augmented(plan(data, 2, "val"), [0], tmp_path / "none.png", stage="val")
    assert not (tmp_path / "none.png").exists()
