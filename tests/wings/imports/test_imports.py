"""Sets that other libraries wrote are read from `data.root` alone; each file here is written by its library."""

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from lit_data.core.errors import ConfigError, DataError
from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.imports.folder import find_import

COUNT = 12


def _pixels(number: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(number)
    return rng.integers(60, 180, (48, 64, 3), dtype=np.uint8)


def _mask(number: int) -> np.ndarray[Any, Any]:
    mask = np.zeros((48, 64), np.uint8)
    mask[10 + number : 20 + number, 20:30] = 255
    return mask


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def _box(number: int) -> list[float]:
    return [20.0, 10.0 + number, 10.0, 10.0]


def _open(kind: Any, root: Any, cache: Path, **options: Any) -> Any:
    data = kind(str(root), cache_dir=cache, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def _check_masks(root: Any, cache: Path, splits: dict[str, int] | None = None) -> None:
    """Each image has the pixels and the mask that were written, whatever its number now."""
    data = _open(InspectionDataModule, root, cache)
    assert len(data.bank) == COUNT
    pixels = {_pixels(number).tobytes(): number for number in range(COUNT)}
    numbers = set()
    for place in range(COUNT):
        number = pixels[np.moveaxis(np.array(data.bank[place]), 0, -1).tobytes()]
        numbers.add(number)
        assert np.array_equal(data.read_mask(place) > 0, _mask(number) > 0)
    assert numbers == set(range(COUNT))
    if splits:
        assert {split: len(images) for split, images in data.split_images.items()} == splits


def _check_labels(root: Any, cache: Path) -> None:
    data = _open(LabelledImageDataModule, root, cache)
    assert data.classes == ("good", "dent")
    assert sorted(data.image_kinds) == ["dent"] * (COUNT // 2) + ["good"] * (COUNT // 2)


def _check_boxes(root: Any, cache: Path) -> None:
    data = _open(DetectionDataModule, root, cache)
    assert data.classes == ("dent", "pit")
    assert data.files.labels.object_count == COUNT
    pixels = {_pixels(number).shape for number in range(COUNT)}
    assert len(pixels) == 1
    tops = sorted(float(data.files.labels.of(place)[0, 2]) for place in range(COUNT))
    assert tops == pytest.approx([(15.0 + number) / 48 for number in range(COUNT)])


def _name(number: int) -> str:
    return ("good", "dent")[number % 2]


# Hugging Face


def _features(**columns: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    kinds = {"image": datasets.Image(), "mask": datasets.Image()}
    kinds["label"] = datasets.ClassLabel(names=["good", "dent"])
    category = datasets.ClassLabel(names=["dent", "pit"])
    kinds["objects"] = {
        "bbox": datasets.List(datasets.List(datasets.Value("float32"))),
        "category": datasets.List(category),
    }
    return datasets.Dataset.from_dict(
        columns, features=datasets.Features({name: kinds[name] for name in columns})
    )


def _images() -> list[Image.Image]:
    return [Image.fromarray(_pixels(number)) for number in range(COUNT)]


def _masks() -> list[Image.Image]:
    return [Image.fromarray(_mask(number)) for number in range(COUNT)]


@pytest.mark.strangers
def test_a_set_of_hugging_face_saved_to_disk_has_masks_and_splits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = _features(image=_images(), mask=_masks())
    parts = {"train": range(8), "validation": range(8, 10), "test": range(10, 12)}
    whole = datasets.DatasetDict({name: rows.select(part) for name, part in parts.items()})
    root = tmp_path / "größe"
    whole.save_to_disk(str(root))
    with caplog.at_level("INFO"):
        _check_masks(root, tmp_path / "cache", {"train": 8, "val": 2, "test": 2})
    assert "a dataset of Hugging Face: 12 images, 12 masks" in caplog.text


def test_parquet_of_hugging_face_has_labels(tmp_path: Path) -> None:
    rows = _features(image=_images(), label=[number % 2 for number in range(COUNT)])
    (tmp_path / "set").mkdir()
    rows.to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    _check_labels(tmp_path / "set", tmp_path / "cache")


def test_boxes_of_hugging_face_are_named_by_their_classes(tmp_path: Path) -> None:
    boxes = [{"bbox": [_box(number)], "category": [number % 2]} for number in range(COUNT)]
    _features(image=_images(), objects=boxes).save_to_disk(str(tmp_path / "set"))
    _check_boxes(tmp_path / "set", tmp_path / "cache")


def test_masks_boxes_and_labels_of_one_set_serve_each_experiment(tmp_path: Path) -> None:
    boxes = [{"bbox": [_box(number)], "category": [number % 2]} for number in range(COUNT)]
    labels = [number % 2 for number in range(COUNT)]
    rows = _features(image=_images(), mask=_masks(), label=labels, objects=boxes)
    rows.save_to_disk(str(tmp_path / "set"))
    for check in (_check_masks, _check_labels, _check_boxes):
        check(tmp_path / "set", tmp_path / "cache")


def test_columns_without_an_image_are_named(tmp_path: Path) -> None:
    _features(label=[0, 1]).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(DataError, match="no column is an image: there are label"):
        _open(InspectionDataModule, tmp_path / "set", tmp_path / "cache")


# WebDataset


def _write_shards(folder: Path, *, kind: str) -> None:
    webdataset = pytest.importorskip("webdataset")
    folder.mkdir()
    for shard in range(3):
        with webdataset.TarWriter(str(folder / f"{shard:03d}.tar")) as writer:
            for number in range(4 * shard, 4 * shard + 4):
                sample: dict[str, Any] = {
                    "__key__": f"part/{number:04d}",
                    "png": _png(_pixels(number)),
                }
                if kind == "mask":
                    sample["mask.png"] = _png(_mask(number))
                elif kind == "cls":
                    sample["cls"] = _name(number)
                else:
                    marks = [{"bbox": _box(number), "category": ("dent", "pit")[number % 2]}]
                    sample["json"] = {"objects": marks}
                writer.write(sample)


def test_shards_of_webdataset_are_read_with_masks_labels_and_boxes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for kind, check in (("mask", _check_masks), ("cls", _check_labels), ("json", _check_boxes)):
        _write_shards(tmp_path / kind, kind=kind)
        check(tmp_path / kind, cache)
    _check_masks(tmp_path / "mask" / "{000..002}.tar", cache)
    with pytest.raises(DataError, match=r"there is no .*003\.tar"):
        find_import(str(tmp_path / "mask" / "{000..003}.tar"), cache)


@pytest.mark.strangers
def test_a_shard_without_images_and_a_broken_one_are_named(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / "a.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("0.txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"hi"))
    with pytest.raises(DataError, match="sample 0 has no image"):
        _open(InspectionDataModule, tmp_path / "set", tmp_path / "cache")
    path.write_bytes(b"no tar file at all" * 100)
    with pytest.raises(DataError, match="set of WebDataset"):
        _open(InspectionDataModule, tmp_path / "set", tmp_path / "cache")


# litData


def _sample_of_litdata(number: int) -> dict[str, Any]:
    return {"image": Image.fromarray(_pixels(number)), "mask": _mask(number), "name": f"p{number}"}


@pytest.mark.strangers
def test_chunks_of_litdata_are_read(tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata")
    root = tmp_path / "chunks"
    writer = litdata.streaming.Cache(str(root), chunk_size=5)
    for number in range(COUNT):
        writer[number] = _sample_of_litdata(number)
    writer.done()
    writer.merge()
    _check_masks(root, tmp_path / "cache")


@pytest.mark.strangers
def test_pickled_values_of_litdata_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    index = {"chunks": [], "config": {"data_format": ["pil", "pickle"]}}
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "index.json").write_text(json.dumps(index))
    (tmp_path / "set" / "chunk-0-0.bin").write_bytes(b"")
    with pytest.raises(DataError, match="pickle are not read, because they may run code"):
        _open(InspectionDataModule, tmp_path / "set", tmp_path / "cache")


# FiftyOne, whose export is plain JSON


def _write_export(folder: Path, marks: Any) -> None:
    (folder / "data").mkdir(parents=True)
    samples = []
    for number in range(COUNT):
        cv2.imwrite(str(folder / "data" / f"{number}.png"), _pixels(number)[..., ::-1])
        samples.append(
            {"filepath": f"data/{number}.png", "tags": [], "ground_truth": marks(number)}
        )
    (folder / "samples.json").write_text(json.dumps({"samples": samples}))
    (folder / "metadata.json").write_text("{}")


def test_an_export_of_fiftyone_has_boxes_and_labels(tmp_path: Path) -> None:
    def mark_boxes(number: int) -> dict[str, Any]:
        x, y, width, height = _box(number)
        corner = [x / 64, y / 48, width / 64, height / 48]
        mark = {"_cls": "Detection", "label": ("dent", "pit")[number % 2], "bounding_box": corner}
        return {"_cls": "Detections", "detections": [mark]}

    _write_export(tmp_path / "boxes", mark_boxes)
    _check_boxes(tmp_path / "boxes", tmp_path / "cache")
    _write_export(tmp_path / "labels", lambda n: {"_cls": "Classification", "label": _name(n)})
    _check_labels(tmp_path / "labels", tmp_path / "cache")
    table = json.loads((tmp_path / "labels" / "samples.json").read_text())
    table["samples"][0]["filepath"] = "../boxes/data/0.png"
    (tmp_path / "labels" / "samples.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match="is outside of its folder"):
        _open(LabelledImageDataModule, tmp_path / "labels", tmp_path / "cache")


# All of them


def test_plain_folders_are_no_sets_of_other_libraries(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    cv2.imwrite(str(tmp_path / "images" / "0.png"), _pixels(0))
    (tmp_path / "backup.tar").write_bytes(b"x")
    for root in (tmp_path, tmp_path / "images", tmp_path / "nowhere", tmp_path / "{a,b}"):
        assert find_import(str(root), tmp_path / "cache") is None


def test_a_folder_of_images_is_left_at_its_first_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (tmp_path / f"{number}.png").touch()
    seen = []
    scandir = os.scandir

    @contextmanager
    def scan(folder: Path) -> Iterator[Iterator[Any]]:
        def note(entry: Any) -> Any:
            seen.append(entry.name)
            return entry

        with scandir(folder) as entries:
            yield map(note, entries)

    monkeypatch.setattr(os, "scandir", scan)
    assert find_import(str(tmp_path), tmp_path / "cache") is None
    assert len(seen) == 1


def test_a_set_is_unpacked_once_and_again_when_it_changes(tmp_path: Path) -> None:
    _write_export(tmp_path / "set", lambda n: {"_cls": "Classification", "label": _name(n)})
    cache = tmp_path / "cache"
    folders = []
    for _ in range(2):
        found = find_import(str(tmp_path / "set"), cache)
        assert found is not None
        folders.append(found.folder)
    assert folders[0] == folders[1]
    assert sorted(path.name for path in folders[0].iterdir()) == ["dent", "good"]
    samples = tmp_path / "set" / "samples.json"
    samples.write_text(samples.read_text() + "\n")
    found = find_import(str(tmp_path / "set"), cache)
    assert found is not None
    assert found.folder != folders[0]


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    with tarfile.open(tmp_path / "set" / "a.tar", "w"):
        pass
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(
        ConfigError, match=r"needs webdataset: pip install 'lit-data-inspect\[imports\]'"
    ):
        _open(InspectionDataModule, tmp_path / "set", tmp_path / "cache")
