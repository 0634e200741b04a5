from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from benchmarks.__main__ import run as measure
from benchmarks.learning_detection import (
    Box,
    list_images,
    read_truth,
    score_boxes,
)
from benchmarks.learning_sets import BOARD_CLASSES, prepare_boards
from lit_data.wings.detection.model.scores import BoxScores
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


@pytest.mark.parametrize("seed", range(3))
def test_scores_agree_with_those_that_training_logs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = {}
    predictions = {}
    for image in range(8):
        places = rng.uniform(0, 60, (6, 2)).repeat(2, 1)[:, [0, 2, 1, 3]] + [0, 0, 20, 20]
        moved = places.repeat(2, 0) + rng.normal(0, 3, (12, 4))
        numbers = rng.integers(0, 3, 6)
        found_numbers = np.where(rng.random(12) < 0.8, numbers.repeat(2), 2)
        scores = np.sort(rng.random(12))[::-1]
        stem = str(image)
        truth[stem] = [Box(int(n), tuple(at)) for n, at in zip(numbers, places, strict=True)]
        found = zip(found_numbers, moved, scores, strict=True)
        predictions[stem] = [Box(int(n), tuple(at), float(score)) for n, at, score in found]
    metric = BoxScores()
    metric.update(
        [_as_tensors(predictions[stem]) for stem in truth],
        [_as_tensors(truth[stem]) for stem in truth],
    )
    expected = float(metric.compute()["map50"])
    assert 0.1 < expected < 0.9
    assert score_boxes(predictions, truth) == pytest.approx(expected, abs=1e-5)


def _as_tensors(boxes: list[Box]) -> dict[str, torch.Tensor]:
    corners = torch.tensor([box.corners for box in boxes], dtype=torch.float64)
    numbers = torch.tensor([box.class_number for box in boxes])
    scores = torch.tensor([box.score for box in boxes])
    return {"boxes": corners, "classes": numbers, "scores": scores}
