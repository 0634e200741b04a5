"""What ``fit`` draws of a generative model, and what ``predict`` writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_data.augment import Geometry
from lit_data.commands.show import draw_predictions
from lit_data.datamodules import GANDataModule
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.modules import ConvGenerator, GANModule
from lit_data.tasks import Predicted, PredictOptions, find_task
from lit_data.tasks.generate import sweep_objects, tile_views
from lit_data.types import Batch
from tests.tasks.running import make_run

SIDES = 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _open(cache: Path, **options: Any) -> GANDataModule:
    defaults: dict[str, Any] = {"samples": {"count": 6, "size_px": [16, 16], "tiles": 2}}
    data = GANDataModule(
        cache_dir=str(cache),
        loader=LoaderOptions(worker_kind="inline"),
        **(defaults | {"image_px": 16} | options),
    )
    data.prepare_data()
    data.setup("fit")
    return data


def _open_labelled(cache: Path, **options: Any) -> GANDataModule:
    few = {"count": 3, "size_px": [16, 16], "tiles": 2}
    defaults = {"samples": few, "labels": "folders", "augment": Geometry(flip_left_right=True)}
    return _open(cache, **(defaults | options))


def _build(*, posed: bool = True, channels: int = 3) -> GANModule:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_px": 16, "channels": channels, "latent_size": 4}
    return GANModule(
        ConvGenerator(**sizes, posed=posed, width=4, max_width=8, style_size=8), **sizes
    )


def _generate(
    data: GANDataModule, model: L.LightningModule, folder: Path, seed: int = 0, **options: Any
) -> Predicted:
    run = replace(make_run(folder), identity={"seed": seed})
    return find_task(data).predict(model, run, PredictOptions(**options))


def _read(folder: Path) -> dict[str, np.ndarray]:
    found = sorted(folder.rglob("*.png"))
    return {
        path.relative_to(folder).as_posix(): cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        for path in found
    }


def test_predict_writes_images_a_grid_and_objects_from_all_sides(
    cache: Path, tmp_path: Path
) -> None:
    metrics, bad = _generate(_open(cache), _build(), tmp_path, count=5, batch_size=2)
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


def test_the_same_seed_gives_the_same_images(cache: Path, tmp_path: Path) -> None:
    data, model = _open(cache), _build()
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        _generate(data, model, tmp_path / name, seed, count=2)
    first, again, other = (
        _read(tmp_path / name)["images/000000.png"] for name in ("first", "again", "other")
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_sheets_can_be_learned_from(cache: Path, tmp_path: Path) -> None:
    _generate(_open(cache), _build(), tmp_path, count=4)
    data = GANDataModule(
        str(tmp_path / "views"),
        views="sheet",
        tiles=2,
        image_px=16,
        cache="none",
        splits={"train": 0.5, "val": 0.5},
    )
    data.prepare_data()
    assert data.describe()["objects"] == 4
    assert data.poses is not None


def test_a_model_without_sides_writes_images_alone(cache: Path, tmp_path: Path) -> None:
    metrics, _ = _generate(_open(cache), _build(posed=False), tmp_path, count=3)
    assert metrics == {"predict/images": 3, "predict/objects": 0}
    assert not (tmp_path / "views.png").exists()


def test_grey_images_stay_grey(cache: Path, tmp_path: Path) -> None:
    _generate(_open(cache), _build(channels=1), tmp_path, count=1)
    files = _read(tmp_path)
    assert files["images/000000.png"].shape == (16, 16)
    assert files["views/000000.png"].shape == (32, 32)


def test_a_model_that_generates_nothing_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="predict: BoringModel has no method sample_images"):
        _generate(_open(cache), BoringModel(), tmp_path)


@pytest.mark.parametrize(
    "option", [{"clean": True}, {"resume": True}, {"quantise": "bf16"}, {"onnx": "a.onnx"}]
)
def test_what_means_nothing_is_refused(option: dict[str, Any], cache: Path, tmp_path: Path) -> None:
    name = next(iter(option))
    with pytest.raises(ConfigError, match=rf"predict.{name}=.* means nothing for generated images"):
        _generate(_open(cache), _build(), tmp_path, **option)


def test_real_and_generated_images_stand_side_by_side(cache: Path, tmp_path: Path) -> None:
    data, model = _open(cache), _build()
    model.poses = data.poses
    draw_predictions(data, model, tmp_path / "predictions.png", count=3)
    with_sides = cv2.imread(str(tmp_path / "predictions.png"))
    draw_predictions(data, _build(posed=False), tmp_path / "flat.png", count=2)
    flat = cv2.imread(str(tmp_path / "flat.png"))
    assert with_sides.shape[0] > flat.shape[0] > 300
    assert with_sides.shape[1] == flat.shape[1]


def test_sets_without_held_out_images_are_drawn_too(cache: Path, tmp_path: Path) -> None:
    draw_predictions(
        _open(cache, splits={"train": 1.0}), _build(posed=False), tmp_path / "predictions.png"
    )
    assert (tmp_path / "predictions.png").is_file()


def test_nothing_is_drawn_of_a_model_that_generates_nothing(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        draw_predictions(_open(cache), BoringModel(), tmp_path / "predictions.png")
    assert "no predictions.png: BoringModel has no sample_images" in caplog.text
    assert not (tmp_path / "predictions.png").exists()


def test_objects_are_swept_where_data_and_model_know_sides() -> None:
    poses = torch.tensor([[0.0, 0.0], [1.5, 0.2]])
    views = sweep_objects(_build(), poses, 3, seed=1)
    assert views is not None
    assert views.shape == (3, 2, 3, 16, 16)
    assert sweep_objects(_build(posed=False), poses, 3, seed=1) is None
    assert sweep_objects(_build(), None, 3, seed=1) is None
    assert sweep_objects(BoringModel(), poses, 3, seed=1) is None


def test_a_count_must_be_a_number_of_images() -> None:
    with pytest.raises(ConfigError, match=r"predict.count=0 must be at least 1"):
        PredictOptions(count=0)


def _planned(data: GANDataModule, stage: Any = "train") -> Batch:
    loader = data.make_loader(stage)
    return data.plan_batch(loader.read(np.arange(min(10, loader.order.length)), 0), stage)


def _draw(data: GANDataModule, batch: Batch, path: Path, count: int) -> list[int]:
    return find_task(data).draw_samples(
        _planned(data), batch, path, "samples", stage="train", count=count
    )


def test_views_become_the_sheet_they_came_from(cache: Path) -> None:
    data = _open_labelled(cache)
    sheet = tile_views(data.inspect("train").views_of(0))
    assert torch.equal(sheet, torch.from_numpy(data.bank[0] / np.float32(255)))


def test_samples_are_drawn_with_all_views_of_their_object(cache: Path, tmp_path: Path) -> None:
    data = _open_labelled(cache)
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
