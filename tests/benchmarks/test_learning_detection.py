from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks.__main__ import run as measure
from benchmarks.learning_detection import (
    Box,
    list_images,
    read_truth,
    score_boxes,
)
from benchmarks.learning_sets import BOARD_CLASSES, prepare_boards
from tests.benchmarks.suites import read_table


def _write_source(folder: Path, images: int = 10) -> Path:
    """DeepPCB's form, each image with one bright square of class 2 and one dark of class 5."""
    rng = np.random.default_rng(0)
    (folder / "PCBData/group/1").mkdir(parents=True)
    (folder / "PCBData/group/1_not").mkdir()
    lines = []
    for number in range(images):
        image = np.full((640, 640), 128, np.uint8)
        rows = []
        for kind, grey in ((2, 255), (5, 0)):
            left, top = (int(place) for place in rng.integers(0, 540, 2))
            image[top : top + 100, left : left + 100] = grey
            rows.append(f"{left} {top} {left + 100} {top + 100} {kind}\n")
        cv2.imwrite(str(folder / f"PCBData/group/1/{number}_test.jpg"), image)
        (folder / f"PCBData/group/1_not/{number}.txt").write_text("".join(rows))
        lines.append(f"group/1/{number}.jpg group/1_not/{number}.txt\n")
    (folder / "PCBData/trainval.txt").write_text("".join(lines[:6]))
    (folder / "PCBData/test.txt").write_text("".join(lines[6:]))
    return folder


def test_boards_become_a_dataset_with_fixed_splits(tmp_path: Path) -> None:
    source = _write_source(tmp_path / "source")
    boards = prepare_boards(source, tmp_path / "boards", count=10)
    again = prepare_boards(source / "PCBData", tmp_path / "again", count=10)
    assert (boards / "classes.txt").read_text().split() == list(BOARD_CLASSES)
    stems = [
        [path.stem for path in list_images(boards, split)] for split in ("train", "val", "test")
    ]
    assert [len(names) for names in stems] == [7, 1, 2]
    assert sorted(name for names in stems for name in names) == sorted(map(str, range(10)))
    assert (again / "train.txt").read_text() == (boards / "train.txt").read_text()
    truth = read_truth(boards, "test")
    for stem, boxes in truth.items():
        lines = (source / f"PCBData/group/1_not/{stem}.txt").read_text().splitlines()
        expected = [[int(word) for word in line.split()] for line in lines]
        assert [box.class_number + 1 for box in boxes] == [row[4] for row in expected]
        for box, row in zip(boxes, expected, strict=True):
            assert box.corners == pytest.approx(row[:4], abs=0.01)
    with pytest.raises(ValueError, match=r"count=11, but .*PCBData lists 10 images: ask for at mo"):
        prepare_boards(source, tmp_path / "more", count=11)


@pytest.mark.slow
def test_both_ways_are_trained_and_scored(tmp_path: Path) -> None:
    boards = prepare_boards(_write_source(tmp_path / "source"), tmp_path / "boards", count=10)
    words = ["suite.seconds=[2]", "suite.seeds=[0]", 'suite.overrides=["data.size_px=128"]']
    places = [f"suite.root={boards}", f"hydra.run.dir={tmp_path / 'run'}"]
    assert measure(["learning_boxes", *words, *places]) == 0
    rows = {row["way"]: float(row["map50"]) for row in read_table(tmp_path / "run")}
    assert list(rows) == ["plain", "ours"]
    assert all(0 <= score <= 1 for score in rows.values())
    words_of_predict = (tmp_path / "run/ours_0/2/.hydra/overrides.yaml").read_text()
    assert "predict.threshold=0.01" in words_of_predict  # a score is over all boxes


def test_boxes_are_scored_by_their_overlap_class_and_order() -> None:
    truth = {"a": [Box(0, (0, 0, 10, 10)), Box(1, (20, 20, 40, 40))], "b": []}
    assert score_boxes(truth, truth) == pytest.approx(1)
    assert score_boxes({"a": truth["a"][:1]}, truth) == pytest.approx(0.5)
    assert score_boxes({}, truth) == 0
    moved = {"a": [Box(0, (6, 0, 16, 10)), Box(0, (20, 20, 40, 40))]}
    assert score_boxes(moved, truth) == 0
    wrong_first = {"a": truth["a"], "b": [Box(0, (0, 0, 10, 10), 1.0)]}
    low = {"a": [box._replace(score=0.5) for box in truth["a"]]}
    assert score_boxes(wrong_first | low, truth) == pytest.approx(0.75)
