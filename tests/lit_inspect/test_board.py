"""The ``.inspect`` file: no damage and no foreign part passes."""

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lit_inspect.board import MANIFEST, encode_board, read_board
from lit_inspect.errors import BoardError, UsageError
from lit_inspect.inspector import Inspector
from tests.lit_inspect.boards import write_board

PARTS = {"net.onnx": b"graph" * 9, "golden/0.npy": b"pixels"}


def _seal(data: bytes) -> bytes:
    return data[:-64] + hashlib.sha256(data[:-64]).hexdigest().encode()


def _pack(manifest: object, parts: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr(MANIFEST, json.dumps(manifest))
        for name, part in parts.items():
            archive.writestr(name, part)
        archive.comment = bytes(64)
    return _seal(stream.getvalue())


def _list_digests(parts: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def test_parts_come_back_and_equal_parts_give_equal_bytes(tmp_path: Path) -> None:
    data = encode_board({"task": "maps"}, PARTS)
    assert data == encode_board({"task": "maps"}, PARTS)
    (tmp_path / "a.inspect").write_bytes(data)
    board = read_board(tmp_path / "a.inspect")
    assert board.parts == PARTS
    assert board.manifest == {"format": 1, "task": "maps", "sha256": _list_digests(PARTS)}


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.inspect"
    data = encode_board({}, PARTS)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(BoardError, match=r"damaged, or not an \.inspect file"):
            read_board(path)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 200])
def test_a_cut_file_is_refused(length: int, tmp_path: Path) -> None:
    (tmp_path / "a.inspect").write_bytes(encode_board({}, PARTS)[:length])
    with pytest.raises(BoardError):
        read_board(tmp_path / "a.inspect")
    assert BoardError.exit_code == 4


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.inspect"
    zeros = {"net.onnx": bytes(10**7)}
    manifest = {"format": 1, "sha256": _list_digests(zeros)}
    cases = {
        "compressed": _pack(manifest, zeros, zipfile.ZIP_DEFLATED),
        "not those that inspect.json lists": _pack(manifest, {**zeros, "../../x": b""}),
        "of format 2, but this release reads 1": _pack({**manifest, "format": 2}, zeros),
        "not an .inspect file": _pack([1], zeros),
        "not a zip file": _seal(bytes(500)),
    }
    for text, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(BoardError, match=text):
            read_board(path)
    with pytest.raises(UsageError, match="No such file"):
        read_board(tmp_path / "b.inspect")


def test_the_runtime_loads_neither_torch_nor_lit_data() -> None:
    code = "import sys, lit_inspect.__main__; print({'torch', 'lit_data', 'lightning'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_missing_onnxruntime_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_board(tmp_path / "a.inspect")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # whose import fails now
    with pytest.raises(UsageError, match="needs onnxruntime: pip install onnxruntime"):
        Inspector(tmp_path / "a.inspect")
