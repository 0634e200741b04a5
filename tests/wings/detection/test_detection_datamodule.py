import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lit_data.augment import detection_augment
from lit_data.core.batch_form import batch_tensors
from lit_data.core.errors import ConfigError, DataError, StoreCorruptError
from lit_data.core.mosaic import MosaicSpec
from lit_data.core.types import Batch
from lit_data.datamodules.batch_format import format_batch
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.synthesis import DefectSpec
from lit_data.wings.detection import DetectionDataModule, DetectionDataset
from lit_inspect.scaling import scale_size
from tests.helpers.reading import Watcher, assert_equal, assert_resumes, first, fit, opened, plan

SAMPLES = {"count": 20, "size_px": [64, 80]}


def _data(cache: str, *, setup: bool = True, **options: Any) -> DetectionDataModule:
    loader = LoaderOptions(batch_size=4, seed=3, **options.pop("loader", {"worker_kind": "inline"}))
    given = {
        "samples": SAMPLES,
        "size_px": (64, 64),
        "mosaic": MosaicSpec(close_epochs=1),
    } | options
    data = DetectionDataModule(given.pop("root", None), cache_dir=cache, loader=loader, **given)
    return opened(data) if setup else data


def test_a_batch_is_what_the_table_says(cache: str) -> None:
    data = _data(cache)
    batch = first(data)
    assert batch.keys() == set(data.batch_keys)
    assert batch["image"].shape == (4, 3, 64, 64)
    assert batch["image"].dtype == torch.float32
    assert batch["image"].min() >= 0
    assert batch["image"].max() <= 1
    boxes = batch["boxes"]
    assert boxes.shape == (int(batch["boxes_count"].sum()), 6)
    assert boxes[:, 0].tolist() == torch.arange(4).repeat_interleave(batch["boxes_count"]).tolist()
    assert boxes[:, 2:].min() >= 0
    assert boxes[:, 2:].max() <= 1
    paths = list(map(str, batch["path"]))
    assert paths == [data.files.images[number] for number in batch["image_index"].tolist()]
    assert batch["shape"].tolist() == [list(cv2.imread(path).shape[:2]) for path in paths]
    for key in ("index", "image_index", "epoch"):
        assert batch[key].shape == (4,)
        assert batch[key].dtype == torch.int64


