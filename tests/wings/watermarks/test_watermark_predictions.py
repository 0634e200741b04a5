"""Pictures of watermarks, and ``predict`` for them: what is written, what is left out, and how an interrupted run goes on."""

import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor

from lit_data.augment import segmentation_augment
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions
from lit_data.models import CompareNet, SegmentationModule
from lit_data.predict import Predicted, find_task
from lit_data.wings.watermarks import WatermarkDataModule, WatermarkSpec
from lit_data.wings.watermarks import predictions as watermark_predict
from tests.helpers.reading import opened, plan
from tests.predict.running import Marker, predict, read_rows

SIZES = {"a/page.png": (40, 50), "b/page.png": (64, 64), "b/scan.bmp": (40, 50)}
SIZES |= {"c.png": (1, 30), "d.png": (30, 1), "e.png": (130, 90), "f.png": (40, 50)}


pytestmark = pytest.mark.usefixtures("few_pictures")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("marks") / "set"
    for name, (height, width) in SIZES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return folder


@pytest.fixture(scope="module")
def data(root: Path) -> WatermarkDataModule:
    return _open(root)


@pytest.fixture(scope="module")
def whole(data: WatermarkDataModule) -> Path:
    """What a run writes that nothing interrupted."""
    folder = Path(data.source.folder).parent / "whole"
    metrics, bad = _predict(data, Marker(), folder)
    assert (metrics["predict/images"], metrics["predict/images_bad"], bad) == (len(SIZES), 0, [])
    return folder


def _open(root: Path, **options: Any) -> WatermarkDataModule:
    data = WatermarkDataModule(
        str(root),
        cache_dir=str(root.parent / "cache"),
        splits={"train": 1.0},
        loader=LoaderOptions(worker_kind="inline"),
        **options,
    )
    return opened(data, "predict")


def _predict(
    data: WatermarkDataModule, model: LightningModule, folder: Path, **options: Any
) -> Predicted:
    defaults = {"tile_px": 48, "multiple_px": 1, "batch_size": 2, "clean": True}
    return predict(data, model, folder, **(defaults | options))


