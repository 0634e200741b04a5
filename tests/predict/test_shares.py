"""Several processes predict some of the inputs each; files, tables and pictures are those of one process."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule

from lit_data.core.errors import ConfigError, DataError, StoreError
from lit_data.core.parts import Part
from lit_data.core.types import Batch
from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule
from lit_data.datamodules.base import BaseDataModule
from lit_data.loading import LoaderOptions
from lit_data.models import AnomalyModule, MemoryBank
from lit_data.predict import Predicted, PredictOptions, find_task, writer
from lit_data.predict.maps import WholeImages
from lit_data.predict.options import Share
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.detection.box_figures import find_true
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.watermarks import WatermarkDataModule
from tests.helpers.reading import opened
from tests.predict.running import Marker, make_run, read_rows

LOADER = LoaderOptions(batch_size=2, worker_kind="inline")


class Kind(NamedTuple):
    """A kind of data, a model for it, and options of ``predict``."""

    data: BaseDataModule
    model: LightningModule
    options: dict[str, Any]
    table: str


class Boxes(LightningModule):
    """Finds the boxes of the dataset."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        true = [find_true(batch, row) for row in range(len(batch["image"]))]
        scores = [0.9 - 0.1 * torch.arange(len(each.classes)) for each in true]
        return [
            {"boxes": each.corners, "classes": each.classes, "scores": score}
            for each, score in zip(true, scores, strict=True)
        ]


class Found(LightningModule):
    """Finds a box in each window, whose size depends on a net, and so on how it rounds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 4, 3)
        )

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        sizes = 10 + self.net(batch["image"]).mean((2, 3)).abs()
        return [
            {
                "boxes": torch.cat((torch.ones(1, 2), 1 + size[None, :2]), 1),
                "classes": torch.zeros(1, dtype=torch.int64),
                "scores": (size[2:3] / 20).clamp(0, 1),
            }
            for size in sizes
        ]


class Volumes(LightningModule):
    """Finds the points of the batch."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        counts = batch["coords_count"].tolist()
        parts = zip(batch["coords"].split(counts), batch["feats"].split(counts), strict=True)
        return [
            {
                "coords": points[:, 1:],
                "values": feats[:, 0],
                "scores": torch.full((len(points),), 0.9),
            }
            for points, feats in parts
        ]


class Labels(LightningModule):
    """Says the second class the surer, the brighter an image is."""

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        bright = batch["image"].mean((1, 2, 3))
        return torch.stack((1 - bright, bright), 1)


def _write_images(folder: Path, names: list[str]) -> str:
    rng = np.random.default_rng(0)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)
        cv2.imwrite(str(path), pixels)
    return str(folder)


def _make_maps(folder: Path) -> Kind:
    root = _write_images(folder / "set", [f"{number}.png" for number in range(7)])
    data = InspectionDataModule(root, cache_dir=str(folder), loader=LOADER)
    return Kind(data, Marker(), {"tile_px": 48, "multiple_px": 1, "image_threshold": 0.9}, "images")


def _make_anomalies(folder: Path) -> Kind:
    """Distances to a memory bank, whose rows are those of random features."""
    torch.manual_seed(0)
    normality = MemoryBank(60, candidates=400, whiten=False)
    normality.bank = torch.rand(60, 96)
    model = AnomalyModule(None, normality)
    model.pixel_mean, model.pixel_std = torch.full((3,), 0.5), torch.tensor(0.3)
    return _make_maps(folder)._replace(model=model)


def _make_marks(folder: Path) -> Kind:
    root = _write_images(folder / "set", [f"{name}/{name}.png" for name in "abcde"])
    data = WatermarkDataModule(root, cache_dir=str(folder), splits={"train": 1.0}, loader=LOADER)
    return Kind(data, Marker(), {"tile_px": 48, "multiple_px": 1, "clean": True}, "marks")


def _make_labels(folder: Path) -> Kind:
    names = [f"{name}/{number}.png" for name in ("dark", "light") for number in range(4)]
    root = _write_images(folder / "set", names)
    data = LabelledImageDataModule(
        root, cache_dir=str(folder), size_px=(32, 32), splits={"train": 1.0}, loader=LOADER
    )
    return Kind(data, Labels(), {}, "labels")


