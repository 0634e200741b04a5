"""The one rule of verdicts, and the files whose images get them by it."""

import csv
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_inspect.__main__ import main
from lit_inspect.errors import BoardError
from lit_inspect.inspector import Inspector
from lit_inspect.verdicts import Judge, score_labels
from tests.lit_inspect.boards import BOXES, LABELS, write_board


@pytest.mark.parametrize(
    ("rule", "score", "is_found", "expected"),
    [
        ({}, 0.9, False, "good"),
        ({}, 0.1, True, "defect"),
        ({"threshold": 0.5}, 0.5, False, "defect"),
        ({"threshold": 0.5}, 0.49, True, "good"),
        ({"threshold": 0.5}, float("nan"), False, "review"),
        ({"threshold": 0.5, "is_unsure": True}, 0.9, True, "unsure"),
        ({"threshold": 0.0, "review": (0.2, 0.7)}, 0.19, True, "good"),
        ({"review": (0.2, 0.7)}, 0.2, False, "review"),
        ({"review": (0.2, 0.7)}, 0.7, False, "review"),
        ({"review": (0.2, 0.7)}, 0.71, False, "defect"),
        ({"review": (0.7, 0.2)}, 0.69, False, "good"),
        ({"review": (0.7, 0.2)}, 0.7, False, "defect"),
    ],
)
def test_the_rule(rule: dict[str, Any], score: float, is_found: bool, expected: str) -> None:
    assert Judge(**rule)(score, is_found=is_found) == expected


def test_references_that_do_not_fit_are_for_review() -> None:
    assert Judge(threshold=0.5)(0.9, is_found=True, fits=False) == "review"


def test_a_label_scores_as_what_is_of_no_good_class() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.125], np.float32)
    assert score_labels(probabilities, {0}) == 0.5
    assert score_labels(probabilities, {1, 3}) == 0.625
    assert score_labels(np.array([0.0, 0.6, 0.6], np.float32), {0}) == 1.0  # rounding of softmax


def _write_label(path: Path, answer: list[float], **changes: Any) -> Path:
    """Write a file whose net says the same of every image."""
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
    helper = onnx.helper
    weights = [
        onnx.numpy_helper.from_array(np.array([answer], np.float32), "answer"),
        onnx.numpy_helper.from_array(np.array([1, 2, 3], np.int64), "axes"),
        onnx.numpy_helper.from_array(np.array(0, np.float32), "nothing"),
    ]
    nodes = [
        helper.make_node("ReduceSum", ["images", "axes"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "nothing"], ["zero"]),
        helper.make_node("Unsqueeze", ["zero", "one"], ["column"]),
        helper.make_node("Add", ["column", "answer"], ["probability"]),
    ]
    weights.append(onnx.numpy_helper.from_array(np.array([1], np.int64), "one"))
    return write_board(path, nodes=nodes, weights=weights, **{**LABELS, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"good": [0]}, "good"),
        ({"good": [1]}, "defect"),
        ({"good": [0], "image_threshold": 0.4}, "defect"),
        ({"good": [0], "review": [0.3, 0.5]}, "review"),
        ({"good": [0], "doubt": "it knows nothing"}, "unsure"),
        ({}, "a"),
    ],
)
def test_labels_get_verdicts_where_a_class_is_good(
    changes: dict[str, Any], verdict: str, tmp_path: Path
) -> None:
    path = _write_label(tmp_path / "a.inspect", [0.6, 0.4], **changes)
    given = Inspector(path)(np.zeros((8, 8), np.uint8))
    assert (given.verdict, given.label) == (verdict, "a")
    cv2.imwrite(str(tmp_path / "x.png"), np.zeros((8, 8), np.uint8))
    assert main([str(path), str(tmp_path / "x.png"), "--out", str(tmp_path / "out")]) == 0
    (label,) = csv.DictReader((tmp_path / "out/labels.csv").read_text().splitlines())
    assert label == {"image": "x.png", "label": "a", "score": "0.6"}
    table = tmp_path / "out/images.csv"
    assert table.exists() == ("good" in changes)
    if "good" in changes:
        (row,) = csv.DictReader(table.read_text().splitlines())
        score = "0.4" if changes["good"] == [0] else "0.6"
        assert row == {"image": "x.png", "score": score, "verdict": verdict}


@pytest.mark.parametrize(
    "changes",
    [
        {**LABELS, "good": [2]},
        {**LABELS, "good": [-1]},
        {**LABELS, "good": [0, 1]},
        {**BOXES, "good": [0]},
        {"good": [0]},
        {**LABELS, "image_threshold": 0.5},
    ],
)
def test_good_classes_that_do_not_fit_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BoardError, match="good"):
        Inspector(write_board(tmp_path / "a.inspect", **changes))
