from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from lit_data.app.prepare import export_set
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.volumes.datasets.windows import WindowSpec
from lit_data.wings.volumes.files.hounsfield import WINDOWS
from lit_data.wings.volumes.files.resampling import Resolution
from lit_data.wings.volumes.sample_set import render_volume
from tests.helpers.reading import assert_equal, assert_resumes, first, opened

SHAPE = (24, 32, 40)
SAMPLES = {"count": 10, "shape": SHAPE}
BONE_HU = (150, None)


def _data(cache: str, *, setup: bool = True, **options: Any) -> CTDataModule:
    given_loader = {"batch_size": 3} | options.pop("loader", {"worker_kind": "inline"})
    given = {
        "samples": SAMPLES,
        "occupied_hu": BONE_HU,
        "max_points": 200,
        "processes": 1,
    } | options
    data = CTDataModule(
        given.pop("root", None),
        cache_dir=cache,
        loader=LoaderOptions(seed=3, **given_loader),
        **given,
    )
    return opened(data) if setup else data


def _first(data: CTDataModule, stage: Any = "train", count: int = 3, epoch: int = 0) -> Batch:
    return first(data, stage, count, epoch)


def _assert_table(batch: Batch, table: Mapping[str, tuple[Any, torch.dtype]]) -> None:
    assert batch.keys() == {*table, "path"}
    for key, (shape, dtype) in table.items():
        assert tuple(batch[key].shape) == shape, key
        assert batch[key].dtype == dtype, key


COMMON = {
    "index": ((3,), torch.int64),
    "volume_index": ((3,), torch.int64),
    "shape": ((3, 3), torch.int64),
    "spacing": ((3, 3), torch.float32),
    "epoch": ((3,), torch.int64),
}


def test_a_batch_of_points_is_what_the_table_says(cache: str) -> None:
    data = _data(cache, sdf=5.0)
    batch = _first(data)
    points = {
        "coords": ((600, 4), torch.int32),
        "feats": ((600, 2), torch.float32),
        "label": ((600, 1), torch.int64),
    }
    counts = {"coords_count": ((3,), torch.int64), "occupied_total": ((3,), torch.int64)}
    _assert_table(batch, points | counts | COMMON)
    assert (
        batch["coords"][:, 0].tolist()
        == torch.arange(3).repeat_interleave(batch["coords_count"]).tolist()
    )
    assert set(data.sample_keys) == set(batch)
    for row, path in enumerate(map(str, batch["path"])):
        dense, labels = np.load(path), np.load(path.replace(".npy", "_labels.npy"))
        own = batch["coords"][:, 0] == row
        place = tuple(batch["coords"][own, 1:].T.long().numpy())
        assert (dense[place] > 150).all()
        assert int(batch["occupied_total"][row]) == (dense > 150).sum()
        assert len(np.unique(np.ravel_multi_index(place, SHAPE))) == int(own.sum()) == 200
        assert_array_equal(batch["feats"][own, 0], WINDOWS["bone"].scale(dense[place]))
        assert_array_equal(batch["label"][own, 0], labels[place])
    assert batch["feats"][:, 1].max() <= -1
    assert batch["feats"][:, 1].min() >= -5


def test_a_batch_of_windows_is_what_the_table_says(cache: str) -> None:
    spec = WindowSpec(size=(8, 16, 12), per_volume=2, label_bias=1.0)
    data = _data(
        cache,
        sample="windows",
        windows=spec,
        sdf="exact",
        window="soft_tissue",
        occupied_hu=(0, 1000),
    )
    assert len(data.dataset("train")) == 12
    batch = _first(data)
    box = (3, 1, 8, 16, 12)
    images = {
        "image": (box, torch.float32),
        "occupied": (box, torch.bool),
        "sdf": (box, torch.float32),
    }
    _assert_table(
        batch, images | {"mask": (box, torch.int64), "position": ((3, 3), torch.int64)} | COMMON
    )
    assert set(data.sample_keys) == set(batch)
    labelled = 0
    for row, path in enumerate(map(str, batch["path"])):
        dense, labels = np.load(path), np.load(path.replace(".npy", "_labels.npy"))
        start = batch["position"][row].tolist()
        part = tuple(
            slice(begin, begin + side) for begin, side in zip(start, spec.sides, strict=True)
        )
        occupied = (dense[part] > 0) & (dense[part] <= 1000)
        expected = np.where(occupied, WINDOWS["soft_tissue"].scale(dense[part]), 0)
        assert_array_equal(batch["image"][row, 0], expected)
        assert_array_equal(batch["occupied"][row, 0], occupied)
        assert_array_equal(batch["mask"][row, 0], labels[part])
        assert_array_equal(batch["sdf"][row, 0] < 0, occupied)
        labelled += bool(labels[part].any())
    assert labelled >= 2


