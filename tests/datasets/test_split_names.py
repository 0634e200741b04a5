"""Names of folders, files and entries of tables, and the split that they say."""

import pytest

from lit_data.datasets.split_names import (
    find_listed_split,
    find_split,
    split_of,
    split_of_annotations,
)

NAMES = {
    "train": "train Training TRN tr seg_train train2017 WIDER_train train_set TrainSet trainval trainA "
    "train_val imagesTr VOCtrainval train_images bounding_box_train JPEGImages-trainval train.1 01_train",
    "val": "val valid Validation dev eval val2017 val_masks validation-set instances_val2017 minival",
    "test": "test Testing tst testset seg_test test_1 test-dev2017 testB labelsTs VOC2007_test bbox_test",
    "": "test_bench_1 latest contest protest training_wheels trains interval Oval Prüftest not_test "
    "pre_train train_test trainvaltest images query extra 2017 _ 测试",
}


@pytest.mark.parametrize("split", NAMES)
def test_whole_words_of_a_name_say_its_split(split: str) -> None:
    names = NAMES[split].split()
    assert {name: find_split(name) or "" for name in names} == dict.fromkeys(names, split)


def test_names_of_lists_hold_nothing_else() -> None:
    lists = {"train": "train", "val_ids": "val", "testList": "test", "trainval": "train"}
    lists |= dict.fromkeys(("bus_train", "train_labels", "seg_val", "classes"), "")
    assert {stem: find_listed_split(stem) or "" for stem in lists} == lists


def test_the_innermost_folder_says_the_split_of_a_file() -> None:
    paths = {
        "DATA/train/images/a.png": "train",
        "my_test/train/good/a.png": "train",
        "Images/trainval/a.png": "train",
        "good/Testing/a.png": "test",
        "good/a_train.png": "",
        "train.png": "",
    }
    assert {path: split_of(path) or "" for path in paths} == paths


def test_files_of_annotations_go_before_their_folders() -> None:
    paths = {
        "annotations/instances_val2017.json": "val",
        "train/_annotations.coco.json": "train",
        "annotations/train_v2_coco.json": "train",
        "annotations/all.json": "",
    }
    assert {path: split_of_annotations(path) or "" for path in paths} == paths
