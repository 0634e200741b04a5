"""Files are there as a whole or as they were before."""

import os
import socket
from pathlib import Path

import pytest

from lit_data.core.errors import DataError, StoreError
from lit_data.core.files import (
    PART,
    is_there,
    open_regular,
    replacing,
    write_text,
)
from lit_data.core.temp import build_lock, hold_lock, temp_folder
from lit_inspect.files import fit_name
from lit_inspect.replacement import replacing_by_path


def test_a_file_takes_its_place_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with replacing(path) as file:
        file.write(b"now")
        assert path.read_text() == "before"
        (part,) = [name for name in tmp_path.iterdir() if name != path]
        assert PART.fullmatch(part.name)
    assert path.read_text() == "now"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def write_half() -> None:
        with replacing_by_path(path) as part:
            part.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    refused = r"cannot write .*none/a.txt: No such file or directory; check the path"
    with pytest.raises(StoreError, match=refused):
        write_text(tmp_path / "none" / "a.txt", "text")


def test_nobody_else_may_write_what_is_written_without_a_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_text(tmp_path / "a.txt", "a")
        with hold_lock(tmp_path / "b.lock"), build_lock(tmp_path, wait_s=1, is_done=lambda: False):
            pass
        with temp_folder(tmp_path) as temp:
            assert not temp.stat().st_mode & 0o002
    finally:
        os.umask(before)
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b.lock", ".lock"}
    assert not any(path.stat().st_mode & 0o002 for path in tmp_path.iterdir())


def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 107 bytes
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    kinds = {
        "pipe": "a named pipe",
        "link": "a named pipe",
        "folder": "a folder",
        "socket": "a socket",
        "/dev/zero": "a device",
    }
    for name, kind in kinds.items():
        with pytest.raises(DataError, match=rf"not a regular file \({kind}\)"):
            open_regular(name)


def test_a_link_to_a_file_is_opened_where_links_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "link").symlink_to("a")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"
    with pytest.raises(OSError, match="link"):
        open_regular(tmp_path / "link", links=False)
    (tmp_path / "broken").symlink_to("gone")
    assert is_there(tmp_path / "broken")
    assert not is_there(tmp_path / "gone")


@pytest.mark.parametrize("letter", ["n", "ü"])
def test_names_of_results_fit_and_stay_apart(letter: str, tmp_path: Path) -> None:
    assert fit_name("cam/short.png", ".png") == "cam/short.png.png"
    count = 247 // len(os.fsencode(letter))
    names = [f"cam/{letter * count}{end}.png" for end in ("", "a", "b", "abcd")]
    results = [fit_name(name, ".nii.gz") for name in names]
    assert len(set(results)) == len(names)
    for result in results:
        assert result.startswith(f"cam/{letter * 100}"), result
        assert result.endswith(".nii.gz")
        assert len(os.fsencode(result.removeprefix("cam/"))) <= 255
        (tmp_path / result).parent.mkdir(exist_ok=True)
        (tmp_path / result).write_bytes(b"")
