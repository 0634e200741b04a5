"""Folders of a web server on loopback that misbehaves."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf

from lit_data.core.addresses import RemoteOptions
from lit_data.core.errors import DataError
from lit_data.images.scope import Scope
from lit_data.wings.remote import Root
from tests.wings.remote.servers import WebServer

FILES = {f"set/{number % 3}/{number}.png": os.urandom(2000 + number) for number in range(9)}
Fetch = Callable[..., dict[str, bytes]]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with WebServer().running() as server:
        server.files |= FILES
        yield server


@pytest.fixture
def fetch(web: WebServer, tmp_path: Path) -> Fetch:
    def read(folder: str = "set", scope: Scope | None = None, **options: Any) -> dict[str, bytes]:
        chosen = RemoteOptions(**{"backoff_s": 0.001, "retries": 3, "timeout_s": 5, **options})
        root = Root(f"{web.url}/{folder}", tmp_path / "remote", chosen, scope)
        root.refresh()
        paths = (path for path in root.folder.rglob("*") if path.is_file())
        return {path.relative_to(root.folder).as_posix(): path.read_bytes() for path in paths}

    return read


def _below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(f"{folder}/"): content for name, content in files.items()}


def test_index_pages_are_followed(web: WebServer, fetch: Fetch) -> None:
    web.files |= {"set/with space/ä #1%.png": b"odd", "set/.hidden/x.png": b"no"}
    web.files["other/y.png"] = b"no"
    assert fetch() == _below("set", FILES) | {"with space/ä #1%.png": b"odd"}
    assert not [path for _, path in web.asked if ".hidden" in path or "other" in path]
    assert web.most_busy <= 16
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("lit_data", "asyncio"))]


@pytest.mark.parametrize(
    "faults",
    [[503, 503], [500], [429, 408], ["cut"], ["cut", "hang", 502]],
    ids=lambda faults: str(faults),
)
def test_faults_that_pass_are_passed(web: WebServer, fetch: Fetch, faults: list[int | str]) -> None:
    web.faults["set/0/0.png"] = list(faults)
    hangs = "hang" in faults  # a busy machine may then need more tries for other files too
    assert fetch(timeout_s=0.4 if hangs else 5, retries=9) == _below("set", FILES)
    assert hangs or web.asked["GET", "set/0/0.png"] == len(faults) + 1


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (503, r"the server returns 503 \(.*\), 4 times; try again later, or raise data\.remote"),
        ("cut", r"no connection \(.*\), 4 times"),
        ("hang", r"no answer before the timeout, 4 times"),
    ],
)
def test_faults_that_stay_end(web: WebServer, fetch: Fetch, fault: int | str, match: str) -> None:
    web.faults["set/0/0.png"] = [fault] * 9
    with pytest.raises(DataError, match=rf"0/0\.png: {match}"):
        fetch(timeout_s=0.2 if fault == "hang" else 5)


@pytest.mark.parametrize(
    ("status", "match"),
    [(403, r"access denied \(403\)(.|\n)*credentials belong"), (404, r"not found \(404\)")],
)
def test_what_is_forbidden_or_missing_is_not_asked_for_again(
    web: WebServer, fetch: Fetch, status: int, match: str
) -> None:
    web.faults["set/0/0.png"] = [status]
    with pytest.raises(DataError, match=match):
        fetch()
    assert web.asked["GET", "set/0/0.png"] == 1
    web.faults["set/"] = [status]
    with pytest.raises(DataError, match=match):
        fetch()
    assert fetch() == _below("set", FILES)  # and only the one that is missing was read


def _sums(files: dict[str, bytes]) -> bytes:
    named = _below("set", files).items()
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}" for name, content in named)
    return "\n".join(lines).encode()


def test_a_list_of_sums_stands_for_index_pages(web: WebServer, fetch: Fetch) -> None:
    web.indexed, web.files["set/SHA256SUMS"] = False, _sums(FILES)
    web.faults["set/0/0.png"] = ["wrong"]
    assert fetch() == _below("set", FILES)
    assert web.asked["GET", "set/0/0.png"] == 2


def test_a_list_of_names_can_be_named(web: WebServer, fetch: Fetch) -> None:
    web.indexed, web.files["set/files.txt"] = False, b"0/0.png\n1/1.png\n"
    assert set(fetch(file_list="files.txt")) == {"0/0.png", "1/1.png"}
    with pytest.raises(DataError, match=r"none\.txt: not found"):
        fetch(file_list="none.txt")


def test_names_of_a_list_are_not_trusted(web: WebServer, fetch: Fetch, tmp_path: Path) -> None:
    web.files["set/SHA256SUMS"] = b"../../evil.png\n/etc/passwd\n0/0.png\n"
    web.files["evil.png"] = b"evil"
    with pytest.raises(DataError, match="2 bad names"):
        fetch()
    assert not list(tmp_path.rglob("*.png"))


def test_a_page_for_everything_is_no_list(web: WebServer, fetch: Fetch) -> None:
    web.files["set/SHA256SUMS"] = b"<!DOCTYPE html>Welcome"
    assert fetch() == _below("set", FILES)


def test_folders_without_an_index_say_what_to_do(web: WebServer, fetch: Fetch) -> None:
    web.files["plain/"] = b"hello"
    message = r"plain/: not an index page but application/octet-stream; .*SHA256SUMS"
    with pytest.raises(DataError, match=message):
        fetch("plain")
    for depth in range(40):
        web.pages["loop/" + "x/" * depth] = b"<html><a href='x/'>x</a></html>"
    with pytest.raises(DataError, match="index pages never end"):
        fetch("loop")
    web.indexed = False
    with pytest.raises(DataError, match=r"/set/?: not found \(404\)"):
        fetch()


def test_files_arrive_as_they_are_stored(web: WebServer, fetch: Fetch) -> None:
    web.headers["Content-Encoding"] = "gzip"  # what some servers say of every .nii.gz
    web.files = {"set/a.nii.gz": b"\x1f\x8b not undone"}
    web.files["set/SHA256SUMS"] = b"a.nii.gz\n"
    assert fetch() == {"a.nii.gz": b"\x1f\x8b not undone"}


def test_signatures_of_a_redirect_are_not_shown(
    web: WebServer, fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    web.redirects["set/0/0.png"] = f"{web.url}/gone.png?X-Amz-Signature=hunter2SECRET"
    with pytest.raises(DataError, match=r"0/0\.png: not found") as caught:
        fetch()
    chain = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert "hunter2SECRET" not in f"{chain}{caplog.text}"


def test_credentials_come_from_the_users_configuration_or_netrc(
    web: WebServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2SECRET\n")
    (tmp_path / "netrc").chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setenv("NETRC", str(tmp_path / "netrc"))
        fetch()
    assert web.last_authorization is not None
    assert web.last_authorization.startswith("Basic ")
    headers = {"Authorization": "Bearer hunter2"}
    monkeypatch.setitem(conf, "https", {"client_kwargs": {"headers": headers}})
    assert fetch() == _below("set", FILES)
    assert web.last_authorization == "Bearer hunter2"