def _read(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*.png"))}


def _read_table(folder: Path) -> list[dict[str, str]]:
    rows = read_rows(folder / "marks.csv")
    return [{key: text for key, text in row.items() if key != "seconds"} for row in rows]


def test_each_image_has_its_files_of_its_size(root: Path, whole: Path) -> None:
    rows = {row["image"]: row for row in _read_table(whole)}
    assert sorted(rows) == sorted(SIZES)
    for name, size in SIZES.items():
        mask = cv2.imread(str(whole / "masks" / f"{name}.png"), cv2.IMREAD_UNCHANGED)
        assert (mask.shape, mask.dtype) == (size, np.uint8)
        assert (int(rows[name]["height_px"]), int(rows[name]["width_px"])) == size
        share = float(rows[name]["marked_share"])
        assert share == pytest.approx((mask >= 128).mean(), abs=2 / mask.size)
        paths = (root / name, whole / "overlays" / f"{name}.png", whole / "cleaned" / f"{name}.png")
        image, overlay, cleaned = (cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in paths)
        assert overlay.shape == cleaned.shape == image.shape
        assert ((overlay != image).any(2) <= (mask >= 127)).all()
        touched = cv2.dilate((mask >= 127).astype(np.uint8), np.ones((5, 5)))
        assert ((cleaned != image).any(2) <= (touched > 0)).all()
    assert sum(float(row["marked_share"]) > 0 for row in rows.values()) > 3
    assert cv2.imread(str(whole / "predictions.png")).shape[1] > 500


@pytest.mark.parametrize("stop_at", [2, 5])
def test_an_interrupted_run_ends_like_one_that_was_not(
    data: WatermarkDataModule, whole: Path, tmp_path: Path, stop_at: int
) -> None:
    calls = []

    def interrupt(images: Tensor) -> None:
        calls.append(1)
        if len(calls) == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _predict(data, Marker(interrupt), tmp_path, batch_size=1)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    assert len(kept) < 3 * len(SIZES)
    metrics, _ = _predict(data, Marker(), tmp_path, resume=True)
    assert metrics["predict/images_kept"] == len(kept) // 3
    assert metrics["predict/images"] == len(SIZES)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert _read(tmp_path) == _read(whole)
    assert _read_table(tmp_path) == _read_table(whole)


def test_only_a_run_of_the_same_options_and_images_goes_on(root: Path, tmp_path: Path) -> None:
    copy, run = shutil.copytree(root, tmp_path / "set"), tmp_path / "run"
    data = _open(copy)
    _predict(data, Marker(), run, clean=False)
    assert {path.name for path in run.iterdir() if path.is_dir()} == {"masks", "overlays"}
    refused = r"holds predictions of another run.*\n  predict.threshold: 0.5, now 0.25"
    with pytest.raises(ConfigError, match=refused):
        _predict(data, Marker(), run, clean=False, resume=True, threshold=0.25)
    metrics, _ = _predict(data, Marker(), run, clean=False, resume=True, batch_size=5)
    assert metrics["predict/images_kept"] == len(SIZES)
    shutil.copy(copy / "e.png", copy / "f.png")
    metrics, _ = _predict(_open(copy), Marker(), run, clean=False, resume=True)
    assert metrics["predict/images_kept"] == len(SIZES) - 1
    done = _read(run)
    assert done["masks/f.png.png"] == done["masks/e.png.png"]
    assert _predict(_open(copy), Marker(), run).metrics["predict/images_kept"] == 0


@pytest.mark.parametrize("cache", ["store", "none"])
def test_bad_files_are_listed_and_stop_nothing(
    root: Path, whole: Path, tmp_path: Path, cache: str
) -> None:
    copy = shutil.copytree(root, tmp_path / "set")
    good = (copy / "e.png").read_bytes()
    for name in ("b/cut.png", "dd.png"):
        (copy / name).write_bytes(good[: len(good) // 2])
    metrics, bad = _predict(_open(copy, on_bad="skip", cache=cache), Marker(), tmp_path / "run")
    assert (metrics["predict/images"], metrics["predict/images_bad"]) == (len(SIZES), 2)
    assert [Path(path).name for path, _ in bad] == ["cut.png", "dd.png"]
    rows = read_rows(tmp_path / "run" / "bad.csv")
    assert [row["image"] for row in rows] == ["b/cut.png", "dd.png"]
    assert _read(tmp_path / "run") == _read(whole)


def test_what_does_not_fit_into_memory_is_split_and_changes_nothing(
    data: WatermarkDataModule, whole: Path, tmp_path: Path
) -> None:
    sizes = []

    def fill(images: Tensor) -> None:
        sizes.append(len(images))
        if len(images) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    _predict(data, Marker(fill), tmp_path, batch_size=7)
    assert max(sizes) > 2
    assert _read(tmp_path) == _read(whole)


def test_huge_images_go_through_a_file_and_come_out_the_same(
    data: WatermarkDataModule, whole: Path, tmp_path: Path
) -> None:
    _predict(data, Marker(), tmp_path, large_px=3000)  # b/page.png and e.png are huge now
    assert _read(whole).keys() == _read(tmp_path).keys()
    for name in SIZES:
        paths = (folder / "masks" / f"{name}.png" for folder in (whole, tmp_path))
        one, other = (cv2.imread(str(path), cv2.IMREAD_UNCHANGED).astype(int) for path in paths)
        assert abs(one - other).max() <= 1
    assert not (tmp_path / ".large.npy").exists()


def test_painting_over_takes_what_is_around() -> None:
    pixels = np.full((3, 40, 40), 200, np.uint8)
    pixels[:, 18:22, 10:30] = 20
    marked = np.zeros((40, 40), np.float32)
    marked[19:21, 11:29] = 1  # less than the whole of it: its soft edge is not found
    found = watermark_predict.ProbabilityMap(marked)
    assert np.concatenate(list(watermark_predict.paint_over(pixels, found, 0.5))).min() > 180


# pictures


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> WatermarkDataModule:
    drawn = WatermarkDataModule(
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        samples={"count": 3, "size_px": [96, 96]},
        patch_px=48,
        synthesis=WatermarkSpec(probability=0.7),
        augment=segmentation_augment(),
        clean=True,
        loader=LoaderOptions(worker_kind="inline"),
    )
    return opened(drawn)


def test_samples_with_large_and_small_marks_are_drawn_and_some_without(
    drawn: WatermarkDataModule, tmp_path: Path
) -> None:
    planned = plan(drawn, 10)
    batch = drawn.finish_batch(planned, "train")

    def draw(batch: Batch, name: str, count: int) -> list[int]:
        path = tmp_path / name
        task = find_task(drawn)
        return task.draw_samples(planned, batch, path, "samples", stage="train", count=count)

    rows = draw(batch, "samples.png", 4)
    sizes = batch["mask"].flatten(1).sum(1)
    chosen = sizes[rows].tolist()
    assert len(chosen) == 4
    assert chosen == sorted(chosen, reverse=True)
    assert 0 in chosen
    assert chosen[0] > chosen[1] > 0
    unmarked = {key: value for key, value in batch.items() if key not in ("mask", "clean")}
    assert draw(unmarked, "plain.png", 2) == [2, 7]  # spread over all
    with_clean, plain = (cv2.imread(str(tmp_path / name)) for name in ("samples.png", "plain.png"))
    assert with_clean.shape[1] > plain.shape[1]


def test_predictions_are_drawn_if_there_are_any(drawn: WatermarkDataModule, tmp_path: Path) -> None:
    batch = drawn.finish_batch(plan(drawn, 10), "train")
    path, task = tmp_path / "predictions.png", find_task(drawn)
    assert task.draw_predictions(
        SegmentationModule(CompareNet()), batch, path, "predictions", count=4
    )
    assert cv2.imread(str(path)).shape[1] > 500

    class Silent(LightningModule):
        def predict_step(self, batch: Batch, batch_idx: int) -> None:
            return None

    assert not task.draw_predictions(Silent(), batch, tmp_path / "none.png", "title", count=4)
    assert not (tmp_path / "none.png").exists()


def test_augmentation_is_drawn_where_there_is_any(
    drawn: WatermarkDataModule, tmp_path: Path
) -> None:
    path, task = tmp_path / "augment.png", find_task(drawn)
    task.draw_augmented(plan(drawn, 10), [0, 3], path, stage="train")
    assert cv2.imread(str(path)).shape[1] > 500
    task.draw_augmented(plan(drawn, 2, "val"), [0], tmp_path / "none.png", stage="val")
    assert not (tmp_path / "none.png").exists()
