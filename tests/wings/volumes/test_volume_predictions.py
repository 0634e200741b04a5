"""What ``predict`` and the pictures say about volumes."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor

from lit_data.core.errors import ConfigError
from lit_data.core.types import Array, Batch
from lit_data.loading import LoaderOptions
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.volumes.datasets.windows import WindowSpec
from lit_data.wings.volumes.files.sources import open_volume
from lit_data.wings.volumes.predictions import (
    VolumeWriter,
    compare_voxels,
    draw_reconstructions,
    draw_volume_samples,
)
from lit_data.wings.volumes.views import VolumeShown, project
from tests.helpers.reading import opened
from tests.predict.running import predict, read_rows

LOADER = LoaderOptions(batch_size=4, worker_kind="inline")
Answer = Any


class Oracle(LightningModule):
    """Finds the points of the batch with a score of 0.9, the first one with 0.6; or says what it is told to say."""

    def __init__(self, says: Answer = None) -> None:
        super().__init__()
        self.says = says

    def predict_step(self, batch: Batch, batch_idx: int) -> Answer:
        if self.says is not None:
            return self.says
        counts = batch["coords_count"].tolist()
        parts = zip(batch["coords"].split(counts), batch["feats"].split(counts), strict=True)
        return [_answer(coords[:, 1:], feats[:, 0]) for coords, feats in parts]


def _answer(coords: Tensor, values: Tensor) -> dict[str, Tensor]:
    scores = torch.full((len(coords),), 0.9)
    scores[:1] = 0.6
    return {"coords": coords, "values": values, "scores": scores}


def _open(root: Path | None, cache: Path, **options: Any) -> CTDataModule:
    splits = {} if root is None else {"splits": {"train": 0.4, "val": 0.3, "test": 0.3}}
    data = CTDataModule(
        str(root) if root else None,
        cache_dir=str(cache),
        samples={"count": 3, "shape": (20, 24, 28)},
        occupied_hu=(150, None),
        loader=LOADER,
        **splits,
        **options,
    )
    return opened(data, "predict")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> CTDataModule:
    return _open(None, tmp_path_factory.mktemp("cache"))


def _predict(
    data: CTDataModule, folder: Path, says: Answer = None, **options: Any
) -> dict[str, Any]:
    model = says if isinstance(says, Oracle) else Oracle(says)
    return predict(data, model, folder, **options).metrics


def _read(path: Path) -> Array:
    with open_volume(path) as volume:
        return volume.read(0, volume.shape[0])


def _expected(data: CTDataModule, number: int) -> Array:
    """Occupied voxels within the window, and its lower edge elsewhere."""
    sparse = data.volumes.bank[number]
    dense = np.full(sparse.shape, -500, sparse.values.dtype)
    dense.reshape(-1)[sparse.positions] = sparse.values
    return dense.clip(-500, 1300)


def _batch(data: CTDataModule, count: int) -> Batch:
    return data.transform(data.make_loader("predict").read(np.arange(count), 0), "predict")


@pytest.fixture(scope="module")
def predicted(
    data: CTDataModule, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Folder and metrics of perfect predictions."""
    folder = tmp_path_factory.mktemp("predicted")
    return folder, _predict(data, folder)


