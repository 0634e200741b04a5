"""What ``fit`` draws of a generative model, and what ``predict`` writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_data.app.show import draw_predictions
from lit_data.augment import Geometry
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions
from lit_data.predict import Predicted, PredictOptions, find_task
from lit_data.wings.gan import ConvGenerator, GANDataModule, GANModule
from lit_data.wings.gan.predictions import sweep_objects, tile_views
from tests.helpers.reading import opened
from tests.predict.running import make_run

SIDES = 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _open(cache: Path, **options: Any) -> GANDataModule:
    defaults = {"samples": {"count": 6, "size_px": [16, 16], "tiles": 2}}
    data = GANDataModule(
        cache_dir=str(cache),
        loader=LoaderOptions(worker_kind="inline"),
        **(defaults | {"image_px": 16} | options),
    )
    return opened(data)


@pytest.fixture(scope="module")
def data(cache: Path) -> GANDataModule:
    return _open(cache)


def _open_labelled(cache: Path, **options: Any) -> GANDataModule:
    few = {"count": 3, "size_px": [16, 16], "tiles": 2}
    defaults = {"samples": few, "labels": "folders", "augment": Geometry(flip_left_right=True)}
    return _open(cache, **(defaults | options))


def _build(*, posed: bool = True, channels: int = 3) -> GANModule:
    torch.manual_seed(0)
    sizes = {"image_px": 16, "channels": channels, "latent_size": 4}
    generator = ConvGenerator(**sizes, posed=posed, width=4, max_width=8, style_size=8)
    return GANModule(generator, **sizes)


def _generate(
    data: GANDataModule, model: LightningModule, folder: Path, seed: int = 0, **options: Any
) -> Predicted:
    run = replace(make_run(folder), identity={"seed": seed})
    return find_task(data).predict(model, run, PredictOptions(**options))


def _read(folder: Path) -> dict[str, np.ndarray]:
    paths = {path.relative_to(folder).as_posix(): str(path) for path in folder.rglob("*.png")}
    return {name: cv2.imread(path, cv2.IMREAD_UNCHANGED) for name, path in paths.items()}


def test_predict_writes_images_a_grid_and_objects_from_all_sides(
    data: GANDataModule, tmp_path: Path
) -> None:
    metrics, bad = _generate(data, _build(), tmp_path, count=5, batch_size=2)
    assert metrics == {"predict/images": 5, "predict/objects": 5}
    assert not bad
    files = _read(tmp_path)
    images = [f"images/{number:06d}.png" for number in range(5)]
    sheets = [f"views/{number:06d}.png" for number in range(5)]
    assert set(files) == {*images, "predictions.png", "views.png", *sheets}
    assert {files[name].shape for name in images} == {(16, 16, 3)}
    assert {files[name].shape for name in sheets} == {(32, 32, 3)}
    assert files["views.png"].shape == (5 * 66 + 2, SIDES * 66 + 2, 3)
    assert np.array_equal(files["predictions.png"][2:66:4, 2:66:4], files[images[0]])
    sheets_as_data = GANDataModule(
        tmp_path / "views", views="sheet", tiles=2, image_px=16, cache="none", splits={"train": 1.0}
    )
    assert opened(sheets_as_data).describe()["objects"] == 5
    assert sheets_as_data.poses is not None


def test_images_depend_on_the_seed_and_the_model_alone(data: GANDataModule, tmp_path: Path) -> None:
    grey, flat = _build(channels=1), _build(posed=False)
    for name, model, seed in (("once", grey, 3), ("again", grey, 3), ("other", grey, 4)):
        _generate(data, model, tmp_path / name, seed, count=1)
    once, again, other = (_read(tmp_path / name) for name in ("once", "again", "other"))
    images = [files["images/000000.png"] for files in (once, again, other)]
    assert np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])
    assert (images[0].shape, once["views/000000.png"].shape) == ((16, 16), (32, 32))
    metrics, _ = _generate(data, flat, tmp_path / "flat", count=3)
    assert metrics == {"predict/images": 3, "predict/objects": 0}
    assert not (tmp_path / "flat/views.png").exists()


@pytest.mark.parametrize("option", [{"clean": True}, {"resume": True}])
def test_what_means_nothing_is_refused(
    option: dict[str, Any], data: GANDataModule, tmp_path: Path
) -> None:
    name = next(iter(option))
    with pytest.raises(ConfigError, match=rf"predict.{name}=.* has no effect on generated images"):
        _generate(data, _build(), tmp_path, **option)


def test_a_model_that_generates_nothing_is_told_so(
    data: GANDataModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="predict: BoringModel has no method sample_images"):
        _generate(data, BoringModel(), tmp_path)
    with pytest.raises(ConfigError, match=r"predict.count=0 must be at least 1"):
        PredictOptions(count=0)
    caplog.set_level("INFO")
    draw_predictions(data, BoringModel(), tmp_path / "predictions.png")
    assert "no predictions.png: BoringModel has no sample_images" in caplog.text
    assert not (tmp_path / "predictions.png").exists()


def test_real_and_generated_images_stand_side_by_side(
    cache: Path, data: GANDataModule, tmp_path: Path
) -> None:
    model = _build()
    model.poses = data.poses
    draw_predictions(data, model, tmp_path / "predictions.png", count=3)
    with_sides = cv2.imread(str(tmp_path / "predictions.png"))
    draw_predictions(data, _build(posed=False), tmp_path / "flat.png", count=2)
    flat = cv2.imread(str(tmp_path / "flat.png"))
    assert with_sides.shape[0] > flat.shape[0] > 300
    assert with_sides.shape[1] == flat.shape[1]
    held_out_nothing = _open(cache, splits={"train": 1.0})
    draw_predictions(held_out_nothing, _build(posed=False), tmp_path / "train.png")
    assert (tmp_path / "train.png").is_file()


def test_objects_are_swept_where_data_and_model_know_sides() -> None:
    poses = torch.tensor([[0.0, 0.0], [1.5, 0.2]])
    views = sweep_objects(_build(), poses, 3, seed=1)
    assert views is not None
    assert views.shape == (3, 2, 3, 16, 16)
    assert sweep_objects(_build(posed=False), poses, 3, seed=1) is None
    assert sweep_objects(_build(), None, 3, seed=1) is None
    assert sweep_objects(BoringModel(), poses, 3, seed=1) is None


def _planned(data: GANDataModule, stage: Any = "train") -> Batch:
    loader = data.make_loader(stage)
    return data.plan_batch(loader.read(np.arange(min(10, loader.order.length)), 0), stage)


def _draw(data: GANDataModule, batch: Batch, path: Path, count: int) -> list[int]:
    return find_task(data).draw_samples(
        _planned(data), batch, path, "samples", stage="train", count=count
    )


def test_samples_are_drawn_with_all_views_of_their_object(cache: Path, tmp_path: Path) -> None:
    data = _open_labelled(cache)
    sheet = tile_views(data.inspect("train").views_of(0))
    assert torch.equal(sheet, torch.from_numpy(data.bank[0] / np.float32(255)))
    batch = data.finish_batch(_planned(data), "train")
    assert _draw(data, batch, tmp_path / "views.png", 3) == [0, 1, 3]
    assert _draw(data, batch, tmp_path / "all.png", 9) == [0, 1, 2, 3]
    three, four = (cv2.imread(str(tmp_path / name)) for name in ("views.png", "all.png"))
    assert four.shape[0] > three.shape[0] > 500
    assert four.shape[1] == three.shape[1]


def test_images_without_views_are_drawn_side_by_side(cache: Path, tmp_path: Path) -> None:
    root = _open_labelled(cache).source.folder
    data = _open_labelled(
        cache, root=str(root), views="none", labels="none", splits={"train": 1.0}, image_px=32
    )
    batch = data.finish_batch(_planned(data), "train")
    assert _draw(data, batch, tmp_path / "grid.png", 6) == [0, 1, 2]
    many = {key: value.repeat(4, *[1] * (value.ndim - 1)) for key, value in batch.items()}
    assert len(_draw(data, many, tmp_path / "many.png", 12)) == 12
    few, lines = (cv2.imread(str(tmp_path / name)) for name in ("grid.png", "many.png"))
    assert lines.shape[0] > few.shape[0]
    assert lines.shape[1] > few.shape[1]


def test_augmentation_is_drawn_where_there_is_any(cache: Path, tmp_path: Path) -> None:
    data = _open_labelled(cache)
    find_task(data).draw_augmented(_planned(data), [0, 3], tmp_path / "augment.png", stage="train")
    assert cv2.imread(str(tmp_path / "augment.png")).shape[0] > 400
    find_task(data).draw_augmented(_planned(data, "val"), [0], tmp_path / "none.png", stage="val")
    assert not (tmp_path / "none.png").exists()
