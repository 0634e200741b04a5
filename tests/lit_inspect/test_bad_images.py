"""Images that are none are listed, whatever they hold; the others get their verdict."""

import csv
import errno
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_inspect.__main__ import main
from lit_inspect.images import ReadOptions, open_image
from tests.lit_inspect.boards import BOXES, write_board

GOOD = np.arange(4096, dtype=np.uint8).reshape(64, 64)
SHAPE = "{'descr':'|u1','fortran_order':False,'shape':%s}"


def _npy(header: str, version: int = 1) -> bytes:
    text = header.encode() + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes((version, 0)) + length + text


def _tiff(*tags: tuple[int, int]) -> bytes:
    data = b"II*\0" + struct.pack("<IH", 8, len(tags))
    for tag, value in tags:
        data += struct.pack("<HHII", tag, 3, 1, value)
    return data + bytes(4)


def _chunk(name: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + checksum


def _png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _jpeg(height: int, width: int) -> bytes:
    data = bytearray(cv2.imencode(".jpg", GOOD)[1].tobytes())
    frame = data.find(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def _bmp(height: int, width: int) -> bytes:
    data = bytearray(cv2.imencode(".bmp", GOOD)[1].tobytes())
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


GRAY = ((258, 8), (259, 1), (262, 1), (277, 1))
HEAD = struct.pack(">IIBBBBB", 65535, 65535, 8, 0, 0, 0, 0)
FILES = {
    "no_size.tif": _tiff(*GRAY),
    "no_height.tif": _tiff((256, 64), *GRAY),
    "zero.tif": _tiff((256, 0), (257, 0), *GRAY),
    "huge.tif": _tiff((256, 65535), (257, 65535), *GRAY),
    "tiles.tif": _tiff((256, 64), (257, 64), (322, 65520), (323, 65520), (324, 8), *GRAY),
    "loop.tif": b"II*\0" + bytes(4),
    "beyond.tif": b"II*\0\xff\xff\xff\xff",
    "minus.npy": _npy(SHAPE % f"({'-' * 9000}1,1)"),
    "open.npy": _npy("(" * 9000),
    "brackets.npy": _npy(SHAPE % f"{'(' * 150}1{')' * 150}"),
    "nested.npy": _npy(SHAPE % f"{'[' * 9000}{']' * 9000}"),
    "long.npy": _npy(" " * 60000),
    "endless.npy": b"\x93NUMPY\x02\0\xff\xff\xff\xff",
    "huge.npy": _npy(SHAPE % "(65535,65535)"),
    "power.npy": _npy(SHAPE % f"({10**4000},1)"),
    "below.npy": _npy(SHAPE % "(-1,-5)"),
    "zero.npy": _npy(SHAPE % "(0,5)"),
    "flat.npy": _npy(SHAPE % "(1,)"),
    "deep.npy": _npy(SHAPE % "(1,1,1,1)"),
    "cut.npy": _npy(SHAPE % "(5,5)") + bytes(24),
    "objects.npy": _npy("{'descr':'|O','fortran_order':False,'shape':(1,1)}") + b"cos\nsystem\n",
    "texts.npy": _npy("{'descr':'<U9','fortran_order':False,'shape':(1,1)}") + bytes(40),
    "version.npy": _npy("", 3)[:6] + b"\x09\0",
    "letters.npy": b"\x93NUMPY",
    "no_size.png": _png(_chunk(b"IHDR", b"\0"), _chunk(b"IEND", b"")),
    "late.png": _png(_chunk(b"IDAT", b""), _chunk(b"IHDR", HEAD), _chunk(b"IEND", b"")),
    "chunk.png": _png(struct.pack(">I4s", 2**32 - 1, b"IDAT") + b"x" * 100),
    "huge.png": _png(_chunk(b"IHDR", HEAD), _chunk(b"IEND", b"")),
    "zero.png": _png(_chunk(b"IHDR", bytes(13)), _chunk(b"IEND", b"")),
    "huge.jpg": _jpeg(65500, 65500),
    "zero.jpg": _jpeg(0, 0),
    "segments.jpg": b"\xff\xd8" + b"\xff\xe0\0\x02" * 20000 + b"\xff\xd9",
    "short.jpg": b"\xff\xd8\xff\xe0\0\0\xff\xd9",
    "huge.bmp": _bmp(32700, 32700),
    "zero.bmp": _bmp(0, 0),
    "below.bmp": _bmp(-64, -64),
    "letters.bmp": b"BM",
    "empty.png": b"",
    "text.png": b"hello",
}


@pytest.mark.parametrize("name", FILES)
def test_an_image_that_is_none_is_listed(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / name).write_bytes(FILES[name])
    cv2.imwrite(str(tmp_path / "images" / "other.png"), GOOD)
    board, out = write_board(tmp_path / "a.inspect"), tmp_path / "out"
    assert main([str(board), str(tmp_path / "images"), "--out", str(out)]) == 3
    assert (out / "images.csv").read_text().count("other.png") == 1
    with (out / "bad.csv").open(newline="") as file:
        (bad,) = csv.DictReader(file)
    assert bad["image"].endswith(name)
    assert name in bad["reason"]
    assert capfd.readouterr().err == ""


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"\xff\xd8\xff")
        file.truncate(2**40)


@pytest.mark.parametrize("make", [_pipe, _device, _sparse])
def test_what_is_no_file_is_listed(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    make(tmp_path / "images" / "odd.jpg")
    cv2.imwrite(str(tmp_path / "images" / "other.png"), GOOD)
    words = [str(write_board(tmp_path / "a.inspect")), str(tmp_path / "images")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 3
    assert "odd.jpg" in (tmp_path / "out" / "bad.csv").read_text()


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images" / "deep").mkdir(parents=True)
    cv2.imwrite(str(tmp_path / "images" / "a.png"), GOOD)
    words = [str(write_board(tmp_path / "a.inspect")), "--out", str(tmp_path / "out")]
    assert main([*words, str(tmp_path / "none")]) == 2
    assert "none: No such file or directory" in capsys.readouterr().err
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert main([*words, str(tmp_path / "images")]) == 2
    assert "deep: Permission denied" in capsys.readouterr().err


def test_an_array_that_is_cut_while_it_is_read_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, GOOD)
    image = open_image(path, ReadOptions())
    os.truncate(path, 1000)
    with pytest.raises(Exception, match=r"a\.npy: truncated array"):
        image.read(0, 64)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Exception, match=r"a\.npy: not a regular file"):
        image.read(0, 64)


@pytest.mark.parametrize("name", ["maps", "labels", "maps/deep", "detections.json", "images.csv"])
def test_nothing_is_written_through_a_link(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    for folder in (elsewhere, out, tmp_path / "images" / "deep"):
        folder.mkdir(parents=True)
    (elsewhere / "file").write_text("of another program")
    (out / name).parent.mkdir(exist_ok=True)
    is_table = "." in name
    (out / name).symlink_to(elsewhere / "file" if is_table else elsewhere)
    cv2.imwrite(str(tmp_path / "images" / "deep" / "a.png"), GOOD)
    helper = pytest.importorskip("onnx").helper
    changes = BOXES if name in ("labels", "detections.json") else {}
    box = helper.make_tensor("box", 1, [1, 1, 5], [0.1, 0.1, 0.9, 0.9, 0.9])
    nodes = [helper.make_node("Constant", [], ["probability"], value=box)] if changes else None
    board = write_board(tmp_path / "a.inspect", nodes=nodes, **changes)
    code = main([str(board), str(tmp_path / "images"), "--out", str(out)])
    assert [path.name for path in elsewhere.iterdir()] == ["file"]
    assert (elsewhere / "file").read_text() == "of another program"
    if is_table:
        assert (code, (out / name).is_symlink()) == (0, False)
    else:
        assert code == 4
        assert "is a link, and nothing is written through links" in capsys.readouterr().err


def test_names_are_shown_as_they_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    for name in (b"a\x1b[2J\n.png", b"n\xff.png", b"=b\x1b.png"):
        cv2.imwrite(str(tmp_path / "x.png"), GOOD)
        (tmp_path / "x.png").rename(tmp_path / "images" / os.fsdecode(name))
    (tmp_path / "images" / "=\x1bbad.png").write_bytes(b"x")
    words = [str(write_board(tmp_path / "a.inspect")), str(tmp_path / "images")]
    assert main([*words, "--out", str(tmp_path / "\x1bout")]) == 3
    captured = capsys.readouterr()
    assert captured.out.removesuffix("\n").isprintable()
    for table in (tmp_path / "\x1bout").glob("*.csv"):
        assert "".join(table.read_text(encoding="utf-8").splitlines()).isprintable()
    rows = (tmp_path / "\x1bout" / "images.csv").read_text()
    assert "\n'a\\x1b[2J\\x0a.png," in rows
    assert "\n'n\\xff.png," in rows
    assert "\n'=b\\x1b.png," in rows