def _make_boxes(folder: Path) -> Kind:
    samples = {"count": 7, "size_px": [64, 90]}
    data = DetectionDataModule(
        cache_dir=str(folder), samples=samples, size_px=(96, 96), loader=LOADER
    )
    return Kind(data, Boxes(), {"threshold": 0.0, "min_area_px": 0}, "")


def _make_windows(folder: Path) -> Kind:
    made = _make_boxes(folder)
    samples = {"count": 5, "size_px": [64, 90]}
    data = DetectionDataModule(
        cache_dir=str(folder), samples=samples, patch_px=(40, 40), loader=LOADER
    )
    return made._replace(data=data, model=Found(), options={"threshold": 0.0, "overlap_px": 10})


def _make_volumes(folder: Path) -> Kind:
    data = CTDataModule(
        cache_dir=str(folder),
        samples={"count": 6, "shape": (16, 18, 20)},
        occupied_hu=(150, None),
        loader=LOADER,
    )
    return Kind(data, Volumes(), {}, "volumes")


KINDS = (
    _make_maps,
    _make_anomalies,
    _make_marks,
    _make_labels,
    _make_boxes,
    _make_windows,
    _make_volumes,
)


pytestmark = pytest.mark.usefixtures("few_pictures")


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__.removeprefix("_make_"))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    make = request.param
    made = make(tmp_path_factory.mktemp("kind"))
    return made._replace(data=opened(made.data, "predict"))


def _predict_part(kind: Kind, folder: Path, part: Part, **options: Any) -> Predicted:
    run = replace(make_run(folder), share=Share(number=part.number, count=part.count, leads=False))
    return find_task(kind.data).predict(kind.model, run, PredictOptions(**kind.options | options))


def _predict(kind: Kind, results: Path, **options: Any) -> Predicted:
    run = make_run(results)
    return find_task(kind.data).predict(kind.model, run, PredictOptions(**kind.options | options))


def _finish(kind: Kind, folder: Path, **options: Any) -> Predicted:
    return _predict(kind, folder, finish=True, folder=str(folder), **options)


def _read(folder: Path) -> dict[str, Any]:
    """Content of all files but the journals; of a table without the time that each image took."""
    contents = {}
    for path in folder.rglob("*.*"):
        if path.is_dir() or path.suffix == ".jsonl":
            continue
        content = path.read_bytes()
        if path.name == "marks.csv":
            rows = csv.DictReader(io.StringIO(content.decode()))
            content = [{**row, "seconds": ""} for row in rows]
        contents[path.relative_to(folder).as_posix()] = content
    return contents


class Alone(NamedTuple):
    """Result and folder of one process."""

    predicted: Predicted
    folder: Path