def _crowds(folder: Path) -> Path:
    """Eight images with an object of each class and a crowd of the second one, as COCO."""
    names = [f"{number}.png" for number in range(8)]
    annotations = []
    (folder / "annotations").mkdir()
    for number, name in enumerate(names):
        cv2.imwrite(str(folder / name), np.full((64, 64, 3), 10 * number, np.uint8))
        for kind, box in ((1, [4, 4, 8, 8]), (2, [40, 8, 10, 8]), (2, [8, 32, 48, 24])):
            annotations.append({"image_id": number, "category_id": kind, "bbox": box})
            annotations[-1]["iscrowd"] = int(box[2] == 48)
    content = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "dot"}, {"id": 2, "name": "cross"}],
    }
    (folder / "annotations" / "instances_all.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("mosaic_on", ["worker", "device"])
def test_crowds_are_no_boxes_but_ignored_regions(
    cache: str, tmp_path: Path, mosaic_on: str
) -> None:
    root = _crowds(tmp_path)
    data = _data(cache, root=root, mosaic_on=mosaic_on)
    assert data.describe()["boxes"] == 16
    assert data.describe()["ignored_regions"] == 8
    batch = first(data)
    assert set(batch) == set(data.batch_keys)
    assert 0 < len(batch["ignored"]) == int(batch["ignored_count"].sum())
    assert set(batch["ignored"][:, 1].tolist()) == {1.0}
    assert set(batch["boxes"][:, 1].tolist()) <= {0.0, 1.0}
    piece = data.slice_batch(batch, 2, 4)
    assert len(piece["ignored"]) == int(batch["ignored_count"][2:].sum())
    whole = first(data, "val", 1)
    assert whole["boxes_count"].tolist() == [2]
    assert whole["ignored"].tolist() == [[0, 1, 0.5, 0.6875, 0.75, 0.375]]


def test_near_duplicates_and_groups_stay_in_one_split(cache: str, tmp_path: Path) -> None:
    root = _write_set(tmp_path / "set", 12)
    rng = np.random.default_rng(1)
    for number in range(12):
        path = root / "images" / f"{number}.png"
        if number % 2:  # the same, a little brighter
            pixels = cv2.imread(str(root / "images" / f"{number - 1}.png"))
            cv2.imwrite(str(path), cv2.add(pixels, 2))
        else:
            height, width = cv2.imread(str(path)).shape[:2]
            cells = rng.integers(0, 250, (8, 8, 3), np.uint8)
            cv2.imwrite(str(path), cv2.resize(cells, (width, height)))
    for options in ({}, {"near_duplicates": "apart", "groups": r"([0-4])\.png"}):
        files = _data(cache, root=str(root), **options).files
        split_of = {}
        for split, numbers in files.splits.items():
            assert numbers
            split_of |= {int(Path(files.images[number]).stem): split for number in numbers}
        assert len(split_of) == 12
        if options:
            pairs = [(0, 10), (1, 11)]
        else:
            pairs = [(number, number + 1) for number in range(0, 12, 2)]
        for one, other in pairs:
            assert split_of[one] == split_of[other]


def test_windows_show_every_part_of_an_ignored_region(cache: str, tmp_path: Path) -> None:
    data = _data(cache, root=_crowds(tmp_path), size_px=None, patch_px=32, stride_px=32)
    assert data.windows is not None
    whole = data.find_whole(0)
    assert whole is not None
    assert whole.ignored.corners.tolist() == [[8, 32, 56, 56]]
    assert whole.objects.classes.tolist() == [0, 1]
    numbers = data.windows.labels.boxes[:, 0]
    assert int((numbers == -2).sum()) == 8 * 2
    assert set(data.dataset("train").images_of(np.arange(40), 0).tolist())


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_any_channels_and_depth_give_what_bytes_of_their_grey_give(
    cache: str, tmp_path: Path, channels: int
) -> None:
    root = _crowds(tmp_path)
    labels = root / "annotations" / "instances_all.json"
    labels.write_text(labels.read_text().replace(".png", ".npy"))
    for path in root.glob("*.png"):
        path.unlink()
    options = {"root": root, "mosaic": MosaicSpec(probability=0.5)}
    of_bytes = {}
    for dtype, scale in (("uint8", 1), ("uint16", 257), ("float32", 1 / 255)):
        rng = np.random.default_rng(0)
        for number in range(8):
            pixels = rng.integers(0, 256, (channels, 64, 64), np.uint8)
            np.save(root / f"{number}.npy", (pixels * np.float64(scale)).astype(dtype))
        for samples in ({}, {"size_px": None, "patch_px": 48}, {"mosaic_on": "device"}):
            images = first(_data(cache, **(options | samples)))["image"]
            assert images.shape[:2] == (4, channels)
            assert images.dtype == torch.float32
            assert torch.isclose(images, torch.tensor(114 / 255), atol=1e-4).any()
            reference = of_bytes.setdefault(len(samples), images)
            assert (images - reference).abs().max() < 0.005


def test_evaluation_and_prediction_show_each_image_alone(cache: str) -> None:
    data = _data(cache)
    assert len(data.dataset("predict")) == 20
    assert len(data.dataset("train")) == 14
    batch = first(data, "predict", 20)
    assert batch["image_index"].tolist() == list(range(20))
    labels = data.files.labels
    assert batch["boxes_count"].tolist() == np.diff(labels.ends, prepend=0).tolist()
    assert batch["boxes"][:, 1].tolist() == labels.boxes[:, 0].tolist()
    assert_equal(first(data, "val", 3, epoch=0), first(data, "val", 3, epoch=0))
    assert data.describe() == {
        "images": 20,
        "skipped": 0,
        "pixel_bytes": 3 * int((data.bank.heights_px * data.bank.widths_px).sum()),
        "train_images": 14,
        "val_images": 3,
        "test_images": 3,
        "boxes": len(labels.boxes),
        "classes": "scratch, stain, pit",
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "micro"), [("thread", 3), ("process", 1)])
def test_workers_give_the_same_batches(cache: str, kind: str, micro: int) -> None:
    workers = {"worker_kind": kind, "num_workers": 2, "micro_batch_size": micro}
    expected = list(_data(cache).make_loader("train"))
    found = list(_data(cache, loader=workers).make_loader("train"))
    assert len(found) == len(expected) == 4
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)