def test_evaluation_sees_a_grid_without_windows_that_hold_too_little(cache: str) -> None:
    data = _data(cache, sample="windows", windows=WindowSpec(size=8))
    assert len(data.dataset("val")) == 2 * 3 * 4 * 5
    assert len(data.dataset("train")) == 6 * 8
    few = _data(cache, sample="windows", windows=WindowSpec(size=8, min_points=30, mode="sliding"))
    whole = _first(data, "val", len(data.dataset("val")))  # type: ignore[arg-type]
    kept = whole["occupied"].flatten(1).sum(1) >= 30
    assert 0 < int(kept.sum()) < len(kept)
    assert_equal(
        {key: value for key, value in _first(few, "val", int(kept.sum())).items() if key != "path"},
        {key: value[kept] for key, value in whole.items() if key != "path"},
    )
    assert "window at (z 0, y 0, x 8)" in data.dataset("val").describe_sample(1)  # type: ignore[attr-defined]
    assert data.dataset("train").describe_sample(9).endswith("window 1")  # type: ignore[attr-defined]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sample", "kind", "micro"),
    [("points", "thread", 1), ("points", "process", 2), ("windows", "process", 1)],
)
def test_workers_give_the_same_batches(cache: str, sample: str, kind: str, micro: int) -> None:
    workers = {"worker_kind": kind, "num_workers": 2, "micro_batch_size": micro}
    given = {
        "sample": sample,
        "windows": WindowSpec(size=8, per_volume=1, label_bias=0.5),
        "sdf": 4.0,
    }
    expected = list(_data(cache, **given).make_loader("train"))
    found = list(_data(cache, loader=workers, **given).make_loader("train"))
    assert len(found) == len(expected) == 2
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)


def test_a_sample_does_not_depend_on_the_batch_and_changes_with_the_epoch(cache: str) -> None:
    data = _data(cache)
    whole, loader = _first(data, count=6), data.make_loader("train")
    for row in range(6):
        alone = data.transform(loader.read(np.array([row]), 0), "train")
        assert_equal(alone, data.slice_batch(whole, row, row + 1))
    later = _first(data, count=6, epoch=1)
    assert not torch.equal(later["coords"], whole["coords"])
    dataset = data.dataset("train")
    sample = dataset[0]
    assert sample["coords"].shape == (200, 4)
    assert sample.keys() == dataset.fields.keys()
    with pytest.raises(IndexError, match="sample 6 of 6"):
        dataset[6]


def test_a_piece_of_a_batch_has_the_points_of_its_volumes(cache: str) -> None:
    data = _data(cache, max_points=None)
    whole = _first(data, "predict")
    assert torch.equal(whole["coords_count"], whole["occupied_total"])  # without a limit
    for start, stop in ((0, 1), (1, 3), (2, 9), (3, 4)):
        piece = data.slice_batch(whole, start, stop)
        own = (whole["coords"][:, 0] >= start) & (whole["coords"][:, 0] < stop)
        assert torch.equal(piece["coords"][:, 1:], whole["coords"][own, 1:])
        assert torch.equal(piece["coords"][:, 0], whole["coords"][own, 0] - start)
        assert torch.equal(piece["feats"], whole["feats"][own])
        assert torch.equal(piece["coords_count"], whole["coords_count"][start:stop])
    for keys in (["feats", "coords", "index"], ["coords_count", "feats"]):
        data.batch_format = keys
        part = data.slice_batch(tuple(whole[key] for key in keys), 3, 4)
        assert all(torch.equal(found, piece[key]) for found, key in zip(part, keys, strict=True))
    data.batch_format = cast(Any, {"mine": "feats"})
    with pytest.raises(ConfigError, match=r"add coords or coords_count"):
        data.slice_batch({"mine": whole["feats"]}, 0, 1)


def test_later_epochs_read_no_dense_volume(tmp_path: Path) -> None:
    root = _write_set(tmp_path / "set")
    data = _data(str(tmp_path), root=str(root), sdf=4.0)
    expected = _first(data, count=2)
    for path in root.iterdir():
        path.write_bytes(b"")
    assert_equal(_first(data, count=2), expected)


def test_an_interrupted_run_goes_on_with_the_points_it_would_have_had(
    cache: str, tmp_path: Path
) -> None:
    inline, threads = (
        {"loader": {"worker_kind": kind, "batch_size": 2}} for kind in ("inline", "thread")
    )
    make = partial(_data, cache, **threads)
    assert_resumes(_data(cache, **inline), make, tmp_path, steps=(1, 3, 5))


def _write_set(folder: Path, count: int = 4, labelled: int = 0) -> Path:
    folder.mkdir()
    for number in range(count):
        scene = render_volume(1, number, SHAPE)
        np.save(folder / f"v{number}.npy", scene.volume)
        if number < labelled:
            np.save(folder / f"v{number}_labels.npy", scene.labels)
    return folder


def test_volumes_without_labels_are_told_from_those_without_objects(tmp_path: Path) -> None:
    data = _data(str(tmp_path), root=str(_write_set(tmp_path / "set", labelled=1)))
    batch = _first(data, "predict", 4)
    for row in range(4):
        labels = batch["label"][batch["coords"][:, 0] == row].unique().tolist()
        assert labels == [-1] if row else -1 not in labels
    plain = _data(str(tmp_path), root=str(_write_set(tmp_path / "plain")))
    assert "label" not in _first(plain, "predict", 4)


