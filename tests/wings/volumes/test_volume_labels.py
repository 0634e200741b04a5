"""Labels of volumes: how windows are joined, what is written, and which inputs are bad."""

import gzip
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions
from lit_data.testing import QUIET
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.volumes.datasets.windows import WindowSpec
from lit_data.wings.volumes.files.resampling import Resolution
from lit_data.wings.volumes.joined_windows import WindowBlend
from lit_data.wings.volumes.label_predictions import draw_label_samples, draw_labels, load_slices
from lit_data.wings.volumes.segmentation import VolumeSegmentationModule
from tests.helpers.reading import first, opened
from tests.predict.running import predict, read_rows

SHAPE = (13, 24, 20)
AFFINE = np.array([[-0.8, 0, 0, 5], [0, 0, 2.0, -3], [0, 0.7, 0, 9], [0, 0, 0, 1]])


class ThresholdNet(torch.nn.Module):
    """Says bone above 300 HU and soft tissue above 0, which is all there is to know."""

    def forward(self, images: Tensor) -> Tensor:
        hu = images[:, 0] * 1000 - 500
        labels = 2 * (hu > 0).long() - (hu > 300).long()
        return torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).float()


class Threshold(LightningModule):
    surface_mm = 0.5

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return ThresholdNet()(batch["image"])


def _save(folder: Path, name: str, values: Any, affine: Any = AFFINE) -> None:
    nibabel = pytest.importorskip("nibabel")
    folder.mkdir(exist_ok=True, parents=True)
    nibabel.save(nibabel.Nifti1Image(values.T, affine), folder / f"{name}.nii.gz")


def _volume() -> tuple[Any, Any]:
    """Blobs in Hounsfield units, and their labels."""
    rng = np.random.default_rng(1)
    values = rng.normal(0, 900, SHAPE)
    for axis in range(3):
        values += np.roll(values, 1, axis)
    values = values.clip(-1000, 1000).astype(np.int16)
    labels = (2 * (values > 0) - (values > 300)).astype(np.uint8)
    return values, labels


def _build(root: Path, cache: Path, **options: Any) -> CTDataModule:
    given = {
        "sample": "windows",
        "window": (0, 1000),
        "windows": WindowSpec(size=(4, 8, 24), stride=(4, 8, 24)),
        "classes": ["bone", "soft"],
        "splits": {"train": 1.0},
        "processes": 1,
    } | options
    loader = LoaderOptions(batch_size=3, worker_kind="inline")
    return CTDataModule(str(root), cache_dir=str(cache), loader=loader, **given)


def _data(root: Path, cache: Path, **options: Any) -> CTDataModule:
    return opened(_build(root, cache, **options))


def _check_slices(path: Path, values: Any, predicted: Any, true: Any) -> None:
    slices = load_slices(path)
    assert slices.spacing_mm == pytest.approx((2.0, 0.7, 0.8))
    is_labelled = true > 0
    for axis, plane in enumerate(slices.planes):
        position = slices.positions[axis]
        counts = np.moveaxis(is_labelled, axis, 0).sum((1, 2))
        assert counts[position] == counts.max()
        image = (np.take(values, position, axis) + 500) / np.float32(1000)
        assert_allclose(plane[0], image.clip(0, 1), atol=1e-6)
        assert_array_equal(plane[1], np.take(predicted, position, axis))
        assert_array_equal(plane[2], np.take(true, position, axis))


