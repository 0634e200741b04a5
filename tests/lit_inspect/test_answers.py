"""What a net gives that is no probability is an error of its image, and never a verdict."""

import csv
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_inspect import AnswerError, BoardError, Inspector
from lit_inspect.__main__ import main
from lit_inspect.board import encode_array
from lit_inspect.drift import Guarantee
from tests.lit_inspect.boards import BOXES, LABELS, write_board

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
NAN, INF = float("nan"), float("inf")
WRONG = [NAN, INF, -INF, 1.5, -0.5]
PIXELS = np.zeros((64, 64), np.uint8)
ODD = np.full((64, 64), 255, np.uint8)  # by which the nets below go wrong


def _node(kind: str, *names: str, **options: Any) -> Any:
    return onnx.helper.make_node(kind, list(names[:-1]), [names[-1]], **options)


def _weight(name: str, values: Any) -> Any:
    return onnx.numpy_helper.from_array(np.array(values, np.float32), name)


def _count(name: str, values: Any) -> Any:
    return onnx.numpy_helper.from_array(np.array(values, np.int64), name)


def _write_map(path: Path, value: float, **changes: Any) -> Path:
    """Write a file of maps that gives a value in the place of each white pixel."""
    nodes = [
        _node("Less", "images", "half", "is_dark"),
        _node("Where", "is_dark", "images", "value", "probability"),
    ]
    weights = [_weight("half", 0.5), _weight("value", value)]
    return write_board(path, nodes=nodes, weights=weights, **changes)


def _write_rows(path: Path, rows: list[list[float]], **changes: Any) -> Path:
    """Write a file whose answer for white images are rows, and zeros for dark ones."""
    nodes = [
        _node("ReduceMax", "images", "brightness", keepdims=0),
        _node("Less", "brightness", "half", "is_dark"),
        _node("Where", "is_dark", "zeros", "rows", "probability"),
    ]
    weights = [_weight("half", 0.5), _weight("rows", rows), _weight("zeros", np.zeros_like(rows))]
    return write_board(path, nodes=nodes, weights=weights, **changes)


