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

from lit_data.commands.pictures import draw_predictions
from lit_data.datamodules import GANDataModule
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.modules import ConvGenerator, GANModule
from lit_data.tasks import Predicted, PredictOptions, find_task
from lit_data.tasks.generate import sweep_objects
from tests.tasks.running import make_run

SIDES = 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _open(cache: Path, **options: Any) -> GANDataModule:
    data = GANDataModule(
        cache_dir=str(cache),
        samples={"count": 6, "size_px": [16, 16], "tiles": 2},
        image_px=16,
        loader=LoaderOptions(worker_kind="inline"),
        **options,
    )
    data.prepare_data()
    data.setup("fit")
    return data


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