@pytest.fixture(scope="module")
def alone(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    return Alone(_predict(kind, folder), folder)


def test_parts_write_what_one_process_writes(kind: Kind, alone: Alone, tmp_path: Path) -> None:
    counts = []
    for number in (1, 2, 0):  # in any order
        metrics, bad = _predict_part(kind, tmp_path / "parts", Part(number, 3))
        assert (metrics["predict/part"], metrics["predict/images_kept"], bad) == (
            f"{number}/3",
            0,
            (),
        )
        counts.append(metrics["predict/inputs"])
    total = sum(counts)
    assert min(counts) > 0
    joined = _finish(kind, tmp_path / "parts")
    assert joined.metrics == alone.predicted.metrics | {"predict/images_kept": total}
    expected = _read(alone.folder)
    assert len(expected) >= 3
    assert _read(tmp_path / "parts") == expected


def test_many_inputs_lie_in_folders_by_prefix(kind: Kind, alone: Alone, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    many = _predict(kind, tmp_path / "many", many_inputs=2)
    assert many == alone.predicted
    for path in alone.folder.glob("*/**/*.*"):
        first, *names = path.relative_to(alone.folder).parts
        prefix = () if first == ".shown" else ("[0-9a-f][0-9a-f]",)
        copies = (tmp_path / "many" / first).glob("/".join((*prefix, *names)))
        assert [copy.read_bytes() for copy in copies] == [path.read_bytes()]
    if not kind.table:
        return
    rows = parquet.read_table(tmp_path / "many" / f"{kind.table}.parquet").to_pylist()
    expected = read_rows(alone.folder / f"{kind.table}.csv")
    changes = ("seconds", "file")  # time, and the folder
    for table in (rows, expected):
        for row in table:
            for name in changes:
                row.pop(name, None)
    assert [{name: str(cell) for name, cell in row.items()} for row in rows] == expected


@pytest.fixture
def maps(tmp_path: Path) -> Kind:
    made = _make_maps(tmp_path)
    return made._replace(data=opened(made.data, "predict"))


def test_a_run_goes_on_in_folders_by_prefix_alone(maps: Kind, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    _predict(maps, tmp_path / "many", many_inputs=7)
    metrics = _predict(maps, tmp_path / "many", many_inputs=2, resume=True).metrics
    assert metrics["predict/images_kept"] == 7
    with pytest.raises(ConfigError, match="layout: 'folders by prefix', now None"):
        _predict(maps, tmp_path / "many", many_inputs=8, resume=True)


def test_tables_of_many_inputs_need_pyarrow(
    maps: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tables of 7 inputs are written as Parquet, which needs"):
        _predict(maps, tmp_path / "many", many_inputs=7)
    assert not (tmp_path / "many").exists()


def _read_alone(kind: Kind, folder: Path) -> dict[str, Any]:
    _predict(kind, folder / "alone")
    return _read(folder / "alone")


def test_missing_inputs_are_named(maps: Kind, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"no part was predicted in .*/out"):
        _finish(maps, folder)
    _predict_part(maps, folder, Part(1, 2))
    message = (
        rf"4 of 7 inputs are missing in {folder} \(0.png, 2.png, 4.png, 6.png\): start "
        r"predict.part=0/2 again, or predict them in one run with predict.resume=true$"
    )
    with pytest.raises(StoreError, match=message):
        _finish(maps, folder)
    assert not (folder / "images.csv").exists()
    # Also by another number of parts, which does those alone that nobody has done.
    assert _predict_part(maps, folder, Part(0, 3)).metrics["predict/images_kept"] == 1
    metrics = _predict(maps, folder, resume=True).metrics
    assert (metrics["predict/images"], metrics["predict/images_kept"]) == (7, 5)
    assert _read(folder) == _read_alone(maps, tmp_path)


def test_other_weights_or_options_are_refused(maps: Kind, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _predict_part(maps, folder, Part(0, 2))
    for options in ({"finish": True, "folder": str(folder)}, {"resume": True}):
        with pytest.raises(ConfigError, match=r"predict.image_threshold: 0.9, now 0.1"):
            _predict(maps, folder, image_threshold=0.1, **options)
    changed = maps._replace(options=maps.options | {"min_area_px": 9})
    with pytest.raises(ConfigError, match=r"choose another predict.folder, or remove that one"):
        _predict_part(changed, folder, Part(1, 2))


def test_a_bad_image_of_a_part_is_listed_at_the_end(
    maps: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = WholeImages.load

    def fail_at_three(images: WholeImages, number: int) -> Any:
        if number == 3:
            raise DataError("3.png: torn")
        return load(images, number)

    monkeypatch.setattr(WholeImages, "load", fail_at_three)
    alone = _predict(maps, tmp_path / "alone")
    assert alone.bad == [(f"{tmp_path}/set/3.png", "3.png: torn")]
    for number in (0, 1):
        metrics, bad = _predict_part(maps, tmp_path / "parts", Part(number, 2))
        assert (metrics["predict/images_bad"], bad) == (number, ())
    monkeypatch.undo()
    joined = _finish(maps, tmp_path / "parts")
    assert joined.bad == alone.bad
    assert joined.metrics == alone.metrics | {"predict/images_kept": 6}
    assert _read(tmp_path / "parts") == _read(tmp_path / "alone")


def test_shares_are_whole_blocks() -> None:
    shares = [Share(number=number, count=3).take(range(11), 2) for number in range(3)]
    assert shares == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10]]
    assert Share().take(range(5), 2) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "0/2"}, "predict.part=0/2 needs predict.folder=FOLDER"),
        ({"part": 1, "of": 2}, "predict.part=1/2 needs predict.folder=FOLDER"),
        ({"finish": True}, "predict.finish=true needs predict.folder=FOLDER"),
        ({"part": "0/2", "finish": True}, "predict.part=0/2 and predict.finish=true exclude"),
        ({"part": "2/2"}, "2 parts are numbered from 0 to 1"),
        ({"of": 2}, "predict.part=None predict.of=2 do not name a part"),
        ({"many_inputs": 0}, "predict.many_inputs=0 is not usable: choose a whole number"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PredictOptions(**options)
