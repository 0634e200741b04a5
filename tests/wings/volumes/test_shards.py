"""CT volumes in shards: the samples of the set, each shard fetched once in an epoch, within the allowed bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.testing import assert_close

from lit_data.core.errors import ConfigError, DataError, StoreCorruptError
from lit_data.images.store.files import write_tar
from lit_data.loading import LoaderOptions
from lit_data.wings.remote.faults import UnreachableError
from lit_data.wings.remote.transport import FolderTransport
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.volumes.datasets.windows import WindowSpec
from lit_data.wings.volumes.shards import ShardedVolumes, VolumeIndex

VOLUMES = 12
WINDOWS = {
    "sample": "windows",
    "windows": WindowSpec(size=8, per_volume=3, label_bias=0.5),
}
EXACT = {"rtol": 0, "atol": 0}
ALL = {"train": 1.0, "val": 0, "test": 0}
Open = Callable[..., CTDataModule]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    (folder / "set/scans").mkdir(parents=True)
    for number in range(VOLUMES):
        rng = np.random.default_rng(number)
        np.save(
            folder / f"set/scans/{number:02}.npy",
            rng.integers(-1000, 400, (12, 14 + number % 3, 16), np.int16),
        )
        if number % 2:
            labels = np.zeros((12, 14 + number % 3, 16), np.uint8)
            labels[4:7, 5:8, 5:9] = 1
            np.save(folder / f"set/scans/{number:02}_labels.npy", labels)
    data = make(folder / "set", folder / "cache")
    report = data.source.publish(str(folder / "set.shards"), 1)
    assert report == {"volumes": 12, "skipped": 0, "shards": 12, "shards_kept": 0} | {
        name: report[name] for name in ("points", "bytes")
    }
    assert data.source.publish(str(folder / "set.shards"), 1) == report | {"shards_kept": 12}
    return folder


def make(root: Path, cache: Path, **options: Any) -> CTDataModule:
    given = {"batch_size": 4, "num_workers": 2, "worker_kind": "thread"}
    loader = LoaderOptions(**given | options.pop("loader", {}))
    options = {"occupied_hu": (0, None), "processes": 1} | options
    options = {"splits": {"train": 0.8, "val": 0.2, "test": 0}} | options
    return CTDataModule(str(root), cache_dir=str(cache), loader=loader, **options)


@pytest.fixture
def open_data(sets: Path, tmp_path: Path) -> Open:
    def open_(name: str = "set.shards", **options: Any) -> CTDataModule:
        data = make(sets / name, tmp_path, **options)
        data.prepare_data()
        data.setup("fit")
        return data

    return open_


def open_bank(data: CTDataModule) -> ShardedVolumes:
    bank = data.volumes.bank
    assert isinstance(bank, ShardedVolumes)
    return bank


def read_rows(data: CTDataModule, stage: Any = "train", epoch: int = 0) -> dict[int, list[Any]]:
    """Each sample of a stage by its number, in memory of its own."""
    loader = data.make_loader(stage)
    loader.set_epoch(epoch)
    found = {}
    for batch in loader:
        flat = [batch[key] for key in ("coords", "feats", "label") if key in batch]
        boxes = [batch[key] for key in ("image", "occupied", "mask", "sdf") if key in batch]
        for row, index in enumerate(batch["index"].tolist()):
            own = [part[batch["coords"][:, 0] == row].clone() for part in flat]
            assert index not in found
            found[index] = [part[:, 1:] if part.shape[-1] == 4 else part for part in own]
            found[index] += [box[row].clone() for box in boxes]
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("thread", {"max_points": 500, "sdf": 3.0}),
        ("thread", WINDOWS),
        ("process", WINDOWS | {"sdf": 3.0}),
    ],
)
def test_samples_equal_those_of_files(open_data: Open, kind: str, options: dict[str, Any]) -> None:
    here, there = open_data("set", **options), open_data(**options, loader={"worker_kind": kind})
    assert there.describe() == here.describe()
    assert open_bank(there).counts.tolist() == here.volumes.bank.counts.tolist()
    stages = ("train",) if kind == "process" else ("train", "val", "predict")
    for stage in stages:
        rows, wanted = read_rows(there, stage, 1), read_rows(here, stage, 1)
        assert_close(rows, wanted, **EXACT)


def test_an_ended_run_goes_on_and_names_bad_volumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, address = tmp_path / "set", tmp_path / "set.shards"
    root.mkdir()
    for number in range(4):
        np.save(root / f"{number}.npy", np.full((4, 5, 6), 300 + number, np.int16))
    put, left = FolderTransport.put, iter([True] * 2)

    def stop(self: FolderTransport, path: Path, name: str) -> None:
        if not next(left, False):
            raise KeyboardInterrupt
        put(self, path, name)

    def fail(self: FolderTransport, path: Path, name: str) -> None:
        raise UnreachableError("no answer")

    monkeypatch.setattr(FolderTransport, "put", stop)
    with pytest.raises(KeyboardInterrupt):
        make(root, tmp_path).source.publish(str(address), 1)
    monkeypatch.setattr(FolderTransport, "put", fail)  # this is no bad volume
    with pytest.raises(UnreachableError, match="no answer"):
        make(root, tmp_path, on_bad="skip").source.publish(str(address), 1)
    monkeypatch.setattr(FolderTransport, "put", put)
    (root / "9.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"9.npy(?s:.)*1 of 5 volumes is bad"):
        make(root, tmp_path).source.publish(str(address), 1)
    for cache in ("cache", "another machine"):
        report = make(root, tmp_path / cache, on_bad="skip").source.publish(str(address), 1)
        assert (report["volumes"], report["skipped"], report["shards_kept"]) == (4, 1, 4)
    there = make(address, tmp_path, splits=ALL)
    there.setup("fit")
    assert [Path(path).name for path, _ in open_bank(there).skipped] == ["9.npy"]
    assert sorted(read_rows(there)) == [0, 1, 2, 3]
    assert there.verify_sources() == []


def test_what_cannot_be_read_is_refused(tmp_path: Path, open_data: Open) -> None:
    message = r"volumes were indexed with other options: decoder.low_hu 0.* -> 100"
    with pytest.raises(ConfigError, match=message):
        open_data(occupied_hu=(100, None))
    with pytest.raises(ConfigError, match=r"prepare.check reads files"):
        open_data().check_sources()
    bank = open_bank(open_data())
    path = bank.cache.fetch(3)
    index, folder = VolumeIndex.open(bank.index), tmp_path / "folder"
    folder.mkdir()
    evil = index.facts | {"names": ["../../outside"] * VOLUMES}
    index._replace(facts=evil).write(folder)
    write_tar({file.name: file for file in folder.iterdir()}, tmp_path / "evil.tar")
    message = r"names a file that leads out of the folder: '../../outside'"
    with pytest.raises(StoreCorruptError, match=message):
        ShardedVolumes(tmp_path / "evil.tar", tmp_path, bank.cache).list_sources()
    path.write_bytes(bank.cache.fetch(4).read_bytes())
    with pytest.raises(StoreCorruptError, match="its content differs from the index of the set"):
        bank[3]
