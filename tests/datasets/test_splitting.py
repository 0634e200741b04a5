"""Images that show the same, or that a name says belong together, stay in one split."""

import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.core.errors import ConfigError
from lit_data.datasets.balanced_splits import (
    ImageSplitter,
    check_folds,
    describe_splits,
    join_groups,
)
from lit_data.datasets.near_duplicates import group_similar
from lit_data.datasets.splits import group_by_name
from lit_data.datasets.synthetic.surfaces import draw_texture
from lit_data.images.bank import DecodedFiles
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.read_options import ReadOptions


def _bank(folder: Path, images: list[np.ndarray], suffix: str = ".png") -> DecodedFiles:
    sources = []
    for number, image in enumerate(images):
        path = folder / f"{number}{suffix}"
        cv2.imwrite(str(path), image)
        sources.append(ImageSource((str(path),)))
    return DecodedFiles(sources, ImageDecoder(ReadOptions()), cache_bytes=2**20, on_bad="error")


def _texture(seed: int) -> np.ndarray:
    return draw_texture(np.random.default_rng(seed), (120, 160))


def test_images_saved_anew_or_brighter_are_similar_and_others_are_not(tmp_path: Path) -> None:
    plain = [_texture(seed) for seed in range(6)]
    _, coded = cv2.imencode(".jpg", plain[0], [cv2.IMWRITE_JPEG_QUALITY, 60])
    again = cv2.imdecode(coded, cv2.IMREAD_GRAYSCALE)
    brighter = np.clip(plain[1].astype(np.float32) * 1.2 + 5, 0, 255).astype(np.uint8)
    smaller = cv2.resize(plain[2], (120, 90), interpolation=cv2.INTER_AREA)
    groups = group_similar(_bank(tmp_path, [*plain, again, brighter, smaller]), None)
    assert groups[6] == groups[0]
    assert groups[7] == groups[1]
    assert groups[8] == groups[2]
    assert len(np.unique(groups)) == 6


def test_one_fixture_and_one_lamp_do_not_make_images_similar(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fixture = np.zeros((96, 96), np.float32)
    cv2.circle(fixture, (48, 48), 30, 120, 4)
    lamp = np.linspace(0, 60, 96)[:, None]
    parts = [
        fixture + lamp * rng.uniform(0.5, 1.5) + rng.normal(60, 6, (96, 96)) for _ in range(12)
    ]
    images = [part.clip(0, 255).astype(np.uint8) for part in parts]
    assert len(np.unique(group_similar(_bank(tmp_path, images), None))) == 12


def test_frames_of_one_part_that_does_not_move_stay_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 3, (12, 120, 160))
    frames = [*(_texture(0) + noise).clip(0, 255).astype(np.uint8)]
    groups = group_similar(_bank(tmp_path, [*frames, *map(_texture, range(1, 10))]), None)
    assert len(np.unique(groups[:12])) == 1
    assert len(np.unique(groups)) == 10
    flat = [np.full((40, 40), 7, np.uint8)] * 3  # are no group
    assert len(np.unique(group_similar(_bank(tmp_path, flat), None))) == 3


def test_names_give_groups() -> None:
    names = ["a/lot1_1.png", "a/lot1_2.png", "b/lot2_1.png", "c/x.png", "c/y.png"]
    assert group_by_name(names, r"(lot\d+)_").tolist()[:3] == [2, 2, 3]
    groups = group_by_name(names, r"lot\d+")
    assert groups[0] == groups[1] != groups[2]
    assert len(set(groups.tolist())) == 4
    for pattern, message in (
        ("(", r"'\(' is not a regular expression"),
        ("(" * 5000, "'.*' is not a regular expression: "),
        ("a{99999999999}", "'.*' is not a regular expression: "),
        ("panel", "'panel' matches none of the names, such as 'a/lot1_1.png'"),
    ):
        with pytest.raises(ConfigError, match=f"^data.groups={message}"):
            group_by_name(names, pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|aa)+$",
        "(a?){30}a{30}$",
        "(?:(?:a?){4}){4}$",
        "(?=(a*)*$)",
        "(?>(a+)+$)",
        "(?:a{1,4}){1,30}$",
        ".*" * 11 + "x",
    ],
)
def test_expressions_that_take_for_ever_are_refused(pattern: str) -> None:
    message = r"can match one name in so many ways .* as '\(a\+\)\+' does"
    with pytest.raises(ConfigError, match=rf"^data\.groups={re.escape(repr(pattern))} {message}"):
        group_by_name(["a" * 40 + "!"], pattern)


