"""Images and masks are found in the layouts that people have, and what does not fit is listed."""

from pathlib import Path

import numpy as np
import pytest

from lit_data.core.errors import DataError
from lit_data.core.names import plain_stem
from lit_data.datasets.balanced_splits import split_stratified
from lit_data.datasets.layouts import find_inspection_set
from tests.helpers.files import touch

SHARES = {"train": 0.7, "val": 0.15, "test": 0.15}


def _pairs(
    folder: Path, masks: str | None = None
) -> tuple[str, dict[str, str | None], tuple[str, ...]]:
    found = find_inspection_set(folder, masks)
    names = [None if mask is None else mask.relative_to(folder).as_posix() for mask in found.masks]
    images = [path.relative_to(folder).as_posix() for path in found.images]
    return found.layout, dict(zip(images, names, strict=True)), found.kinds


LAYOUTS = {
    "folder": ("folder", {"images/a.jpg": "masks/a.png", "images/b.jpg": None}, ","),
    "folder, endings and zeros": (
        "folder",
        {"img/12.jpg": "GT/012_GT.png", "img/7.jpg": "GT/007_mask.png"},
        ",",
    ),
    "a folder for each split": (
        "folder",
        {f"{split}/images/1.png": f"{split}/masks/1.png" for split in ("train", "val")},
        ",",
    ),
    "beside, another type": (
        "beside",
        {f"MT_{kind}/Imgs/e1.jpg": f"MT_{kind}/Imgs/e1.png" for kind in ("Crack", "Free")},
        "MT_Crack,good",
    ),
    "beside, an ending": (
        "beside",
        {"a.png": "a_mask.png", "b.png": None, "c.bmp": "c_label.png"},
        ",,",
    ),
    "anomaly": (
        "anomaly",
        {
            "test/bent/000.png": "ground_truth/bent/000_mask.png",
            "test/good/000.png": None,
            "train/good/000.png": None,
        },
        "bent,good,good",
    ),
    "anomaly of several products": (
        "anomaly",
        {f"{part}/test/ko/1.bmp": f"{part}/ground_truth/ko/1.png" for part in ("cap", "nut")},
        "ko,ko",
    ),
    "anomaly, a folder of masks for each image": (
        "anomaly",
        {"test/lost/001.png": "ground_truth/lost/001/000.png", "train/good/001.png": None},
        "lost,good",
    ),
    "none": ("none", {"good/1.jpg": None, "rust/1.jpg": None}, "good,rust"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_found_by_itself(name: str, tmp_path: Path) -> None:
    layout, pairs, kinds = LAYOUTS[name]
    touch(tmp_path, *pairs, *filter(None, pairs.values()))
    if "a folder of masks" in name:
        touch(tmp_path, "ground_truth/lost/001/001.png")
    assert _pairs(tmp_path) == (layout, pairs, tuple(kinds.split(",")))


def test_a_folder_of_masks_may_be_named_and_lie_anywhere(tmp_path: Path) -> None:
    folder = touch(tmp_path / "set", "x/a.png", "x/b.png")
    touch(tmp_path / "elsewhere", "a.png")
    layout, found, _ = _pairs(touch(folder, "marks/b.png"), "marks")
    assert (layout, found) == ("folder", {"x/a.png": None, "x/b.png": "marks/b.png"})
    masks = find_inspection_set(folder, str(tmp_path / "elsewhere"), ["x/*"]).masks
    assert masks == (tmp_path / "elsewhere" / "a.png", None)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("images/a.png masks/a.png masks/b.png", r"b\.png: a mask without(.|\n)*1 of 2 masks"),
        ("images/a.png masks/a.png masks/a_mask.png", r"a_mask\.png: a second mask of .*a\."),
        ("x/1.png y/1.png masks/1.png", r"masks/1\.png: a mask without an image of its name"),
        ("masks/a.png", r"no images but the masks in .*masks; check data\.root"),
        ("a.mat", r"found 1 of MATLAB \(.mat\); MATLAB files are not read: save each mask as PNG"),
        ("a.txt", r"no image matches '\*\*/\*'; found 1 of another type"),
    ],
)
def test_what_does_not_fit_is_listed(files: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        find_inspection_set(touch(tmp_path, *files.split()))


def test_a_folder_of_masks_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"marks: no such folder of masks; check data\.masks"):
        find_inspection_set(touch(tmp_path, "a.png"), "marks")


def test_a_line_says_what_was_found(tmp_path: Path) -> None:
    found = find_inspection_set(touch(tmp_path, "a/1.png", "a/1_mask.png", "b/2.png"))
    line = "2 images, masks beside them (_mask), 1 image has none"
    assert found.describe() == f"{line} (a 1, b 1)"
    found = find_inspection_set(touch(tmp_path / "on_top", "a/1.png", "2.png"))
    hint = "data.exclude skips 2.png if it shows no part"
    assert found.describe() == f"2 images without masks (no folder 1, a 1; {hint})"


def test_stems_are_compared_without_endings() -> None:
    plain = {"007": "7", "0": "0", "A_Mask": "a", "x-gt": "x", "mask": "mask", "1_2_seg": "1_2"}
    assert {stem: plain_stem(stem) for stem in plain} == plain


def test_each_kind_is_in_each_split_and_groups_stay_together() -> None:
    kinds = ["rare"] * 10 + ["common"] * 100
    groups = np.arange(110)
    groups[[20, 21, 22]] = 20
    splits = split_stratified(kinds, groups, SHARES, seed=3)
    assert sorted(np.concatenate([*splits.values()]).tolist()) == list(range(110))
    for numbers in splits.values():
        assert (numbers < 10).sum() >= 1
        assert len({20, 21, 22} & set(numbers.tolist())) in (0, 3)
    others = split_stratified(kinds, groups, SHARES, seed=4)
    assert not np.array_equal(splits["train"], others["train"])