def test_yolo_trainers_get_their_tuple(cache: str, tmp_path: Path) -> None:
    seen = []
    data = _data(cache, batch_format="yolo")
    fit(Watcher(seen.append), data, tmp_path, max_epochs=2)
    (images, targets, paths, shapes), *_, last = seen
    assert isinstance(seen[0], tuple)
    assert (images.shape, targets.shape[1]) == ((4, 3, 64, 64), 6)
    assert set(paths) <= set(data.files.images)
    assert shapes == [None] * 4, "mosaics have no shape of their own"
    for path, shape in zip(last[2], last[3], strict=True):
        height, width = cv2.imread(path).shape[:2]
        high, wide = scale_size((height, width), (64, 64), "contain")
        padding = (64 - wide) // 2, round((64 - high) / 2)
        assert shape == ((height, width), ((high / height, wide / width), padding))
    piece = data.slice_batch(last, 1, 2)
    assert torch.equal(piece[0], last[0][1:2])
    assert torch.equal(piece[1][:, 1:], last[1][last[1][:, 0] == 1, 1:])
    assert (piece[2], piece[3]) == (last[2][1:2], last[3][1:2])


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (3, 9)])
def test_a_piece_of_a_batch_has_the_boxes_of_its_images(cache: str, start: int, stop: int) -> None:
    data = _data(cache, mosaic=None)
    whole = first(data, "predict")
    stored = data.make_loader("predict").read(np.arange(start, min(stop, 4)), 0)
    alone = data.transform(stored, "predict")
    assert_equal(data.slice_batch(whole, start, stop), alone)
    keys = ["boxes", "image", "boxes_count"]
    data.batch_format = keys
    part = data.slice_batch(tuple(whole[key] for key in keys), start, stop)
    assert all(torch.equal(found, alone[key]) for found, key in zip(part, keys, strict=True))
    data.batch_format = cast(Any, {f"my_{key}": key for key in keys})
    part = data.slice_batch({f"my_{key}": whole[key] for key in keys}, start, stop)
    assert all(torch.equal(part[f"my_{key}"], alone[key]) for key in keys)


def test_augmentation_moves_boxes_and_depends_on_the_sample_alone(cache: str) -> None:
    plain = _data(cache)
    data = _data(cache, augment=detection_augment(shift_px=4, scale=(0.8, 1.2)))
    loader = data.make_loader("train")
    batch = data.transform(loader.read(np.arange(8), 1), "train")
    assert not torch.equal(batch["image"], first(plain, count=8, epoch=1)["image"])
    assert int(batch["boxes_count"].sum()) == len(batch["boxes"])
    for row in (0, 5):
        alone = data.transform(loader.read(np.array([row]), 1), "train")
        piece = data.slice_batch(batch, row, row + 1)
        assert_close(alone["image"], piece["image"], atol=1e-5, rtol=0)
        assert_close(alone["boxes"], piece["boxes"], atol=1e-6, rtol=0)


def _whole(data: DetectionDataModule) -> Batch:
    """The train split as one batch, in its order."""
    loader = MicroBatchLoader(data.dataset("train"), data.loader, shuffle=False)
    return data.transform(loader.read(np.arange(14), 0), "train")


@pytest.mark.parametrize("tiles", [4, 9])
def test_device_mosaics_are_those_of_the_workers_where_both_have_the_same_partners(
    cache: str, tiles: Any
) -> None:
    """As where a batch is the whole split: at other times workers choose among more images."""
    spec = MosaicSpec(tiles=tiles, probability=0.8)
    worker, device = (
        _whole(_data(cache, mosaic=spec, mosaic_on=place)) for place in ("worker", "device")
    )
    difference = (worker.pop("image") - device.pop("image")).abs()
    assert_equal(worker, device)
    assert len(device["boxes"]) > 14
    # Edges of objects show that workers move tiles by up to half a pixel.
    assert difference.mean() < 0.02
    assert difference.median() < 2 / 255


def test_device_mosaics_are_the_same_for_the_same_batch_and_new_in_each_epoch(cache: str) -> None:
    data = _data(cache, mosaic_on="device")
    one = first(data)
    assert_equal(one, first(_data(cache, mosaic_on="device")))
    assert not torch.equal(one["image"], first(data, epoch=1)["image"])
    assert one.keys() == set(data.batch_keys)
    alone, read = _data(cache, mosaic=None), data.make_loader("train").read(np.arange(4), 0)
    stored = alone.make_loader("train").read(np.arange(4), 0)
    assert torch.equal(read["image"], stored["image"]), "workers write images alone"
    assert_equal(first(data, "val", 3), first(alone, "val", 3))
    with pytest.raises(
        ConfigError, match="mosaic_on='gpu' is unknown: choose one of worker, device"
    ):
        _data(cache, mosaic_on="gpu")


