"""`InspectionDataModule`: samples, masks that some images lack, and the share of patches with a defect."""

import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data.core.errors import ConfigError, DataError, StoreError
from lit_data.core.files import write_table
from lit_data.core.types import Array, Ints
from lit_data.datamodules import InspectionDataModule
from lit_data.datasets.balanced_patches import SamplingOptions
from lit_data.datasets.patches import PatchDataset
from lit_data.images.masks import MaskOptions
from lit_data.images.read_options import ReadOptions
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from tests.helpers.reading import opened, read_all

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
            cv2.imwrite(
                str(folder / f"{number:02}_mask.png"),
                cv2.GaussianBlur(mask, (3, 3), 0) if grey else mask,
            )
    return folder


def _data(tmp_path: Path, **options: Any) -> InspectionDataModule:
    loader = LoaderOptions(batch_size=8, num_workers=0, worker_kind="inline")
    settings = {"cache_dir": str(tmp_path / "cache"), "patch_px": 32, "loader": loader, **options}
    return opened(InspectionDataModule(str(tmp_path / "set"), **settings))


def _names(data: InspectionDataModule, numbers: Iterable[int]) -> list[str]:
    return [Path(data.bank.name(number)).name for number in numbers]


def _used(data: InspectionDataModule) -> set[str]:
    """Names of the images of all splits."""
    return {name for part in data.split_images.values() for name in _names(data, part.tolist())}


def test_excluded_images_go_with_their_masks_and_have_a_store_of_their_own(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set", 6)
    whole, data, none = (
        _data(tmp_path, splits={"train": 1.0}, **options)
        for options in ({}, {"exclude": ["02.png"]}, {"exclude": []})
    )
    assert _names(data, range(5)) == [f"0{n}.png" for n in (0, 1, 3, 4, 5)]
    masks = [path and path.name for path in data.source.image_set.masks]
    assert masks == ["00_mask.png", None, None, "04_mask.png", None]
    assert data.source.store_folder != whole.source.store_folder == none.source.store_folder
    (folder / "02_mask.png").rename(folder / "07_mask.png")
    with pytest.raises(DataError, match=r"07_mask\.png: a mask without an image"):
        _data(tmp_path, exclude=["02.png"])
    with pytest.raises(ConfigError, match="leaves the folder"):
        InspectionDataModule(str(folder), exclude=["../*"])
    with pytest.raises(ConfigError, match="a set of shards is read as it was written"):
        InspectionDataModule(str(tmp_path / "a.shards"), exclude=["02.png"])


def test_a_batch_holds_images_masks_and_places(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    data = _data(tmp_path)
    found = read_all(data)
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
    data = _data(tmp_path, sampling=SamplingOptions(positives=0.5))
    shares = [
        float(read_all(data, epoch=epoch)["mask"].flatten(1).any(1).float().mean())
        for epoch in range(3)
    ]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.04)
    assert len(set(shares)) > 1
    assert len(read_all(data, "val")["index"].unique()) == len(data.dataset("val"))


def test_a_sample_depends_on_seed_epoch_and_number_alone(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    dataset = _data(tmp_path, sampling=SamplingOptions(positives=0.5)).dataset("train")
    indices = np.arange(len(dataset))
    whole = _write(dataset, indices, 3)
    parts = [
        _write(pickle.loads(pickle.dumps(dataset)), part, 3) for part in np.array_split(indices, 7)
    ]
    for name, rows in whole.items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), rows)
    assert whole["draw"].tolist() == indices.tolist()
    assert not np.array_equal(_write(dataset, indices, 4)["position"], whole["position"])


def _write(dataset: PatchDataset, indices: Ints, epoch: int) -> dict[str, Array]:
    rows = {
        name: np.zeros((len(indices), *spec.shape), spec.dtype)
        for name, spec in dataset.fields.items()
    }
    dataset.write_into(rows, indices, epoch)
    return rows


