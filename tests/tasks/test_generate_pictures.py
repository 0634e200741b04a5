from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.augment import Geometry
from lit_data.datamodules import GANDataModule
from lit_data.loading import LoaderOptions
from lit_data.tasks import find_task
from lit_data.tasks.generate import tile_views
from lit_data.types import Batch


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def _data(cache: str, **options: Any) -> GANDataModule:
    data = GANDataModule(
        cache_dir=cache,
        samples={"count": 3, "size_px": [16, 16], "tiles": 2},
        augment=Geometry(flip_left_right=True),
        loader=LoaderOptions(worker_kind="inline"),
        **({"image_px": 16, "labels": "folders"} | options),
    )
    data.prepare_data()
    data.setup("fit")
    return data


def _planned(data: GANDataModule, stage: Any = "train") -> Batch:
    loader = data.make_loader(stage)
    return data.plan_batch(loader.read(np.arange(min(10, loader.order.length)), 0), stage)


def _draw(data: GANDataModule, batch: Batch, path: Path, count: int) -> list[int]:
    return find_task(data).draw_samples(
        _planned(data), batch, path, "samples", stage="train", count=count
    )


def test_views_become_the_sheet_they_came_from(cache: str) -> None:
    data = _data(cache)
    sheet = tile_views(data.inspect("train").views_of(0))
    assert torch.equal(sheet, torch.from_numpy(data.bank[0] / np.float32(255)))


def test_samples_are_drawn_with_all_views_of_their_object(cache: str, tmp_path: Path) -> None:
    data = _data(cache)
    batch = data.finish_batch(_planned(data), "train")
    assert _draw(data, batch, tmp_path / "views.png", 3) == [0, 1, 3]
    assert _draw(data, batch, tmp_path / "all.png", 9) == [0, 1, 2, 3]
    three, four = (cv2.imread(str(tmp_path / name)) for name in ("views.png", "all.png"))
    assert four.shape[0] > three.shape[0] > 500
    assert four.shape[1] == three.shape[1]


def test_images_without_views_are_drawn_side_by_side(cache: str, tmp_path: Path) -> None:
    root = _data(cache).source.folder
    data = _data(
        cache, root=str(root), views="none", labels="none", splits={"train": 1.0}, image_px=32
    )
    batch = data.finish_batch(_planned(data), "train")
    assert _draw(data, batch, tmp_path / "grid.png", 6) == [0, 1, 2]
    many = {key: value.repeat(4, *[1] * (value.ndim - 1)) for key, value in batch.items()}
    assert len(_draw(data, many, tmp_path / "many.png", 12)) == 12
    few, lines = (cv2.imread(str(tmp_path / name)) for name in ("grid.png", "many.png"))
    assert lines.shape[0] > few.shape[0]
    assert lines.shape[1] > few.shape[1]


def test_augmentation_is_drawn_where_there_is_any(cache: str, tmp_path: Path) -> None:
    data = _data(cache)
    find_task(data).draw_augmented(_planned(data), [0, 3], tmp_path / "augment.png", stage="train")
    assert cv2.imread(str(tmp_path / "augment.png")).shape[0] > 400
    find_task(data).draw_augmented(_planned(data, "val"), [0], tmp_path / "none.png", stage="val")
    assert not (tmp_path / "none.png").exists()