def test_long_expressions_and_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="can divide names of 200 characters in more than"):
        group_by_name(["a" * 200], ".*" * 10 + "x")
    assert group_by_name(["lot1_a_b_c_d_e.png"], "lot(.*)_(.*)_(.*)_(.*)_(.*)").tolist() == [0]
    monkeypatch.setattr("lit_data.datasets.splits.LONGEST_S", 0)
    with pytest.raises(ConfigError, match=r"took 0 s for \d+ of 50 names: repeat fewer parts"):
        group_by_name(["a" * 150] * 50, ".*.*.*x")


@pytest.mark.parametrize(
    "pattern",
    [
        r"^((?:[^_]+_){2})",
        r"^(.*?)_\d+_(?:top|side)\.png$",
        r"(?i:LOT|cam)(\d+)",
        r"^(?:[a-z]+\d?)++",
    ],
)
def test_expressions_that_repeat_little_or_never_come_back_are_taken(pattern: str) -> None:
    groups = group_by_name(["lot1_2_top.png", "lot1_2_side.png", "x"], pattern)
    assert groups[0] == groups[1] != groups[2]


def test_groups_are_joined_where_any_of_them_joins() -> None:
    joined = join_groups(np.array([0, 0, 1, 2, 3, 4]), np.array([5, 6, 7, 7, 6, 8]))
    assert joined.tolist() == [0, 0, 2, 2, 0, 5]


def test_splits_that_groups_make_uneven_are_told(caplog: pytest.LogCaptureFixture) -> None:
    kinds = ["good", "dent"] * 20

    def split(groups: np.ndarray) -> dict[str, np.ndarray]:
        splitter = ImageSplitter(
            names=[f"{number}.png" for number in range(len(groups))],
            kinds=kinds,
            has_mask=None,
            count_classes=lambda: np.zeros((0, 2), np.int64),
            find_groups=lambda _: groups,
            seed=0,
        )
        return splitter.split("auto")

    positive = np.array([True, False, True, False])
    nameless = describe_splits({"train": np.arange(4)}, [""] * 4, positive)
    assert nameless == "train 4 (2 positive)"
    counts = "train 28 (dent 14, good 14), val 6 (dent 3, good 3), test 6 (dent 3, good 3)"
    assert describe_splits(split(np.arange(40)), kinds) == counts
    assert not caplog.text
    split(np.zeros(40, np.int64))
    assert "has 0 of 40 images, not 15%" in caplog.text
    assert "data.near_duplicates=apart spreads them" in caplog.text


def test_each_image_is_in_the_test_of_one_fold_and_what_belongs_together_is_in_one() -> None:
    kinds = ["good"] * 20 + ["dent"] * 10
    groups = np.append(np.arange(28), [27, 27])  # the last three dents are of one part

    def splitter(groups: np.ndarray) -> ImageSplitter:
        return ImageSplitter(
            names=[f"{number}.png" for number in range(len(groups))],
            kinds=kinds,
            has_mask=None,
            count_classes=lambda: np.zeros((0, 2), np.int64),
            find_groups=lambda _: groups,
            seed=0,
        )

    folds = [splitter(groups).split_folds(5, fold) for fold in range(5)]
    assert np.sort(np.concatenate([fold["test"] for fold in folds])).tolist() == list(range(30))
    for number, fold in enumerate(folds):
        assert fold["val"].tolist() == folds[(number + 1) % 5]["test"].tolist()
        assert np.sort(np.concatenate(list(fold.values()))).tolist() == list(range(30))
        assert (fold["test"] < 20).sum() == 4
        assert np.isin([27, 28, 29], fold["test"]).sum() in (0, 3)
    with pytest.raises(ConfigError, match=r"folds=5 is more than the 4 images or groups"):
        splitter(np.arange(30) % 4).split_folds(5, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 2}, "data.folds"),
        ({"fold": 2}, "data.fold=2 needs data.folds, which is not set"),
        ({"folds": 5, "fold": 5}, "data.fold=5 is not one of data.folds=5: choose 0 to 4"),
        ({"folds": 5, "splits": {"train": 1.0}}, "remove one of them"),
        ({"folds": 5, "protocol": "mvtec"}, "remove data.splits and data.folds"),
        ({"splits": "folders", "protocol": "mvtec"}, "remove data.splits and data.folds"),
    ],
)
def test_folds_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    words = {"splits": "auto", "folds": None, "fold": 0, "protocol": "auto"} | options
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_folds(**words)