def _names(batch: Batch) -> list[str]:
    return [Path(str(path)).stem for path in batch["path"]]


def test_volumes_with_too_few_points_are_refused_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = _write_set(tmp_path / "set", count=6)
    for name in ("v1", "v4"):
        volume = np.full(SHAPE, -1000, np.int16)
        volume[3, 4, 5:8] = 1000
        np.save(root / f"{name}.npy", volume)
    given = {"root": str(root), "min_points": 4}
    refused = r"v1\.npy: 3 foreground(.|\n)*v4\.npy(.|\n)*2 of 6 volumes have too few points"
    with pytest.raises(DataError, match=refused):
        _data(str(tmp_path), **given)
    data = _data(str(tmp_path), too_few="skip", **given)
    assert "volumes have too few points; they are skipped" in caplog.text
    assert "v4.npy: 3 foreground voxels, fewer than data.min_points=4" in caplog.text
    assert data.describe()["too_few"] == 2
    assert _names(_first(data, "predict", 4)) == ["v0", "v2", "v3", "v5"]
    with pytest.raises(DataError, match=r"v4\.npy: 3 foreground(.|\n)*2 of 6 volumes are bad"):
        _data(str(tmp_path), setup=False, **given).check_sources()


def test_volumes_are_not_exported_as_images(cache: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is nothing to export"):
        export_set(_data(cache), tmp_path / "out", stage="train", epoch=0, origin={})


def test_an_index_that_is_not_what_the_files_give_is_found(tmp_path: Path) -> None:
    data = _data(str(tmp_path), root=str(_write_set(tmp_path / "set")))
    assert data.verify_sources() == []
    counts = {"volumes": 4, "labelled": 0, "points": data.describe()["points"]}
    assert data.check_sources() == counts
    volume = np.load(tmp_path / "set" / "v3.npy")
    np.save(tmp_path / "set" / "v3.npy", np.where(volume > 150, volume + 1, volume))
    assert [line.rsplit("/", 1)[1] for line in data.verify_sources()] == [
        "v3.npy: its index differs from the file"
    ]


def test_the_resolution_is_that_of_the_samples(cache: str) -> None:
    data = _data(
        cache, resolution=Resolution(shape=16), sample="windows", windows=WindowSpec(size=16)
    )
    batch = _first(data, "val", 1)
    assert batch["shape"].tolist() == [[16, 16, 16]]
    assert batch["spacing"].tolist() == [[24 / 16, 32 / 16, 40 / 16]]
    assert len(data.dataset("val")) == 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sample": "voxels"}, "sample='voxels' is unknown: choose one of points, windows"),
        ({"window": "skin"}, "window='skin'"),
        ({"occupied_hu": [1]}, r"occupied_hu=\[1\] is not allowed: give \[low, high\]"),
        ({"max_points": 0}, "max_points=0 is not usable: choose a whole number of at least 1"),
        ({"min_points": -1}, "min_points=-1 is not usable: choose a whole number of at least 0"),
        ({"too_few": "drop"}, "too_few='drop' is unknown: choose one of error, skip"),
        ({"sdf": -1}, "sdf=-1 is not allowed: give the largest distance in mm, exact, or null"),
        ({"processes": 0}, "processes=0 is not usable: choose a whole number of at least 1"),
        ({"batch_format": ["coords", "boxes"]}, "unknown keys"),
    ],
)
def test_what_is_not_allowed_is_refused(cache: str, options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        _data(cache, setup=False, **options)


@pytest.mark.data
@pytest.mark.parametrize("sample", ["points", "windows"])
def test_real_volumes_of_all_formats(shared_data: Path, tmp_path: Path, sample: str) -> None:
    spec = WindowSpec(size=16, min_points=100)
    data = _data(
        str(tmp_path),
        root=str(shared_data / "ct"),
        sample=sample,
        windows=spec,
        occupied_hu=(200, None),
    )
    assert data.describe()["volumes"] == 7
    count = 7 if sample == "points" else len(data.dataset("predict"))  # type: ignore[arg-type]
    batch = _first(data, "predict", count)
    assert sorted(batch["spacing"].unique(dim=0).flatten().tolist())[-1] <= 10
    assert batch["volume_index"].unique().tolist() == list(range(7))
    labels = batch["label" if sample == "points" else "mask"]
    assert labels.min() == -1
    assert labels.max() > 1


@pytest.mark.parametrize("options", [{}, {"sdf": 4.0}])
def test_many_volumes_need_few_file_descriptors(
    cache: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("files.sparse_store", "datasets.computed"):
        monkeypatch.setattr(f"lit_data.wings.volumes.{module}.MAX_OPEN", 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    data = _data(cache, **options)
    assert _first(data, "predict", count=10)["index"].tolist() == list(range(10))
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 10