def _device_data(cache: str) -> DetectionDataModule:
    """With flips and colours, as in the experiment."""
    augment = detection_augment(scale=(1.0, 1.0), shift_px=0)
    return _data(cache, mosaic_on="device", augment=augment)


def _move(batch: Batch, device: str) -> Batch:
    return {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def test_no_value_of_a_batch_is_read_to_finish_it(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _device_data(cache)
    planned = plan(data, 14)
    # It knows no meta device.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    found = data.finish_batch(_move(planned, "meta"), "train")  # where there are none
    expected = data.finish_batch(planned, "train")
    assert {key: value.shape for key, value in found.items() if isinstance(value, Tensor)} == {
        key: value.shape for key, value in expected.items() if isinstance(value, Tensor)
    }


@pytest.mark.gpu
def test_nothing_waits_for_the_device_and_it_draws_what_the_cpu_draws(cache: str) -> None:
    data = _device_data(cache)
    planned = plan(data, 14)
    expected, there = data.finish_batch(planned, "train"), _move(planned, "cuda")
    data.finish_batch(there, "train")  # the first call loads libraries
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = data.finish_batch(there, "train")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (found["image"].cpu() - expected["image"]).abs().max() <= 1 / 255
    assert (found["boxes"].cpu() - expected["boxes"]).abs().max() <= 1e-6


def test_samples_are_shown_before_augmentation_where_there_is_one(cache: str) -> None:
    plain, data = _data(cache), _data(cache, augment=detection_augment())
    planned = plan(data, 6)
    before = data.inspect("train").draw(planned)
    assert before is not None
    assert_equal(before, first(plain, count=6))
    assert data.inspect("val").draw(planned) is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "place"), [("thread", "worker"), ("process", "worker"), ("thread", "device")]
)
def test_the_last_epochs_have_no_mosaics_although_the_workers_live_on(
    cache: str, tmp_path: Path, kind: str, place: str
) -> None:
    workers = {"worker_kind": kind, "num_workers": 2, "micro_batch_size": 2}
    data = _data(cache, loader=workers, mosaic_on=place)
    data.dataset("train")  # before the length of the run is known, as for the pictures of a run
    seen = []
    fit(Watcher(seen.append), data, tmp_path, max_epochs=3)
    alone = first(_data(cache, mosaic=None), "predict", 20)["image"]
    assert len(seen) == 12
    for batch in seen:
        last = int(batch["epoch"][0]) == 2
        same = [
            torch.equal(image, alone[n])
            for image, n in zip(batch["image"], batch["index"].tolist(), strict=True)
        ]
        assert all(same) if last else not any(same)


@pytest.mark.parametrize(("place", "steps"), [("worker", (2, 4, 5)), ("device", (3,))])
def test_an_interrupted_run_goes_on_with_the_samples_it_would_have_had(
    cache: str, tmp_path: Path, place: str, steps: tuple[int, ...]
) -> None:
    make = partial(_data, cache, mosaic_on=place)
    assert_resumes(make(), make, tmp_path, steps)


def _write_set(folder: Path, count: int = 6) -> Path:
    rng = np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        cv2.imwrite(
            str(folder / "images" / f"{number}.png"),
            rng.integers(0, 256, (30, 40, 3), dtype=np.uint8),
        )
        (folder / "labels" / f"{number}.txt").write_text(
            f"{number % 2} 0.5 0.5 0.{number + 1} 0.2\n"
        )
    (folder / "classes.txt").write_text("cat\ndog\n")
    return folder


def test_damaged_images_are_listed_or_left_out_with_their_boxes(cache: str, tmp_path: Path) -> None:
    root = _write_set(tmp_path / "set")
    damaged = root / "images" / "2.png"
    damaged.write_bytes(damaged.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"2\.png"):
        _data(cache, root=str(root))
    with pytest.raises(DataError, match=r"2\.png(.|\n)*1 of 6 images is bad"):
        _data(cache, root=str(root), setup=False).check_sources()
    data = _data(cache, root=str(root), on_bad="skip", mosaic=None)
    assert [Path(path).stem for path in data.files.images] == ["0", "1", "3", "4", "5"]
    assert sorted(n for part in data.files.splits.values() for n in part) == [0, 1, 2, 3, 4]
    batch = first(data, "predict", 5)
    widths = (batch["boxes"][:, 4] * 10).round().int().tolist()
    assert widths == [1, 2, 4, 5, 6]
    assert [str(path) for path in batch["path"]] == list(data.files.images)
    assert data.describe()["skipped"] == 1


