"""`InspectionDataModule`: samples, masks that some images lack, and the share of patches with a defect."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.datamodules import InspectionDataModule
from lit_data.errors import ConfigError, DataError
from lit_data.io.images.masks import MaskOptions
from lit_data.loading import LoaderOptions

SIZE = (96, 160)


def _write_set(folder: Path, count: int = 20, *, every: int = 2, grey: bool = False) -> Path:
    """Images of noise beside masks of the images whose number `every` divides: a square at the top left."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(count):
        image = rng.integers(0, 256, SIZE, dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number:02}.png"), image)
        if number % every == 0:
            mask = np.zeros(SIZE, np.uint8)
            mask[4:14, 4:14] = 255
            cv2.imwrite(str(folder / f"{number:02}_mask.png"), cv2.GaussianBlur(mask, (3, 3), 0) if grey else mask)
    return folder


def _data(tmp_path: Path, **options: Any) -> InspectionDataModule:
    loader = LoaderOptions(batch_size=8, num_workers=0, worker_kind="inline")
    settings = {"cache_dir": str(tmp_path / "cache"), "patch_px": 32, "loader": loader, **options}
    data = InspectionDataModule(str(tmp_path / "set"), **settings)
    data.prepare_data()
    data.setup("fit")
    return data


def _read(data: InspectionDataModule, stage: Any = "train", epoch: int = 0) -> dict[str, torch.Tensor]:
    loader = data.make_loader(stage)
    loader.set_epoch(epoch)
    batches = [data.transform(dict(batch), stage) for batch in loader]
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def test_a_batch_holds_images_masks_and_places(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    data = _data(tmp_path)
    found = _read(data)
    assert {len(data.split_images[split]) for split in ("val", "test")} == {3}
    assert found["image"].shape == (14 * 15, 3, 32, 32)
    assert (found["image"].min(), found["image"].max()) == (0, 1)
    assert found["mask"].unique().tolist() == [0, 1]
    with_defect = found["mask"].flatten(1).any(1)
    assert int(with_defect.sum()) == 7
    assert found["position"][with_defect].unique().tolist() == [0]
    row = int(with_defect.nonzero()[0])
    image = data.bank[int(found["image_index"][row])][:, :32, :32]
    assert torch.equal((found["image"][row] * 255).round().byte(), torch.from_numpy(image.copy()))


def test_the_share_with_a_defect_is_kept_and_evaluation_is_left_alone(tmp_path: Path) -> None:
    _write_set(tmp_path / "set", 40, every=4)
    data = _data(tmp_path, positives=0.5)
    shares = [float(_read(data, epoch=epoch)["mask"].flatten(1).any(1).float().mean()) for epoch in range(3)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.04)
    assert len(set(shares)) > 1
    assert len(_read(data, "val")["index"].unique()) == len(data.dataset("val"))


def test_a_sample_depends_on_seed_epoch_and_number_alone(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    dataset = _data(tmp_path, positives=0.5).dataset("train")
    indices = np.arange(len(dataset))
    chosen = dataset.choose(indices, 3)
    assert np.array_equal(np.concatenate([dataset.choose(part, 3) for part in np.array_split(indices, 7)]), chosen)
    assert np.array_equal(pickle.loads(pickle.dumps(dataset)).choose(indices, 3), chosen)
    assert not np.array_equal(dataset.choose(indices, 4), chosen)
    rows = {name: np.zeros((4, *spec.shape), spec.dtype) for name, spec in dataset.fields.items()}
    dataset.write_into(rows, np.arange(4), 3)
    assert rows["draw"].tolist() == [0, 1, 2, 3]


def test_bad_masks_take_their_images_with_them_where_they_are_skipped(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set")
    (folder / "02_mask.png").write_bytes(b"no image")
    (folder / "05.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1 of 20 images are bad:\n.*05\.png"):
        _data(tmp_path)
    data = _data(tmp_path, on_bad="skip")
    used = {Path(data.bank.name(n)).name for numbers in data.split_images.values() for n in numbers.tolist()}
    assert used == {f"{number:02}.png" for number in range(20)} - {"02.png", "05.png"}
    with pytest.raises(DataError, match=r"2 of 30 images and masks are bad"):
        data.check_sources()


def test_masks_with_grey_edges_name_the_option_that_reads_them(tmp_path: Path) -> None:
    _write_set(tmp_path / "set", grey=True)
    with pytest.raises(DataError, match=r"mask_read\.threshold"):
        _data(tmp_path)
    assert _read(_data(tmp_path, mask_read=MaskOptions(threshold=128)))["mask"].unique().tolist() == [0, 1]


def test_equal_files_never_straddle_a_split(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set", every=1)
    for number in range(10):
        shutil.copy(folder / f"{number:02}.png", folder / f"{number + 30}.png")
        shutil.copy(folder / f"{number:02}_mask.png", folder / f"{number + 30}_mask.png")
    data = _data(tmp_path)
    for numbers in data.split_images.values():
        names = {Path(data.bank.name(n)).stem for n in numbers.tolist()}
        assert all((f"{n:02}" in names) == (f"{n + 30}" in names) for n in range(10))


def test_masks_of_another_size_are_listed(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set")
    cv2.imwrite(str(folder / "00_mask.png"), np.zeros((10, 10), np.uint8))
    data = _data(tmp_path)
    stage: Any = next(split for split, numbers in data.split_images.items() if 0 in numbers)
    with pytest.raises(DataError, match=r"00_mask\.png: 10 x 10, .*00\.png: 96 x 160"):
        data.dataset(stage)


def test_without_masks_prediction_works_and_training_says_what_is_missing(tmp_path: Path) -> None:
    _write_set(tmp_path / "set", every=100)
    (tmp_path / "set" / "00_mask.png").unlink()
    data = _data(tmp_path)
    assert "mask" not in _read(data, "predict")
    with pytest.raises(ConfigError, match=r"no masks were found.*data\.masks"):
        data.dataset("train")


def test_no_patch_with_a_defect_is_an_error_only_where_some_are_wanted(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set", every=100)
    cv2.imwrite(str(folder / "00_mask.png"), np.zeros(SIZE, np.uint8))
    assert len(_data(tmp_path).dataset("train")) > 0
    with pytest.raises(ConfigError, match=r"data.positives=0.5, but none of the \d+ training patches shows a defect"):
        _data(tmp_path, positives=0.5).dataset("train")


@pytest.mark.parametrize("positives", [0, 1.5, -1])
def test_a_share_is_above_zero_and_up_to_one(positives: float) -> None:
    with pytest.raises(ConfigError, match=r"positives=.* is a share"):
        InspectionDataModule(positives=positives)


def test_masks_are_drawn_once_from_annotations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = _write_set(tmp_path / "set", 12, every=100)
    (folder / "00_mask.png").unlink()
    runs = " ".join(f"{1 + column * SIZE[0]} 10" for column in range(10))
    rows = [f"{number:02}.png,1,{runs}" for number in range(6)]
    (folder / "train.csv").write_text("\n".join(["ImageId,ClassId,EncodedPixels", *rows]))
    data = _data(tmp_path)
    assert data.describe()["layout"] == "csv"
    assert int((data._mask_of >= 0).sum()) == 6
    found = _read(data)
    marked = found["mask"].flatten(1).any(1)
    assert found["position"][marked].unique().tolist() == [0]
    drawn = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "annotations").rglob("*.png")}
    _data(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in drawn} == drawn
    assert len(drawn) == 6