def test_positives_take_kinds_images_and_objects_alike_often(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    _write_kind(folder / "stain", 4, [(5, 5, 80, 150)])  # half of the image
    _write_kind(folder / "pit", 8, [(10, 10, 2, 2), (60, 120, 3, 3)])
    options = {"splits": {"train": 1.0}, "patch_px": (32, 32)}
    data = _data(tmp_path, sampling=SamplingOptions(positives=1.0), **options)
    dataset = data.dataset("train")
    rows = [_write(dataset, np.arange(len(dataset)), epoch) for epoch in range(20)]
    names = np.array([Path(dataset.bank.name(n)).parent.name for n in range(len(dataset.bank))])
    image = np.concatenate([part["image_index"] for part in rows])
    position = np.concatenate([part["position"] for part in rows])
    mask = np.concatenate([part["mask"] for part in rows])
    assert (mask > 0).any((1, 2, 3)).all()
    is_pit = names[image] == "pit"
    assert is_pit.mean() == pytest.approx(0.5, abs=0.03)
    assert np.bincount(image)[names == "pit"] / is_pit.sum() == pytest.approx(1 / 8, abs=0.02)
    is_first = position[is_pit][:, 1] < 50
    assert is_first.mean() == pytest.approx(0.5, abs=0.03)
    # A pit lies anywhere in its patch, and the patch keeps within the image.
    assert set(position[is_pit][is_first][:, 0].tolist()) == set(range(12))
    assert set(position[is_pit][~is_first][:, 1].tolist()) == set(range(89, 123))
    located = data.grid.locate(np.concatenate([part["index"] for part in rows]))
    assert np.array_equal(located[0], image)
    inner = (np.array(SIZE) // 32 - 1) * 32
    assert (np.abs(np.stack(located[1:], 1) - position)[(position < inner).all(1)] <= 16).all()


def _write_kind(folder: Path, count: int, boxes: list[tuple[int, int, int, int]]) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        image = np.random.default_rng(number).integers(0, 255, SIZE).astype(np.uint8)
        mask = np.zeros(SIZE, np.uint8)
        for top, left, height, width in boxes:
            mask[top : top + height, left : left + width] = 255
        cv2.imwrite(str(folder / f"{folder.name}{number}.png"), image)
        cv2.imwrite(str(folder / f"{folder.name}{number}_mask.png"), mask)


def test_bad_masks_take_their_images_with_them_where_they_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _write_set(tmp_path / "set")
    (folder / "02_mask.png").write_bytes(b"no image")
    (folder / "05.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"05\.png(.|\n)*1 of 20 images is bad"):
        _data(tmp_path)
    data = _data(tmp_path, on_bad="skip")
    assert _used(data) == {f"{number:02}.png" for number in range(20)} - {"02.png", "05.png"}
    data.check_sources()
    assert "2 of 30 files are bad and skipped" in caplog.text


def test_equal_files_never_straddle_a_split(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set", every=1)
    for number in range(10):
        shutil.copy(folder / f"{number:02}.png", folder / f"{number + 30}.png")
        shutil.copy(folder / f"{number:02}_mask.png", folder / f"{number + 30}_mask.png")
    data = _data(tmp_path)
    for numbers in data.split_images.values():
        names = _names(data, numbers.tolist())
        assert all((f"{n:02}.png" in names) == (f"{n + 30}.png" in names) for n in range(10))


def test_without_masks_prediction_works_and_training_says_what_is_missing(tmp_path: Path) -> None:
    _write_set(tmp_path / "set", every=100)
    (tmp_path / "set" / "00_mask.png").unlink()
    data = _data(tmp_path)
    assert "mask" not in read_all(data, "predict")
    with pytest.raises(ConfigError, match=r"no masks were found.*data\.masks"):
        data.dataset("train")


def test_no_patch_with_a_defect_is_an_error_only_where_some_are_wanted(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set", every=100)
    cv2.imwrite(str(folder / "00_mask.png"), np.zeros(SIZE, np.uint8))
    assert len(_data(tmp_path).dataset("train")) > 0
    half = SamplingOptions(positives=0.5)
    refused = r"positives=0.5, but none of the \d+ training patches shows a defect"
    with pytest.raises(ConfigError, match=refused):
        _data(tmp_path, sampling=half).dataset("train")
    with pytest.raises(ConfigError, match=r"data\.train_on=good leaves no defects"):
        _data(tmp_path, sampling=half, train_on="good").dataset("train")


def test_masks_of_what_is_good_are_named_and_turned_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _write_set(tmp_path / "set", 12, every=1)
    for path in folder.glob("*_mask.png"):
        cv2.imwrite(str(path), 255 - cv2.imread(str(path), cv2.IMREAD_GRAYSCALE))
    _data(tmp_path).count_classes()
    cure = "data.mask_read.invert=true"
    assert (
        f"the masks mark 99 % of all pixels as defects: if they mark what is good, invert them with {cure}"
        in caplog.text
    )
    caplog.clear()
    turned = MaskOptions(invert=True)
    assert _data(tmp_path, mask_read=turned).count_classes()[:, 1].tolist() == [100] * 12
    assert "invert them" not in caplog.text


def test_masks_are_drawn_once_from_annotations(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set", 12, every=100)
    (folder / "00_mask.png").unlink()
    runs = " ".join(f"{1 + column * SIZE[0]} 10" for column in range(10))
    rows = [f"{number:02}.png,1,{runs}" for number in range(6)]
    (folder / "train.csv").write_text("\n".join(["ImageId,ClassId,EncodedPixels", *rows]))
    data = _data(tmp_path)
    assert data.describe()["layout"] == "csv"
    assert data.describe()["images_with_masks"] == 6
    found = read_all(data)
    marked = found["mask"].flatten(1).any(1)
    assert found["position"][marked].unique().tolist() == [0]
    drawn = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "cache" / "annotations").rglob("*.png")
    }
    _data(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in drawn} == drawn
    assert len(drawn) == 6


def _write_numbers(folder: Path) -> Path:
    """Images with one class each, 1 at the top left or 2 in the middle, and pixels to be ignored at the bottom."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(20):
        mask = np.zeros(SIZE, np.uint8)
        if number % 2:
            mask[4:14, 4:14] = 1
        elif number % 4 == 0:
            mask[40:50, 70:80] = 2
        mask[90:] = 255
        cv2.imwrite(
            str(folder / "images" / f"{number:02}.png"), rng.integers(0, 256, SIZE, dtype=np.uint8)
        )
        cv2.imwrite(str(folder / "masks" / f"{number:02}.png"), mask)
    return folder


def test_masks_of_class_numbers_need_their_names(tmp_path: Path) -> None:
    _write_numbers(tmp_path / "set")
    cure = r"set data.mask_read.classes=3 and data.mask_read.ignore=255 if these are class"
    with pytest.raises(DataError, match=cure):
        _data(tmp_path)
    with pytest.raises(ConfigError, match=r"data.classes=\[name1,name2\]"):
        _data(tmp_path, mask_read=MaskOptions(classes=3, ignore=255))
    data = _data(tmp_path, classes=["dent", "spot"], mask_read=MaskOptions(ignore=255))
    assert read_all(data)["mask"].unique().tolist() == [0, 1, 2, 255]
    counts = data.count_classes()
    assert counts.sum(0).tolist() == [20 * 90 * 160 - 15 * 100, 10 * 100, 5 * 100]
    in_splits = [data.count_classes(split)[:, 1].sum() for split in ("train", "val", "test")]
    assert sum(in_splits) == 1000


def test_each_class_has_its_share(tmp_path: Path) -> None:
    _write_numbers(tmp_path / "set")
    options = {"classes": ["dent", "spot"], "mask_read": MaskOptions(ignore=255)}
    sampling = SamplingOptions(positives={"dent": 0.2, "spot": 0.6})
    data = _data(tmp_path, sampling=sampling, **options)
    found = [read_all(data, epoch=epoch)["mask"] for epoch in range(3)]
    for number, share in ((1, 0.2), (2, 0.6)):
        shown = torch.cat([(masks == number).flatten(1).any(1) for masks in found])
        assert float(shown.float().mean()) == pytest.approx(share, abs=0.06)
    with pytest.raises(ConfigError, match="'hole' is unknown: choose one of dent, spot"):
        _data(tmp_path, sampling=SamplingOptions(positives={"hole": 0.2}), **options)
    with pytest.raises(ConfigError, match="must add up to at most 1"):
        SamplingOptions(positives={"dent": 0.6, "spot": 0.6})
    for wrong in (0, 1.5, -1):
        with pytest.raises(ConfigError, match=r"positives=.* must be a fraction"):
            SamplingOptions(positives=wrong)


def test_kinds_of_images_can_be_classes(tmp_path: Path) -> None:
    for kind, place in (("dent", 0), ("spot", 40)):
        folder = _write_set(tmp_path / "set" / kind, 10, every=1)
        for path in folder.glob("*_mask.png"):
            mask = np.zeros(SIZE, np.uint8)
            mask[place : place + 9, :9] = 255
            cv2.imwrite(str(path), mask)
    found = read_all(_data(tmp_path, classes=["spot", "dent"]))
    rows = found["mask"][:, 0].flatten(1).amax(1)
    assert found["position"][rows == 2][:, 0].unique().tolist() == [0]
    assert found["position"][rows == 1][:, 0].unique().tolist() == [32]
    data = _data(tmp_path, classes=["spot", "hole"])
    assert len(data.dataset("test")) > 0  # of a model that knows more classes
    line = "1 kind of defects is not in data.classes: dent; what shows it counts as background"
    assert line in data.source.leftovers.describe()
    with pytest.raises(ConfigError, match=r"names \['hole'\], but the images show dent, spot"):
        data.dataset("train")


def test_samples_at_random_places_hold_the_defect_they_were_chosen_for(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    data = _data(tmp_path, sampling=SamplingOptions(positives=1.0, random_places=True))
    first, second = read_all(data, epoch=0), read_all(data, epoch=1)
    assert first["mask"].flatten(1).any(1).all()
    assert len(first["position"].unique()) > 6
    assert not torch.equal(first["position"], second["position"])
    low, high = first["position"].amin(0), first["position"].amax(0)
    assert (low >= 0).all()
    assert (high <= torch.tensor(SIZE) - 32).all()
    row = 3
    y, x = first["position"][row].tolist()
    image = data.bank[int(first["image_index"][row])][:, y : y + 32, x : x + 32]
    assert torch.equal((first["image"][row] * 255).round().byte(), torch.from_numpy(image.copy()))
    assert len(read_all(data, "val")["position"][:, 1].unique()) == 5  # the grid


def test_blank_patches_are_left_out_of_training_unless_they_show_a_defect(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set")
    for number in range(20):
        image = cv2.imread(str(folder / f"{number:02}.png"), cv2.IMREAD_GRAYSCALE)
        image[:, :80] = 90
        cv2.imwrite(str(folder / f"{number:02}.png"), image)
    data = _data(tmp_path, sampling=SamplingOptions(skip_blank=0.01))
    found = read_all(data)
    left = found["position"][:, 1] < 48
    assert found["mask"][left].flatten(1).any(1).all()
    assert int(left.sum()) == 7
    assert len(found["position"]) == 14 * 9 + 7
    assert len(read_all(data, "val")["position"]) == 3 * 15
    half = read_all(_data(tmp_path, sampling=SamplingOptions(skip_blank=0.01, positives=0.5)))
    assert len(half["position"]) == 14 * 9 + 7
    assert half["mask"][half["position"][:, 1] < 48].flatten(1).any(1).all()
    for path in folder.glob("??.png"):
        cv2.imwrite(str(path), np.full(SIZE, 90, np.uint8))
    for path in folder.glob("*_mask.png"):
        cv2.imwrite(str(path), np.zeros(SIZE, np.uint8))
    with pytest.raises(ConfigError, match="skip_blank leaves no patch"):
        _data(tmp_path, sampling=SamplingOptions(skip_blank=0.01)).dataset("train")


def test_images_with_bad_annotations_are_left_out_where_they_are_skipped(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set", 12, every=100)
    (folder / "00_mask.png").unlink()
    rows = [f"{number:02}.png,1,{1 if number else 10**9} 10" for number in range(6)]
    (folder / "train.csv").write_text("\n".join(["ImageId,ClassId,EncodedPixels", *rows]))
    refused = r"row 2: .*00\.png: runs up to(.|\n)*1 annotation is bad"
    for _ in range(2):  # also where the masks are drawn already
        with pytest.raises(DataError, match=refused):
            _data(tmp_path)
    data = _data(tmp_path, on_bad="skip")
    assert _used(data) == {f"{number:02}.png" for number in range(1, 12)}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("instances.json", '{"images": [{"id": 1,', "damaged JSON"),
        ("instances.json", '{"images": 5, "annotations": []}', "'images' must be a list"),
        ("cvat.xml", '<annotations><image name="00.png">', "damaged XML"),
        ("train.csv", "ImageId,EncodedPixels\ngone.png,1 2", "no image is named 'gone.png'"),
        (
            "train.csv",
            "ImageId,EncodedPixels,EncodedPixels\n0.png,1 2,1 2",
            "several columns are named 'EncodedPixels'",
        ),
    ],
)
def test_a_set_whose_only_annotations_are_damaged_is_refused(
    name: str, text: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _write_set(tmp_path / "set", 12, every=100)
    (folder / "00_mask.png").unlink()
    (folder / "00.xml").write_text("<annotation></annotation>")  # of boxes, which is not damaged
    assert _data(tmp_path, synthesis=DefectSpec()).source.image_set.layout == "none"
    (folder / name).write_text(text)
    refused = rf"{name}.*{message}(.|\n)*no annotations can be read:(.|\n)*data.on_bad=skip"
    with pytest.raises(DataError, match=refused):
        _data(tmp_path)
    data = _data(tmp_path, on_bad="skip", synthesis=DefectSpec())
    assert data.source.image_set.layout == "none"
    assert name in caplog.text
    assert "no annotations can be read, so the images" in caplog.text


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_cache_that_is_a_file_is_named(name: str, tmp_path: Path) -> None:
    _write_set(tmp_path / "set", 6)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"paths.cache=.*{name}: .*/file is not a folder"):
        _data(tmp_path, cache_dir=str(tmp_path / name))


def test_a_split_can_be_given_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write_set(tmp_path / "set")
    data = _data(tmp_path, split_seed=3)
    path = tmp_path / "splits.csv"
    rows = data.list_splits()
    masked = [row["image"] for row in rows if row["class"] == "defect"]
    assert 0 < len(masked) < len(rows)
    assert all(data.has_defect(int(Path(name).stem)) for name in masked)
    write_table(path, list(rows[0]), rows)
    again = _data(tmp_path, splits=str(path))
    for split, numbers in data.split_images.items():
        assert np.array_equal(again.split_images[split], numbers)
    write_table(path, list(rows[0]), [*rows, rows[0] | {"image": "removed.png"}])
    assert len(_data(tmp_path, splits=str(path)).list_splits()) == len(rows)
    assert "1 row has no image in the folder; skipped" in caplog.text
    path.write_text("image,split\nother.png,train\n")
    with pytest.raises(DataError, match=r"line 2: no image is named 'other\.png'"):
        _data(tmp_path, splits=str(path))
    path.write_text("image,split\n00.png,spare\n")
    refused = r"splits\.csv, line 2: needs an image and its split, one of train, val, test"
    with pytest.raises(DataError, match=refused):
        _data(tmp_path, splits=str(path))
    with pytest.raises(DataError, match="the table of splits does not exist"):
        _data(tmp_path, splits="none.csv")


def test_groups_of_names_stay_together(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    data = _data(tmp_path, groups=r"(\d)\d\.png")
    groups = [
        {name[0] for name in _names(data, numbers.tolist())}
        for numbers in data.split_images.values()
    ]
    assert sum(map(len, groups)) == 2


def test_masks_in_several_files_are_joined(tmp_path: Path) -> None:
    root, rng = tmp_path / "set", np.random.default_rng(0)
    for name in ("test/lost", "test/good", "ground_truth/lost/003"):
        (root / name).mkdir(parents=True)
    for name in ("test/lost/003.png", *(f"test/good/{number:03}.png" for number in range(9))):
        cv2.imwrite(str(root / name), rng.integers(0, 256, SIZE, dtype=np.uint8))
    for number, place in enumerate((0, 50)):
        mask = np.zeros(SIZE, np.uint8)
        mask[place : place + 10, :10] = 200 + number
        cv2.imwrite(str(root / f"ground_truth/lost/003/{number:03}.png"), mask)
    data = _data(tmp_path)
    number = next(n for n in range(10) if data.bank.name(n).endswith("lost/003.png"))
    mask = data.read_mask(number)
    assert mask is not None
    assert (mask.sum(), mask[:10, :10].min(), mask[50:60, :10].min()) == (200, 1, 1)
    assert data.image_kinds[number] == "lost"


def _spots(probability: float = 1.0) -> DefectSpec:
    return DefectSpec(
        probability=probability, count=(1, 2), true_count=(1, 2), amplitude=(0.4, 0.6)
    )


def test_defects_are_drawn_on_good_parts_alone_in_every_stage(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set", every=100)
    (folder / "00_mask.png").unlink()
    for path in folder.glob("*.png"):
        rng = np.random.default_rng(int(path.stem))
        cv2.imwrite(str(path), 100 + rng.integers(0, 9, SIZE, np.uint8))
    data = _data(tmp_path, synthesis=_spots(), read=ReadOptions(gray_to_rgb=True))
    for stage in ("train", "val", "test"):
        found = read_all(data, stage)
        assert found["mask"].flatten(1).any(1).float().mean() > 0.8
        assert torch.equal(found["image"][:, 0], found["image"][:, 2])  # grey in a grey image
        strength = (found["image"][:, :1] - 104 / 255).abs()
        assert strength[found["mask"] > 0].mean() > 4 * strength[found["mask"] == 0].mean()
    assert not torch.equal(read_all(data, "train", 0)["mask"], read_all(data, "train", 1)["mask"])
    with pytest.raises(ConfigError, match="synthetic defects have no class"):
        _data(tmp_path, synthesis=_spots(), classes=["a"])


def test_drawn_defects_join_those_of_masks_in_training_alone(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    plain, drawn = read_all(_data(tmp_path)), read_all(_data(tmp_path, synthesis=_spots()))
    assert (drawn["mask"] >= plain["mask"]).all()
    assert drawn["mask"].sum() > plain["mask"].sum() + 500
    data = _data(tmp_path, synthesis=_spots())
    assert torch.equal(read_all(data, "val")["mask"], read_all(_data(tmp_path), "val")["mask"])


def test_defects_of_other_images_are_pasted_at_their_new_brightness(tmp_path: Path) -> None:
    folder = _write_set(tmp_path / "set")
    for number in range(20):
        image = np.full(SIZE, 60 if number % 2 else 120, np.uint8)
        image[95, number] += 1  # else they are equal to the byte
        if number % 2 == 0:
            image[4:14, 4:14] = 180
        cv2.imwrite(str(folder / f"{number:02}.png"), image)
    options = {"near_duplicates": "apart", "sampling": SamplingOptions(paste=1.0)}
    found = read_all(_data(tmp_path, **options))
    assert found["mask"].flatten(1).any(1).all()  # real ones, and in all others one that is pasted
    grey = (found["image"] * 255).round()[:, 0]
    dark = grey.flatten(1).median(1).values == 60
    # 60 more than around it, as in its own image
    assert grey[dark].flatten(1).max(1).values.unique().tolist() == [120]
    assert (grey[dark][found["mask"][dark, 0] == 0] < 115).all()
    sampling = SamplingOptions(paste=0.5)
    half = read_all(_data(tmp_path, near_duplicates="apart", sampling=sampling))["mask"]
    assert 0.4 < float(half.flatten(1).any(1).float().mean()) < 0.7
    assert not read_all(_data(tmp_path, **options), "val")["mask"].flatten(1).any(1).all()
    again = read_all(_data(tmp_path, **options))
    assert torch.equal(again["image"], found["image"])