def test_labels_are_joined_from_windows_and_written_on_the_grid_of_the_input(
    tmp_path: Path,
) -> None:
    nibabel = pytest.importorskip("nibabel")
    values, labels = _volume()
    _save(tmp_path / "set", "a", values)
    wrong = labels.copy()
    wrong[0, 0, :5] = 0
    _save(tmp_path / "set", "a_labels", wrong)
    np.save(tmp_path / "set" / "b.npy", values)
    data = _data(tmp_path / "set", tmp_path / "cache")
    out = tmp_path / "out"
    metrics = predict(data, Threshold(), out).metrics
    image = nibabel.load(out / "labels" / "a.nii.gz")
    assert_array_equal(np.asarray(image.dataobj).T, labels)
    assert_allclose(image.affine, AFFINE, atol=1e-6)
    assert image.get_data_dtype() == np.uint8
    assert_array_equal(np.load(out / "labels" / "b.npy"), labels)
    rows = read_rows(out / "volumes.csv")
    assert [(row["volume"], row["class"]) for row in rows] == [
        ("a", "bone"),
        ("a", "soft"),
        ("b", "bone"),
        ("b", "soft"),
    ]
    for row, label in zip(rows[:2], (1, 2), strict=True):
        mine, true = int((labels == label).sum()), int((wrong == label).sum())
        assert int(row["voxels"]) == mine
        assert float(row["volume_ml"]) == pytest.approx(mine * 0.8 * 2.0 * 0.7 / 1000, abs=1e-4)
        assert float(row["true_ml"]) == pytest.approx(true * 0.8 * 2.0 * 0.7 / 1000, abs=1e-4)
        assert float(row["dice"]) == pytest.approx(2 * true / (mine + true), abs=1e-6)
        assert 0.9 < float(row["surface_dice"]) <= 1
        assert float(row["hausdorff_95_mm"]) == 0
    assert rows[2]["dice"] == rows[2]["true_ml"] == ""
    assert metrics["predict/volumes"] == 2
    assert metrics["predict/mean_dice"] == pytest.approx(
        np.mean([float(row["dice"]) for row in rows[:2]]), abs=1e-6
    )
    _check_slices(out / ".shown" / "a.npz", values, labels, wrong)
    assert len(load_slices(out / ".shown" / "b.npz").planes[0]) == 2
    picture = cv2.imread(str(out / "predictions.png"))
    assert picture.shape[1] > 1000
    (out / "predictions.png").unlink()
    again = predict(data, Threshold(), out, resume=True).metrics  # nothing is left to predict
    assert again == metrics | {"predict/images_kept": 2}
    assert_array_equal(cv2.imread(str(out / "predictions.png")), picture)


