"""Training from shards: the samples of the set, in an order that needs each shard once, on any number of ranks."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.core.mosaic import MosaicSpec
from lit_data.datamodules import BaseDataModule, InspectionDataModule
from lit_data.datasets.balanced_patches import SamplingOptions
from lit_data.images.masks import MaskOptions
from lit_data.images.writing import write_png
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.detection.datamodule import MosaicPlace
from lit_data.wings.remote.shards.store import ShardedStore
from lit_data.wings.remote.transport import FolderTransport

IMAGES = 30
SMALL = 300_000  # of ten shards of 72 kB
Open = Callable[..., InspectionDataModule]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for number in range(IMAGES):
        image = np.random.default_rng(number).integers(0, 200, (64, 96), np.uint8)
        if number % 2:
            mask = np.zeros((64, 96), np.uint8)
            mask[10:30, 10:30] = 1
            write_png(folder / "photos/masks" / f"{number:02}.png", mask)
            image[10:30, 10:30] = 255
        write_png(folder / "photos/images" / f"{number:02}.png", image)
    data = InspectionDataModule(str(folder / "photos"), cache_dir=str(folder / "cache"))
    assert data.source.publish(str(folder / "photos.shards"), 3 * 3 * 64 * 96)["shards"] == 10
    return folder


ALL = {"train": 1.0, "val": 0, "test": 0}


def open_module(kind: Any, root: Path | str, cache: Path, **options: Any) -> Any:
    """A datamodule that is prepared and set up."""
    loader = LoaderOptions(batch_size=4, num_workers=1, worker_kind="thread")
    data = kind(str(root), cache_dir=str(cache), **({"loader": loader} | options))
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.fixture
def open_data(sets: Path, tmp_path: Path) -> Open:
    def open_(name: str = "photos.shards", **options: Any) -> InspectionDataModule:
        given = {"batch_size": 4, "num_workers": 2, "worker_kind": "thread"}
        loader = LoaderOptions(**given | options.pop("loader", {}))
        options = {"patch_px": 32, "splits": ALL, "loader": loader} | options
        return open_module(InspectionDataModule, sets / name, tmp_path, **options)

    return open_


def read_indices(loader: MicroBatchLoader, epoch: int = 0) -> list[int]:
    loader.set_epoch(epoch)
    return torch.cat([batch["index"] for batch in loader]).tolist()


GRAY_EDGES = np.repeat(np.uint8([0, 9, 90, 245, 251, 255]), (380, 20, 4, 4, 4, 100)).reshape(16, 32)
IGNORED_EDGES = np.repeat(np.uint8([0, 255, 1]), (400, 12, 100)).reshape(16, 32)
COLORS = np.repeat(np.uint8([[0, 0, 0], [0, 0, 200], [0, 200, 0]]), (400, 60, 52), 0)


@pytest.mark.parametrize(
    ("folder", "mask", "classes"),
    [
        ("masks", GRAY_EDGES, None),
        ("SegmentationClass", IGNORED_EDGES, None),
        ("masks", COLORS.reshape(16, 32, 3), ["pit", "scratch"]),
    ],
)
def test_masks_are_read_as_those_of_the_files(
    tmp_path: Path, folder: str, mask: Any, classes: list[str] | None
) -> None:
    for number in range(4):
        image = np.random.default_rng(number).integers(0, 200, (16, 32), np.uint8)
        write_png(tmp_path / "set/JPEGImages" / f"{number}.png", image)
        write_png(tmp_path / "set" / folder / f"{number}.png", mask)
    options = {"classes": classes, "patch_px": 16, "splits": {"train": 0.5, "val": 0.5}}
    local = open_module(InspectionDataModule, tmp_path / "set", tmp_path / "cache", **options)
    local.source.publish(str(tmp_path / "set.shards"))
    there = open_module(
        InspectionDataModule, tmp_path / "set.shards", tmp_path / "other", **options
    )
    assert there.source.mask_options == local.source.mask_options != MaskOptions()
    _compare(there, local, fits=True)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_batches_are_those_of_the_files(open_data: Open, kind: str) -> None:
    sampling = SamplingOptions(positives=0.5, paste=0.5)
    local = open_data("photos", sampling=sampling)
    there = open_data(sampling=sampling, loader={"worker_kind": kind})
    assert isinstance(there.bank, ShardedStore)
    for batch, wanted in zip(there.make_loader("train"), local.make_loader("train"), strict=True):
        assert_close(batch, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("positives", [None, 0.5])
def test_an_epoch_takes_each_sample_and_fetches_each_shard_once(
    open_data: Open, monkeypatch: pytest.MonkeyPatch, positives: float | None
) -> None:
    sampling = SamplingOptions(positives=positives)
    everything = open_data(sampling=sampling).make_loader("train")
    expected = [Counter(read_indices(everything, epoch)) for epoch in (0, 1)]
    data = open_data(cache_bytes=SMALL, sampling=sampling)
    bank = data.bank
    assert isinstance(bank, ShardedStore)
    for path in bank.cache.folder.glob("*.tar"):
        path.unlink()
    asked, get = [], FolderTransport.get
    monkeypatch.setattr(
        FolderTransport, "get", lambda self, name, *to: (asked.append(name), get(self, name, *to))
    )
    loader = data.make_loader("train")
    for epoch in (0, 1):
        asked.clear()
        assert Counter(read_indices(loader, epoch)) == expected[epoch]
        assert max(Counter(asked).values()) == 1
        files = [path for path in bank.cache.folder.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= SMALL


def test_a_run_goes_on_exactly_and_ranks_share_an_epoch(open_data: Open) -> None:
    def make(rank: int = 0, world_size: int = 1) -> MicroBatchLoader:
        data = open_data(cache_bytes=SMALL, sampling=SamplingOptions(positives=0.5))
        return MicroBatchLoader(
            data.dataset("train"), data.loader, shuffle=True, rank=rank, world_size=world_size
        )

    whole = read_indices(make(), 1)
    first = make()
    first.set_epoch(1)
    batches = iter(first)
    taken = torch.cat([next(batches)["index"] for _ in range(5)]).tolist()
    state = json.loads(json.dumps(first.state_dict()))
    batches.close()
    resumed = make()
    resumed.load_state_dict(state)
    assert taken + read_indices(resumed, 1) == whole
    ranks = [read_indices(make(rank, 2), 1) for rank in range(2)]
    assert Counter(ranks[0] + ranks[1]) == Counter(whole)


def test_what_would_fetch_a_shard_for_each_sample_is_refused(open_data: Open) -> None:
    pasted = {"sampling": SamplingOptions(positives=0.5, paste=0.5)}
    for options, message in (
        ({"loader": {"locality": "none"}}, "locality=none, but the set of shards does not fit"),
        (pasted, r"uses parts of other samples \(mosaics, pasted defects\): raise it"),
    ):
        data = open_data(cache_bytes=SMALL, **options)
        with pytest.raises(ConfigError, match=message):
            data.make_loader("train")


@pytest.mark.parametrize(
    ("mosaic_on", "cache_bytes"),
    [("worker", 2**30), ("device", 2**30), ("device", 200_000), (None, 200_000)],
)
def test_images_with_boxes(tmp_path: Path, mosaic_on: MosaicPlace | None, cache_bytes: int) -> None:
    (tmp_path / "set/labels").mkdir(parents=True)
    for number in range(IMAGES):
        image = np.random.default_rng(number).integers(0, 200, (50, 64, 3), np.uint8)
        write_png(tmp_path / "set/images" / f"{number}.png", image)
        lines = [f"{number % 2} 0.5 0.5 0.{box + 1} 0.25\n" for box in range(number % 4)]
        (tmp_path / "set/labels" / f"{number}.txt").write_text("".join(lines))
    options = {"size_px": 64, "classes": ["scratch", "dent"]}
    options |= {"mosaic": MosaicSpec() if mosaic_on else None, "mosaic_on": mosaic_on or "worker"}
    options |= {"splits": {"train": 0.9, "val": 0.1, "test": 0}, "cache_bytes": cache_bytes}
    here = open_module(DetectionDataModule, tmp_path / "set", tmp_path, **options)
    assert here.source.publish(str(tmp_path / "set.shards"), 2 * 3 * 64 * 64)["shards"] > 8
    there = open_module(DetectionDataModule, tmp_path / "set.shards", tmp_path, **options)
    assert there.describe() == here.describe() | {"pixel_bytes": there.describe()["pixel_bytes"]}
    _compare(there, here, fits=cache_bytes == 2**30)
    options["splits"] = {"train": 0.8, "val": 0.1, "test": 0}
    with pytest.raises(ConfigError, match=r"read with other options: splits.train 0.9 -> 0.8"):
        open_module(DetectionDataModule, tmp_path / "set.shards", tmp_path, **options)


def test_mosaics_of_any_images_need_all_of_them(tmp_path: Path) -> None:
    options = {"size_px": 64, "mosaic": MosaicSpec()}
    options["samples"] = {"count": 40, "size_px": [64, 64]}
    here = DetectionDataModule(cache_dir=str(tmp_path), **options)
    here.source.publish(str(tmp_path / "set.shards"), 3 * 64 * 64)
    options["cache_bytes"] = SMALL
    there = open_module(DetectionDataModule, tmp_path / "set.shards", tmp_path, **options)
    message = r"not fit data.cache_bytes, and DetectionDataset .* set data.mosaic_on=device"
    with pytest.raises(ConfigError, match=message):
        there.make_loader("train")


def _compare(there: BaseDataModule[Any], here: BaseDataModule[Any], *, fits: bool) -> None:
    """The same batches where all shards have room here; else the same samples in another order."""
    assert isinstance(there.dataset("train").bank, ShardedStore)
    assert there.dataset("train").needs_windows is not fits
    for stage in ("train", "val") if fits else ("val",):
        for batch, wanted in zip(there.make_loader(stage), here.make_loader(stage), strict=True):
            assert_close(batch, wanted, rtol=0, atol=0)
    if not fits:
        rows, wanted_rows = (
            {row["index"]: row for batch in data.make_loader("train") for row in _split(batch)}
            for data in (there, here)
        )
        assert rows.keys() == wanted_rows.keys()
        for index, row in rows.items():
            assert_close(row, wanted_rows[index], rtol=0, atol=0)


def _split(batch: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Its samples, in memory of their own; boxes lie flat, with their rows."""

    def take(key: str, value: torch.Tensor, row: int) -> Any:
        if key == "boxes":
            return value[value[:, 0] == row, 1:]
        return int(value[row]) if key == "index" else value[row].clone()

    rows = range(len(batch["index"]))
    return [{key: take(key, value, row) for key, value in batch.items()} for row in rows]