def _inspect(path: Path, folder: Path) -> tuple[int, Path]:
    """Inspect a dark image, and a white one."""
    images = folder / "images"
    images.mkdir()
    cv2.imwrite(str(images / "dark.png"), PIXELS)
    cv2.imwrite(str(images / "white.png"), ODD)
    return main([str(path), str(images), "--out", str(folder / "out")]), folder / "out"


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize(
    "changes",
    [{}, {"large_px": 0}, {"scaling": {"size_px": None, "factor": 0.5}}, {"review": [0.2, 0.8]}],
)
def test_a_map_of_no_probabilities_is_for_review(
    value: float,
    changes: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = _write_map(tmp_path / "a.inspect", value, **changes)
    code, out = _inspect(path, tmp_path)
    assert code == 3
    dark, white = _read(out / "images.csv")
    assert (dark["image"], dark["verdict"]) == ("dark.png", "good")
    assert (white["image"], white["score"], white["verdict"]) == ("white.png", "", "review")
    (bad,) = _read(out / "bad.csv")
    assert bad["image"] == "white.png"
    assert "not in 0..1" in bad["reason"]
    assert capsys.readouterr().out.startswith("2 images: 1 good, 1 review;")
    inspector = Inspector(path)
    assert inspector(PIXELS).verdict == "good"
    with pytest.raises(AnswerError, match=r"not in 0\.\.1"):
        inspector(ODD)


@pytest.mark.parametrize("value", WRONG)
def test_a_label_of_no_probability_is_for_review(value: float, tmp_path: Path) -> None:
    path = _write_rows(tmp_path / "a.inspect", [[0.4, value]], **LABELS)
    code, out = _inspect(path, tmp_path)
    assert code == 3
    assert [row["label"] for row in _read(out / "labels.csv")] == ["a", "review"]
    assert len(_read(out / "bad.csv")) == 1
    with pytest.raises(AnswerError):
        Inspector(path)(ODD)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("column", range(5))
@pytest.mark.parametrize("stride_px", [None, [48, 48]])
def test_boxes_of_no_probability_are_in_no_table(
    value: float, column: int, stride_px: list[int] | None, tmp_path: Path
) -> None:
    row = [0.1, 0.1, 0.4, 0.4, 0.9]
    row[column] = value
    rules = {**BOXES["boxes"], "stride_px": stride_px}
    path = _write_rows(tmp_path / "a.inspect", [[row]], **{**BOXES, "boxes": rules})
    code, out = _inspect(path, tmp_path)
    assert code == 3
    table = json.loads((out / "detections.json").read_text())
    assert [image["file_name"] for image in table["images"]] == ["dark.png"]
    assert [file.name for file in (out / "labels").iterdir()] == ["dark.txt"]
    assert len(_read(out / "bad.csv")) == 1


def test_a_box_that_ends_before_it_begins_is_an_error(tmp_path: Path) -> None:
    path = _write_rows(tmp_path / "a.inspect", [[[0.4, 0.1, 0.1, 0.4, 0.9]]], **BOXES)
    with pytest.raises(AnswerError, match="a box whose end is before its start"):
        Inspector(path)(ODD)


def test_rounding_beyond_1_is_1(tmp_path: Path) -> None:
    verdict = Inspector(_write_map(tmp_path / "a.inspect", 1.0005))(ODD)
    assert (verdict.verdict, verdict.score, verdict.probability.max()) == ("defect", 1, 1)


@pytest.mark.parametrize("is_answer", [False, True])
def test_golden_answers_of_nan_are_refused(is_answer: bool, tmp_path: Path) -> None:
    expected = np.full((1, 64, 64), NAN if is_answer else 1, np.float32)
    parts = {"golden/0.npy": encode_array(ODD[None]), "golden/0_answer.npy": encode_array(expected)}
    path = _write_map(tmp_path / "a.inspect", 1 if is_answer else NAN, golden=1, parts=parts)
    with pytest.raises(BoardError, match="golden input 0"):
        Inspector(path)


@pytest.mark.parametrize("kind", ["Concat", "ReduceMax"])
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_an_answer_of_another_form_is_refused(
    kind: str, axis: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [_node("Concat", "images", "images", "probability", axis=axis)]
    if kind == "ReduceMax":
        nodes = [_node("ReduceMax", "images", "axes", "probability", keepdims=0)]
    path = write_board(tmp_path / "a.inspect", nodes=nodes, weights=[_count("axes", [axis])])
    code, _ = _inspect(path, tmp_path)
    assert code == 4
    assert "is needed" in capsys.readouterr().err


def test_a_net_that_fails_at_an_image_leaves_the_others(tmp_path: Path) -> None:
    nodes = [  # a white image asks for 4 GiB of zeros
        _node("ReduceMax", "images", "brightness", keepdims=0),
        _node("Mul", "brightness", "most", "count"),
        _node("Cast", "count", "whole", to=onnx.TensorProto.INT64),
        _node("Unsqueeze", "whole", "axes", "shape"),
        _node("ConstantOfShape", "shape", "zeros"),
        _node("ReduceSum", "zeros", "sum", keepdims=0),
        _node("Add", "images", "sum", "probability"),
    ]
    weights = [_weight("most", 2**30), _count("axes", [0])]
    path = write_board(tmp_path / "a.inspect", nodes=nodes, weights=weights)
    code, out = _inspect(path, tmp_path)
    assert code == 3
    assert [row["verdict"] for row in _read(out / "images.csv")] == ["good", "review"]
    assert (
        "needs more than 1.5 GiB: allow more (--memory-gib" in _read(out / "bad.csv")[0]["reason"]
    )


def test_features_of_nan_withdraw_a_guarantee() -> None:
    guarantee = Guarantee("misses <= 0.1", ((0.5, 0.1, 0.0),) * 60)
    rows = np.tile([0.5, 0.1, 0.0], (60, 1))
    assert guarantee.find_drift(rows) is None
    for value in (NAN, INF):
        rows[7, 1] = value
        assert guarantee.find_drift(rows) == "contrast"