def test_sources_and_stores_are_checked(
    cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    data = _data(str(tmp_path), root=str(_write_set(tmp_path / "set")))
    assert data.check_sources() == data.describe()
    assert data.describe()["train_images"] == 4
    splits = "train 4 (4 boxes), val 1 (1 box), test 1 (1 box)"
    assert f"classes: 0 cat 3, 1 dog 3; splits: {splits}" in caplog.text
    assert data.verify_sources() == []
    dataset = cast(DetectionDataset, data.dataset("train"))
    dataset.check_sources()
    store = next((tmp_path / "stores").rglob("pixels.npy"))
    store.chmod(0o644)
    with store.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(StoreCorruptError, match="expected"):
        dataset.check_sources()


DRAWN = DefectSpec(probability=1, count=(3, 3), true_count=(3, 3), amplitude=(0.4, 0.4))


def test_synthetic_defects_train_and_nothing_else_changes(cache: str) -> None:
    plain = _data(cache, mosaic=None)
    options = {"mosaic": None, "synthesis": DRAWN, "synthetic_class": "stain"}
    data = _data(cache, **options)
    for stage in ("val", "test", "predict"):
        assert_equal(first(data, stage, 2), first(plain, stage, 2))
    real, batch = first(plain), first(data)
    assert torch.equal(batch["index"], real["index"])
    assert (batch["boxes_count"] - real["boxes_count"]).tolist() == pytest.approx([3] * 4, abs=3)
    added = len(batch["boxes"]) - len(real["boxes"])
    assert 0 < added <= 12
    stains = [int((found["boxes"][:, 1] == 1).sum()) for found in (batch, real)]
    assert stains[0] - stains[1] == added
    assert not torch.equal(first(data, epoch=1)["boxes"], batch["boxes"])
    workers = {"worker_kind": "thread", "num_workers": 2, "micro_batch_size": 1}
    assert_equal(first(_data(cache, loader=workers, **options)), batch)


def test_good_images_alone_train_and_are_scored_by_synthetic_defects(
    cache: str, tmp_path: Path
) -> None:
    root = _write_set(tmp_path / "set", 9)
    for path in (root / "labels").iterdir():
        path.unlink()
    options = {
        "root": str(root),
        "classes": ["pit"],
        "size_px": (30, 40),
        "mosaic": None,
    }
    with pytest.raises(DataError, match="no image has a box"):
        first(_data(cache, **options))
    data = _data(cache, synthesis=DRAWN, **options)
    val = first(data, "val", 1)
    assert val["boxes_count"].tolist() == [3]
    assert_equal(first(data, "val", 1, epoch=0), val)
    assert first(data)["boxes_count"].tolist() == [3] * 4
    assert first(data, "predict", 9)["boxes_count"].tolist() == [0] * 9
    windows = _data(cache, synthesis=DRAWN, **options | {"size_px": None, "patch_px": 24})
    for stage in ("train", "val"):
        assert first(windows, stage)["boxes_count"].tolist() == [3] * 4
    assert not windows.joins_windows  # each is scored alone


def test_a_check_lists_labels_and_damaged_images_together(cache: str, tmp_path: Path) -> None:
    root = _write_set(tmp_path / "set")
    (root / "labels" / "3.txt").write_text("7 0.5 0.5 0.1 0.1\n0 nan 0.5 0.1 0.1\n")
    damaged = root / "images" / "2.png"
    damaged.write_bytes(damaged.read_bytes()[:-300])
    with pytest.raises(DataError) as caught:
        _data(cache, root=str(root), setup=False).check_sources()
    names = [Path(path).name for path, _ in caught.value.problems]
    assert names == ["2.png", "3.txt", "3.txt"]
    assert "1 of 6 images is bad; 2 problems with labels" in str(caught.value)


@pytest.mark.parametrize(
    "batch_format",
    [
        "torchvision",
        "ultralytics",
        lambda batch: {"pixels": batch["image"], "files": batch["path"]},
    ],
)
def test_a_batch_in_a_form_of_its_own_is_cut_by_that(cache: str, batch_format: Any) -> None:
    data = _data(cache, mosaic=None)
    whole = first(data, "predict")
    data.batch_format = batch_format
    formatted = format_batch(whole, batch_format, {})
    expected = format_batch(data.slice_batch(whole, 1, 3), batch_format, {})
    found = data.slice_batch(formatted, 1, 3)
    assert len(batch_tensors(found)) == len(batch_tensors(expected)) > 0
    for one, other in zip(batch_tensors(found), batch_tensors(expected), strict=True):
        assert torch.equal(one, other)
