"""A file of a stranger takes no more memory and time than it may, and nothing that is no file."""

import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_inspect import AnswerError, BoardError, InspectError, Inspector, Limits, UsageError
from lit_inspect.board import NET, encode_board, read_board
from lit_inspect.images import ReadOptions, open_image
from lit_inspect.net import Net
from tests.lit_inspect.boards import write_board
from tests.lit_inspect.test_answers import PIXELS, _count, _node

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
ROOT = Path(__file__).resolve().parents[2]
TINY = Limits(seconds=0.2)


def _write_loop(path: Path, **changes: Any) -> Path:
    """Write a file whose net never comes to an end."""
    helper, kinds = onnx.helper, onnx.TensorProto
    ends = [
        helper.make_tensor_value_info("turn", kinds.INT64, []),
        helper.make_tensor_value_info("goes_on", kinds.BOOL, []),
        helper.make_tensor_value_info("value", kinds.FLOAT, None),
    ]
    nodes = [_node("Identity", "goes_on", "next"), _node("Identity", "value", "result")]
    results = [
        helper.make_tensor_value_info("next", kinds.BOOL, []),
        helper.make_tensor_value_info("result", kinds.FLOAT, None),
    ]
    body = helper.make_graph(nodes, "body", ends, results)
    loop = _node("Loop", "turns", "true", "images", "probability", body=body)
    always = onnx.numpy_helper.from_array(np.array(True), "true")
    return write_board(path, nodes=[loop], weights=[_count("turns", 2**62), always], **changes)


def _write_zeros(path: Path, count: int) -> Path:
    """Write a file whose net adds up constants that it makes."""
    nodes = [
        _node("ConstantOfShape", "shape", "zeros"),
        _node("ReduceSum", "zeros", "sum", keepdims=0),
        _node("Add", "images", "sum", "probability"),
    ]
    return write_board(path, nodes=nodes, weights=[_count("shape", [count])])


def _run_command(path: Path, folder: Path, *options: str) -> str:
    """Run the command, which ends with 4; return the line that it writes."""
    cv2.imwrite(str(folder / "a.png"), PIXELS)
    words = [str(path), str(folder / "a.png"), "--out", str(folder / "out"), "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "lit_inspect", *words, *options],
        capture_output=True, text=True, check=False, timeout=100, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
    return done.stderr


def test_an_endless_loop_is_stopped(tmp_path: Path) -> None:
    inspector = Inspector(_write_loop(tmp_path / "a.inspect"), limits=TINY)
    with pytest.raises(AnswerError, match=r"more than 0\.2 s: .*--seconds"):
        inspector(PIXELS)


def test_golden_answers_share_the_seconds_of_one(tmp_path: Path) -> None:
    path = write_board(tmp_path / "a.inspect")
    images = np.zeros((1, 1, 8, 8), np.float32)
    net = Net(read_board(path).parts[NET], 1, Limits(seconds=1e-9))
    with net.hurrying(), pytest.raises(AnswerError, match="the net took more than 1e-09 s"):
        net.run(images)
    assert net.run(images).shape == images.shape


@pytest.mark.parametrize("count", [2**28, 2**36])
def test_memory_is_bounded(count: int, tmp_path: Path) -> None:
    path = _write_zeros(tmp_path / "a.inspect", count)
    with pytest.raises(AnswerError, match=r"needs more than 0\.5 GiB"):
        Inspector(path, limits=Limits(memory_bytes=2**29))(PIXELS)


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": float("nan")}, {"memory_bytes": 0}])
def test_bounds_have_a_range(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="need more than 0"):
        Limits(**limits)  # type: ignore[arg-type]  # of either


def test_a_net_of_other_ends_is_refused(tmp_path: Path) -> None:
    path = write_board(tmp_path / "a.inspect", nodes=[_node("Cast", "images", "probability", to=1)])
    assert Inspector(path)(PIXELS).verdict == "good"
    write_board(path, nodes=[_node("Cast", "images", "probability", to=11)])
    with pytest.raises(BoardError, match=r"its net .*(to one array of float32|cannot be opened)"):
        Inspector(path)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    board = read_board(write_board(tmp_path / "a.inspect"))
    graph = board.parts[NET].replace(b"images", b"image\xff")
    (tmp_path / "a.inspect").write_bytes(encode_board(board.manifest, {NET: graph}))
    with pytest.raises(BoardError, match="its net cannot be opened"):
        Inspector(tmp_path / "a.inspect")


def _make_pipe(path: Path) -> None:
    os.mkfifo(path)


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def _make_folder(path: Path) -> None:
    path.mkdir()


def _link_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_make_pipe, _make_socket, _make_folder, _link_device])
def test_what_is_no_regular_file_is_refused(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.inspect"
    make(path)
    with pytest.raises(InspectError):
        read_board(path)
    with pytest.raises(InspectError):
        open_image(path, ReadOptions())


def test_a_file_of_nothing_is_not_read_into_memory(tmp_path: Path) -> None:
    for size_bytes in (2**31 + 65, 2**40):
        with (tmp_path / "a.inspect").open("wb") as file:
            file.truncate(size_bytes)
        began_s = time.monotonic()
        with pytest.raises(BoardError, match="more than 2147483648 bytes"):
            read_board(tmp_path / "a.inspect")
        assert time.monotonic() - began_s < 5


def test_a_directory_without_end_is_not_read(tmp_path: Path) -> None:
    end = b"PK\x05\x06" + bytes(4) + b"\xff" * 8 + bytes(4) + b"\x40\0"
    for data in (end, b"PK\x06\x07" + bytes(16) + end, b"", bytes(30)):
        sealed = data + hashlib.sha256(data).hexdigest().encode()
        (tmp_path / "a.inspect").write_bytes(sealed)
        with pytest.raises(BoardError, match="not a zip file of at most 1000 parts"):
            read_board(tmp_path / "a.inspect")


@pytest.mark.slow  # texts that fill the memory
def test_texts_without_end_end_the_command(tmp_path: Path) -> None:
    nodes = [_node("StringConcat", "text", "text", "text0")]
    for number in range(33):
        nodes.append(_node("StringConcat", *[f"text{number}"] * 2, f"text{number + 1}"))
    nodes += [
        _node("Size", "text33", "count"),
        _node("Cast", "count", "number", to=onnx.TensorProto.FLOAT),
        _node("Mul", "images", "number", "probability"),
    ]
    text = onnx.numpy_helper.from_array(np.array(["a"], object), "text")
    path = write_board(tmp_path / "a.inspect", nodes=nodes, weights=[text])
    assert _run_command(path, tmp_path, "--seconds", "60").startswith(
        "lit_inspect: the net needs more than 1.5 GiB"
    )


@pytest.mark.slow  # one layer that computes for seconds
def test_a_layer_without_end_ends_the_command(tmp_path: Path) -> None:
    nodes = [
        _node("ConstantOfShape", "shape", "zeros"),
        _node("MatMul", "zeros", "zeros", "product"),
        _node("ReduceMax", "product", "most", keepdims=0),
        _node("Add", "images", "most", "probability"),
    ]
    path = write_board(tmp_path / "a.inspect", nodes=nodes, weights=[_count("shape", [9000, 9000])])
    assert _run_command(path, tmp_path, "--seconds", "2").startswith(
        "lit_inspect: the net took more than 2 s"
    )