def test_a_test_scores_surfaces_and_volumes_as_predict_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("edt")
    values, labels = _volume()
    _save(tmp_path / "set", "a", values)
    np.save(tmp_path / "set" / "b.npy", values[:7])
    shifted = np.roll(labels, 1, axis=1)
    _save(tmp_path / "set", "a_labels", shifted)
    np.save(tmp_path / "set" / "b_labels.npy", labels[:7])
    data = _data(tmp_path / "set", tmp_path / "cache")
    metrics = predict(data, Threshold(), tmp_path / "out").metrics
    rows = read_rows(tmp_path / "out" / "volumes.csv")
    module = VolumeSegmentationModule(ThresholdNet(), classes=["bone", "soft"], surface_mm=0.5)

    def test_once() -> dict[str, float]:
        data = _build(tmp_path / "set", tmp_path / "cache", splits={"test": 1.0})
        trainer = Trainer(**QUIET, default_root_dir=tmp_path)
        return dict(trainer.test(module, datamodule=data, verbose=False)[0])

    scores = test_once()
    for score in ("surface_dice", "hausdorff_95_mm"):
        for name in ("bone", "soft"):
            known = metrics[f"predict/{score}_{name}"]
            assert scores[f"test/{score}_{name}"] == pytest.approx(known, abs=1e-4)
        assert scores[f"test/mean_{score}"] == pytest.approx(
            metrics[f"predict/mean_{score}"], abs=1e-4
        )
    assert 0.3 < scores["test/surface_dice_bone"] < 1
    for column in ("volume_ml", "true_ml"):
        known = np.mean([float(row[column]) for row in rows if row["class"] == "soft"])
        assert scores[f"test/{column}_soft"] == pytest.approx(known, abs=1e-4)
    assert test_once() == scores
    monkeypatch.setattr("lit_data.wings.volumes.segmentation.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert {name for name in test_once() if "surface" in name or "ml" in name} == set()
    assert "surfaces and sizes are not scored: pip install edt" in caplog.text
    monkeypatch.setattr(VolumeSegmentationModule, "trainer", SimpleNamespace(world_size=2))
    module.on_test_start()
    assert "each of 2 processes tests some windows of each volume" in caplog.text


def test_labels_of_a_resampled_volume_lie_on_the_grid_of_the_file(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    values = np.full(SHAPE, -500, np.int16)
    values[4:8, 8:16, 5:15] = 700
    _save(tmp_path / "set", "a", values, np.diag([1.0, 1.0, 2.0, 1.0]))
    data = _data(tmp_path / "set", tmp_path / "cache", resolution=Resolution(spacing_mm=1.0))
    assert data.volumes.bank.shapes[0] == (26, 24, 20)
    predict(data, Threshold(), tmp_path / "out")
    image = nibabel.load(tmp_path / "out" / "labels" / "a.nii.gz")
    assert_array_equal(np.asarray(image.dataobj).T == 1, values > 0)
    assert_array_equal(image.affine, np.diag([1.0, 1.0, 2.0, 1.0]))
    padded = Resolution(shape=16, fit="pad_crop")
    data = _data(tmp_path / "set", tmp_path / "other", resolution=padded)
    with pytest.raises(ConfigError, match="pad_crop: remove these"):
        predict(data, Threshold(), tmp_path / "out2")


def test_windows_that_overlap_are_weighed_by_their_middle() -> None:
    blend = WindowBlend((6, 1, 1), (4, 1, 1), 2)
    sure, unsure = np.array([0.0, 1.0]), np.array([0.6, 0.4])
    blend.add(np.broadcast_to(sure[:, None, None, None], (2, 4, 1, 1)), (0, 0, 0))
    blend.add(np.broadcast_to(unsure[:, None, None, None], (2, 4, 1, 1)), (2, 0, 0))
    # Slice 3 is the edge of the first window, and in the middle of the second one.
    assert blend.finish().ravel().tolist() == [1, 1, 1, 0, 0, 0]


def _save_bad_volumes(root: Path, values: Any, labels: Any) -> None:
    """Save one volume of each fault, a good one, and two bad names."""
    for name in ("affine", "cut", "good", "lost", "negative", "shape", "unknown"):
        _save(root, name, values)
    _save(root, "good_labels", labels)
    moved = AFFINE.copy()
    moved[0, 3] += 2
    _save(root, "affine_labels", labels, moved)
    _save(root, "shape_labels", labels[1:])
    _save(root, "unknown_labels", labels + 5)
    _save(root, "spacing", values)
    _save(root, "lost_labels", labels)
    _save(root, "negative_labels", -labels.astype(np.int16))
    _save(root, "orphan_seg", labels)
    _save(root, "four", np.stack((values, values)))
    cut = root / "cut.nii.gz"
    cut.write_bytes(cut.read_bytes()[:-2000])
    np.save(root.parent / "elsewhere.npy", values)
    (root / "link.npy").symlink_to(root.parent / "elsewhere.npy")
    for name, begin in (("spacing", 80), ("lost_labels", 280)):  # pixdim[1], srow_x[0]
        path = root / f"{name}.nii.gz"
        header = bytearray(gzip.decompress(path.read_bytes()))
        header[begin : begin + 4] = np.float32(np.nan).tobytes()
        path.write_bytes(gzip.compress(bytes(header)))


def test_all_bad_volumes_are_listed_at_once(tmp_path: Path) -> None:
    values, labels = _volume()
    root = tmp_path / "set"
    _save_bad_volumes(root, values, labels)
    with pytest.raises(DataError) as caught:
        _data(root, tmp_path / "cache")
    faults = {Path(name).name.split(".")[0]: fault for name, fault in caught.value.problems}
    with pytest.raises(DataError, match="2 names and 8 of 9 volumes are bad") as checked:
        _build(root, tmp_path / "cache").source.check()
    assert sorted(checked.value.problems) == sorted(caught.value.problems)
    names = {"affine", "cut", "four", "lost", "negative", "shape", "spacing", "unknown"}
    assert faults.keys() == names | {"orphan_seg", "link"}
    assert "end-of-stream" in faults["cut"]
    assert "a volume has three axes" in faults["four"]
    assert "differs from that of its volume" in faults["lost"]
    assert "labels are whole numbers of at least 0" in faults["negative"]
    assert faults["orphan_seg"].startswith("labels without a volume")
    assert faults["link"].startswith("leads out of the data folder")
    assert "differs from that of its volume" in faults["affine"]
    assert "labels of shape (12, 24, 20)" in faults["shape"]
    assert "voxel spacing" in faults["spacing"]
    assert "unknown labels 5, 6, 7; data.classes names 2" in faults["unknown"]
    with pytest.raises(DataError, match="2 bad names under"):
        _data(root, tmp_path / "cache", on_bad="skip")
    for name in ("orphan_seg.nii.gz", "link.npy"):
        (root / name).unlink()
    with pytest.raises(DataError, match="8 of 9 volumes are bad"):
        _data(root, tmp_path / "cache")
    data = _data(root, tmp_path / "cache", on_bad="skip")
    assert [Path(source.path).name for source in data.volumes.sources] == ["good.nii.gz"]
    assert data.describe()["refused"] == 8


def test_volumes_without_labels_are_predicted_and_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values, labels = _volume()
    for name in ("a", "b"):
        _save(tmp_path / "set", name, values)
    with pytest.raises(ConfigError, match="none of 2 volumes has labels"):
        _data(tmp_path / "set", tmp_path / "cache").dataset("train")
    _save(tmp_path / "set", "b_seg", labels)
    data = _data(tmp_path / "set", tmp_path / "cache")
    assert first(data, "train", 3)["volume_index"].tolist() == [1, 1, 1]
    assert "a.nii.gz: no labels next to it\n1 of 2 volumes has no labels" in caplog.text
    assert set(first(data, "predict", 12)["volume_index"].tolist()) == {0}
    assert draw_labels(data, Threshold(), first(data, "train", 3), tmp_path / "a.png", "t", count=2)
    batch = first(data, "train", 3)
    batch["mask"][0] = 0
    batch["mask"][2] = 1
    rows = draw_label_samples(data, batch, tmp_path / "b.png", "samples", count=2)
    assert rows == [2, 1]
    tints = cv2.imread(str(tmp_path / "b.png")).astype(int)
    assert (tints[..., 2] - tints[..., 0] > 60).sum() > 1_000  # labels are red
    assert cv2.imread(str(tmp_path / "a.png")) is not None


def test_volumes_without_spacing_and_without_hounsfield_units_are_named(tmp_path: Path) -> None:
    values, labels = _volume()
    root = tmp_path / "set"
    _save(root, "states_it", values)
    np.save(root / "array.npy", (values.astype(np.int32) + 1024).astype(np.uint16))
    np.savez(root / "archive.npz", volume=values, spacing=[2.5, 0.8, 0.8])
    np.savez(root / "named.npz", volume=values, spacing_mm=[2.5, 0.8, 0.8])
    _save(root, "states_it_seg", labels)
    lines = _data(root, tmp_path / "cache").source.leftovers.describe()
    spaceless, full = (line for line in lines if "labels" not in line)
    assert spaceless.startswith(
        "2 volumes do not state the spacing of their voxels: archive, array;"
    )
    assert full.startswith("1 volume is foreground everywhere: array; air has -1000 HU")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": ["a", "a"]}, "each once"),
        ({"classes": "bone"}, "a list of names"),
        ({"sample": "points"}, "set data.sample=windows"),
        ({"sdf": 3.0}, "data.sdf=null"),
    ],
)
def test_wrong_options_are_refused(options: Any, words: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", _volume()[0])
    with pytest.raises(ConfigError, match=words):
        _data(tmp_path, tmp_path / "cache", **options)
