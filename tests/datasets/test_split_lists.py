"""Lists of splits beside images: text files, ImageSets, data.yaml, tables, and those that are typed."""

from pathlib import Path

import pytest

from lit_data.annotations.tables import read_list_labels
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.files import write_table
from lit_data.core.leftovers import Leftovers
from lit_data.datasets.split_lists import find_list_files, read_split_table
from lit_data.datasets.splits import Splits, find_named_splits, split_images

NAMES = tuple(f"JPEGImages/{stem}.jpg" for stem in "abcdef")


def _write(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _split(root: Path, splits: Splits = "auto", names: tuple[str, ...] = NAMES) -> dict[str, str]:
    """Return the stems of the images of each split."""
    parts = split_images(names, splits, root=root)
    stems = {split: [Path(names[number]).stem for number in part] for split, part in parts.items()}
    return {split: "".join(of_split) for split, of_split in stems.items()}


@pytest.mark.parametrize(
    "texts",
    [
        {"train_dot_txt": "a\nb", "val_dot_txt": "c", "test_dot_txt": "d"},
        {"Train_dot_TXT": "a\nb\n", "valid_ids_dot_txt": "\ufeffc\r\n", "test2007_dot_txt": "d"},
        {
            "train_dot_txt": "JPEGImages/a.jpg 0\nb.jpg 1",
            "val_dot_txt": "c x",
            "test_dot_txt": "d y",
        },
        {
            "ImageSets__Main__train_dot_txt": "a\nb",
            "ImageSets__Main__val_dot_txt": "c",
            "ImageSets__Main__test_dot_txt": "d",
            "ImageSets__Main__trainval_dot_txt": "a\nb\nc",
            "ImageSets__Main__bus_train_dot_txt": "a 1\nb -1\nf 0",
        },
        {
            "VOC2007__ImageSets__Layout__train_dot_txt": "a",
            "VOC2012__ImageSets__Layout__train_dot_txt": "b",
            "VOC2012__ImageSets__Layout__val_dot_txt": "c",
            "VOC2012__ImageSets__Layout__test_dot_txt": "d",
        },
        {
            "train_dot_txt": "JPEGImages\\a.jpg\r\n.\\JPEGImages\\b.jpg",
            "val_dot_txt": "data/c",
            "test_dot_txt": "d",
        },
        {"labels_dot_csv": "image,label,split\na.jpg,x,Training\nb,x,train\nc,x,valid\nd,x,test\n"},
        {
            "data_dot_yaml": "train: [one.txt]\nvalid: two.txt\ntest: three.txt\nnames: [x]",
            "one_dot_txt": "a\nb",
            "two_dot_txt": "c",
            "three_dot_txt": "d",
        },
        {
            "JPEGImages__train_dot_txt": "a\nb",
            "JPEGImages__val_dot_txt": "c",
            "JPEGImages__test_dot_txt": "d",
        },
    ],
)
def test_lists_are_found_in_their_places(texts: dict[str, str], tmp_path: Path) -> None:
    _write(tmp_path, **texts)
    assert _split(tmp_path) == {"train": "ab", "val": "c", "test": "d"}
    leftovers = Leftovers()
    split_images(NAMES, root=tmp_path, leftovers=leftovers)
    assert leftovers.describe() == [
        "2 images are not in the list of any split: JPEGImages/e.jpg, JPEGImages/f.jpg; "
        "'data.splits={train: 0.7, val: 0.15, test: 0.15}' uses all"
    ]


def test_names_that_images_of_several_splits_have(tmp_path: Path) -> None:
    _write(tmp_path, set__train_dot_txt="1.png 0\n2.png 1", set__val_dot_txt="1.png 1")
    names = ["set/train/1.png", "set/train/2.png", "set/val/1.png"]
    parts = split_images(names, "auto", root=tmp_path)
    assert {split: part.tolist() for split, part in parts.items()} == {
        "train": [0, 1],
        "val": [2],
        "test": [],
    }
    assert len(find_list_files(tmp_path, names)) == 2
    listed = read_list_labels(tmp_path, [tmp_path / name for name in names], ())
    assert listed is not None
    assert listed.labels == ("0", "1", "1")
    with pytest.raises(DataError, match=r"2 images are named '1.png'; name them with their folder"):
        split_images(["set/a/1.png", "set/a/2.png", "set/b/1.png"], "auto", root=tmp_path)


def test_classes_of_voc_are_no_lists(tmp_path: Path) -> None:
    _write(
        tmp_path, ImageSets__Main__bus_train_dot_txt="a 1", notes_dot_txt="train", x_dot_csv="a,set"
    )
    assert find_list_files(tmp_path, NAMES) == []
    assert find_named_splits(NAMES, root=tmp_path) is None


def test_lists_for_masks_go_before_those_for_boxes(tmp_path: Path) -> None:
    for folder, stems in (("Segmentation", "a"), ("Main", "b")):
        _write(tmp_path, **{f"ImageSets__{folder}__train_dot_txt": stems})
        _write(tmp_path, **{f"ImageSets__{folder}__val_dot_txt": "c"})
    assert _split(tmp_path)["train"] == "a"
    named = find_named_splits(NAMES, root=tmp_path, list_folders=["ImageSets/Main"])
    assert named.numbers["train"].tolist() == [1]


def test_val_is_a_part_of_the_train_list(tmp_path: Path) -> None:
    _write(tmp_path, ImageSets__trainval_dot_txt="a\nb\nc\nd", ImageSets__test_dot_txt="e\nf")
    parts = _split(tmp_path)
    assert parts["test"] == "ef"
    assert sorted(parts["train"] + parts["val"]) == list("abcd")
    assert len(parts["val"]) == 1


def test_typed_lists_are_relative_to_the_root_then_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, set__lists__a_dot_txt="a", set__b_dot_txt="b", b_dot_txt="c", here_dot_txt="d")
    monkeypatch.chdir(tmp_path)
    splits = {"train": "lists/a.txt", "val": "b.txt", "test": "here.txt"}
    assert _split(tmp_path / "set", splits) == {"train": "a", "val": "b", "test": "d"}
    splits = {"train": str(tmp_path / "b.txt"), "val": ["JPEGImages/a.jpg", "b"]}
    assert _split(tmp_path / "set", splits) == {"train": "c", "val": "ab", "test": ""}
    with pytest.raises(DataError, match=r"no .*/set/lists/x.txt, nor .*/lists/x.txt\)"):
        _split(tmp_path / "set", {"train": "lists/x.txt"})


