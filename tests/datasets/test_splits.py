from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import ConfigError, DataError
from lit_data.datasets.patch_source import ProgressiveSize
from lit_data.datasets.splits import check_image_count, split_images

NAMES = [f"{n:03}.png" for n in range(100)]


def test_shares_are_disjoint_complete_and_of_the_stated_size() -> None:
    parts = split_images(NAMES, {"train": 0.7, "val": 0.2, "test": 0.1})
    assert [len(parts[split]) for split in ("train", "val", "test")] == [70, 20, 10]
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(100))
    assert all((np.diff(part) > 0).all() for part in parts.values())


def test_the_seed_chooses_the_images() -> None:
    first, again, other = (split_images(NAMES, seed=seed)["val"].tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_each_named_share_gets_an_image() -> None:
    parts = split_images(NAMES[:3], {"train": 0.9, "val": 0.05, "test": 0.05})
    assert [len(part) for part in parts.values()] == [1, 1, 1]
    assert [len(part) for part in split_images(NAMES[:4], {"train": 1.0}).values()] == [4, 0, 0]


def test_folders_are_found_by_themselves() -> None:
    names = ["train/a.png", "val/b.png", "test/deep/c.png", "train/d.png"]
    found = {key: part.tolist() for key, part in split_images(names).items()}
    assert found == {"train": [0, 3], "val": [1], "test": [2]}
    message = "1 image is not in a folder named after one of train, val, test: extra/e.png"
    with pytest.raises(DataError, match=message):
        split_images([*names, "extra/e.png"], "folders")
    parts = split_images([*names, "extra/e.png"], "auto")
    assert {key: part.tolist() for key, part in parts.items()} == found


def test_lists_of_names_and_files(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("\ufeff003.png\r\n\n001.png\n", encoding="utf-8")
    parts = split_images(NAMES, {"train": ["002.png"], "val": str(tmp_path / "val.txt")})
    found = {key: part.tolist() for key, part in parts.items()}
    assert found == {"train": [2], "val": [1, 3], "test": []}


@pytest.mark.parametrize(
    ("splits", "error", "message"),
    [
        (
            {"train": 0.5, "val": 0.1},
            ConfigError,
            "must be fractions of at least 0 that add up to 1",
        ),
        ({"train": 1.2, "val": -0.2}, ConfigError, "must be fractions of at least 0"),
        ({"train": 1.0, "dev": 0.0}, ConfigError, "is unknown: choose folders, auto, a file"),
        ("random", ConfigError, "splits='random' is unknown"),
        ({"train": 0.5, "val": ["001.png"]}, ConfigError, "mixes fractions and lists"),
        ({"train": ["999.png"]}, DataError, "no image is named '999.png' among 100 images"),
        (
            {"train": ["001.png"], "val": ["001.png"]},
            DataError,
            "train and val are the same images",
        ),
        (
            {"train": ["001.png", "002.png"], "val": ["001.png"]},
            DataError,
            "001.png is listed already",
        ),
        ({"train": "nowhere.txt"}, DataError, "the list of a split does not exist: nowhere.txt"),
    ],
)
def test_bad_splits(splits: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split_images(NAMES, splits)


def test_fewer_images_than_splits() -> None:
    fractions = {"train": 0.7, "val": 0.15, "test": 0.15}
    with pytest.raises(ConfigError, match=r"2 images cannot be split .*={train: 0.5, val: 0.5}'"):
        split_images(NAMES[:2], fractions)
    assert [len(part) for part in split_images(NAMES[:2]).values()] == [2, 0, 0]
    with pytest.raises(
        ConfigError, match=r"2 images cannot .*'data.splits={train: 0.5, val: 0.5}'"
    ):
        check_image_count(2, "auto")
    check_image_count(3, "auto")
    check_image_count(1, {"train": 1.0})


def test_undivided_images_are_not_trained_on() -> None:
    with pytest.raises(ConfigError, match=r"only for predictions: .*'data.splits={train: 1.0}'"):
        check_image_count(9, "none")


@pytest.mark.parametrize("name", ["splits.csv", "train.txt"])
def test_a_list_in_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("image,split\ngröße.png,train\n".encode("latin-1"))
    path = str(tmp_path / name)
    message = rf"{name}: not UTF-8 text \(byte 0xf6 at 14; .*\); save it as UTF-8$"
    with pytest.raises(DataError, match=message):
        split_images(["größe.png"], path if name.endswith(".csv") else {"train": path})


def test_the_size_is_that_of_the_last_stage_begun() -> None:
    sizes = ProgressiveSize(((0, 96), (10, 128), (20, 64)))
    assert [sizes.size_at(epoch) for epoch in (0, 9, 10, 19, 20, 999)] == [96, 96, 128, 128, 64, 64]
    assert sizes.largest_px == 128
    listed = [[0, 96], [10, 128], [20, 64]]
    assert ProgressiveSize(listed) == sizes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "must be a list of"),
        ([[0, 0]], "must be a list of"),
        ([[0, 96, 1]], "must be a list of"),
        ([96], "must be a list of"),
        ([[1, 96]], "the first must be 0"),
        ([[0, 96], [5, 128], [5, 192]], "the epochs must ascend"),
    ],
)
def test_other_stages_are_refused(sizes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProgressiveSize(sizes)


def test_undivided_images_are_all_in_train() -> None:
    splits = split_images(["test/a.png", "val/b.png"], "none")
    assert {split: numbers.tolist() for split, numbers in splits.items()} == {
        "train": [0, 1],
        "val": [],
        "test": [],
    }