def test_perfect_predictions_write_the_volumes_again(
    data: CTDataModule, predicted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, summary = predicted
    counts = [len(data.volumes.bank[number]) for number in range(3)]
    assert summary["predict/volumes"] == 3
    assert summary["predict/voxels"] == sum(counts)
    assert summary["predict/iou"] == summary["predict/f1"] == 1
    assert summary["predict/value_mae"] == 0
    rows = read_rows(folder / "volumes.csv")
    assert [row["volume"] for row in rows] == [source.name for source in data.volumes.sources]
    for number, row in enumerate(rows):
        assert (int(row["occupied"]), int(row["found"])) == (counts[number], counts[number])
        written = _read(folder / row["file"])
        assert written.dtype == np.int16
        assert_array_equal(written, _expected(data, number))
    assert cv2.imread(str(folder / "predictions.png")).shape[1] > 500
    surer = _predict(data, tmp_path, threshold=0.7)
    assert surer["predict/voxels"] == sum(counts) - 3
    assert 0.9 < surer["predict/iou"] < 1


def test_nifti_volumes_keep_their_place_in_the_patient(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    root = tmp_path / "set"
    (root / "a").mkdir(parents=True)
    affine = np.array([[-1.5, 0, 0, 20], [0, 2, 0, -7], [0, 0, 3, 4], [0, 0, 0, 1.0]])
    rng = np.random.default_rng(0)
    for number in range(3):
        stored = rng.integers(-1000, 400, (10, 9, 8), dtype=np.int16)
        nibabel.save(nibabel.Nifti1Image(stored, affine), root / "a" / f"scan.{number}.nii.gz")
    data = _open(root, tmp_path / "cache")
    _predict(data, tmp_path)
    for number in range(3):
        image = nibabel.load(tmp_path / "volumes" / "a" / f"scan.{number}.nii.gz")
        assert_allclose(image.affine, affine)
        assert_allclose(image.header.get_zooms(), (1.5, 2, 3))
        assert_array_equal(np.asarray(image.dataobj).T, _expected(data, number))


@pytest.mark.parametrize(
    "says", [torch.zeros(2), [{"coords": torch.zeros(0, 3)}]], ids=["tensor", "no values"]
)
def test_other_answers_are_refused(says: Answer, data: CTDataModule, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of Oracle must return a list with a dict for each vol"):
        _predict(data, tmp_path, says)
    path = tmp_path / "a.png"
    assert not draw_reconstructions(data, Oracle(says), _batch(data, 2), path, "title", count=2)
    assert not path.exists()


def test_nothing_found_is_written_as_nothing(data: CTDataModule, tmp_path: Path) -> None:
    nothing = _answer(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0))

    class Blind(Oracle):
        def predict_step(self, batch: Batch, batch_idx: int) -> Answer:
            return [nothing] * len(batch["shape"])

    assert _predict(data, tmp_path, Blind())["predict/iou"] == 0
    assert (_read(tmp_path / read_rows(tmp_path / "volumes.csv")[0]["file"]) == -500).all()


def test_windows_cannot_be_predicted(tmp_path: Path) -> None:
    data = _open(None, tmp_path, sample="windows", windows=WindowSpec(size=12))
    with pytest.raises(ConfigError, match=r"whole volumes: set data.sample=points, not windows"):
        VolumeWriter(data, tmp_path, threshold=0.5)
    rows = draw_volume_samples(data, _batch(data, 3), tmp_path / "windows.png", "title", count=2)
    assert len(rows) == 2
    assert cv2.imread(str(tmp_path / "windows.png")).shape[1] > 500


def test_pictures_show_the_fullest_volumes(data: CTDataModule, tmp_path: Path) -> None:
    batch = _batch(data, 3)
    rows = draw_volume_samples(data, batch, tmp_path / "samples.png", "title", count=2)
    assert rows == torch.argsort(batch["coords_count"], descending=True, stable=True)[:2].tolist()
    model = Oracle().train()
    assert draw_reconstructions(data, model, batch, tmp_path / "found.png", "title", count=2)
    assert model.training
    for name in ("samples.png", "found.png"):
        assert cv2.imread(str(tmp_path / name)).shape[1] > 500


def test_scores_of_a_subset_count_for_the_whole() -> None:
    coords = np.stack(np.unravel_index(np.arange(10), (4, 4, 4)), axis=1)
    true = VolumeShown("a", (4, 4, 4), (1, 1, 1), coords[:6], np.full(6, 0.5, np.float32))
    found = true._replace(coords=coords[2:], values=np.full(8, 0.6, np.float32))
    scores = compare_voxels(true, found, total=12)
    assert scores["both"] == 8
    assert scores["iou"] == pytest.approx(8 / 12, abs=1e-6)
    assert scores["f1"] == pytest.approx(16 / 20, abs=1e-6)
    assert scores["value_mae"] == pytest.approx(0.1, abs=1e-6)
    assert scores["psnr"] == pytest.approx(20, abs=1e-3)


def test_a_view_shows_what_is_in_front() -> None:
    block = np.argwhere(np.ones((8, 8, 8), bool))
    volume = VolumeShown("a", (8, 8, 8), (1.0, 1.0, 1.0), block, np.ones(512, np.float32))
    front = project(volume, 0)
    seen = np.isfinite(front)
    assert front.shape == seen.shape
    assert 0.2 < seen.mean() < 0.95
    assert 0 <= np.nanmin(front) < np.nanmax(front) <= 1
    inner = volume._replace(coords=block[(abs(block - 3.5) < 2).all(1)])
    assert np.isfinite(project(inner, 0)).sum() < seen.sum()
    left = project(volume._replace(coords=np.array([[4, 4, 0]])), 0)
    assert np.argwhere(np.isfinite(left))[:, 1].max() < front.shape[1] / 2
    assert not np.isfinite(project(volume._replace(coords=np.zeros((0, 3), int)), 30)).any()


def test_volumes_that_are_done_are_kept(
    data: CTDataModule, predicted: tuple[Path, dict[str, Any]]
) -> None:
    folder, summary = predicted
    (folder / read_rows(folder / "volumes.csv")[1]["file"]).unlink()
    again = _predict(data, folder, resume=True)
    assert again == summary | {"predict/images_kept": 2}