def test_an_exact_path_goes_before_the_end_of_another(tmp_path: Path) -> None:
    names = ("a.jpg", "old/a.jpg")
    parts = split_images(names, {"train": ["a.jpg"], "val": ["old/a.jpg"]}, root=tmp_path)
    assert [part.tolist() for part in parts.values()] == [[0], [1], []]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"train_dot_txt": "a\nx"}, r"train.txt: line 2: no image is named 'x' among 6 images"),
        ({"train_dot_txt": "a\nb", "val_dot_txt": "b"}, r"val.txt: line 1: b is listed already"),
        (
            {"train_dot_txt": "a\nb", "val_dot_txt": "b\na"},
            r"train and val are the same images \(2\)",
        ),
        (
            {"data_dot_yaml": "train: JPEGImages\nval: JPEGImages"},
            r"train and val are the same images \(6\), .*list others for val, .*data.splits={train",
        ),
        ({"train_dot_txt": "a", "test_dot_txt": ""}, "test is neither a list file with rows"),
        (
            {"a_dot_csv": "image,split\na,train", "b_dot_csv": "file,subset\na,val"},
            r"2 tables name a split of each image \(a.csv, b.csv\): choose one with data.splits=",
        ),
        (
            {"a_dot_csv": "image,split,split\na,train,val"},
            r"a\.csv: several columns are named 'split': keep one",
        ),
    ],
)
def test_bad_lists_are_refused(texts: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "JPEGImages").mkdir()
    _write(tmp_path, **texts)
    with pytest.raises(DataError, match=message):
        _split(tmp_path)


def test_lists_of_links_out_of_the_root_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, out_dot_txt="a", set__val_dot_txt="b")
    (tmp_path / "set" / "train.txt").symlink_to(tmp_path / "out.txt")
    with pytest.raises(DataError, match="leads out of the data folder"):
        _split(tmp_path / "set")


def test_the_table_of_a_run_names_images_that_a_spreadsheet_would_calculate(tmp_path: Path) -> None:
    names = [
        "-10C/a.png",
        "+5V/a.png",
        "=a.png",
        "'=a.png",
        "'b'.png",
        "c.png",
        "d\ne.png",
        "\udce4.png",
    ]
    rows = [{"image": name, "split": "val"} for name in names]
    write_table(tmp_path / "splits.csv", ["image", "split"], rows)
    lists = read_split_table(tmp_path / "splits.csv")
    assert [row for split in lists for row in split.rows] == names


def test_images_that_are_skipped_may_be_listed(tmp_path: Path) -> None:
    _write(tmp_path, train_dot_txt="a\nbad", val_dot_txt="b\nc\nd\ne\nf")
    parts = split_images(NAMES, root=tmp_path, others=["JPEGImages/bad.jpg"])
    assert parts["train"].tolist() == [0]


@pytest.mark.parametrize("folders", ["valid invalid", "bus train", "test good bent"])
def test_one_folder_with_the_name_of_a_split_is_asked_about(folders: str) -> None:
    names = [f"{folder}/{number}.png" for folder in folders.split() for number in range(3)]
    with pytest.raises(ConfigError, match=r"only the folder '.*' is named after a split"):
        split_images(names)
    assert sum(map(len, split_images(names, {"train": 0.5, "val": 0.5}).values())) == len(names)


def test_folders_alone_are_all_of_train() -> None:
    names = [f"train/{number}.png" for number in range(20)]
    assert [len(part) for part in split_images(names).values()] == [14, 3, 3]
