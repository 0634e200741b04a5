"""Folders of a server process on loopback that speaks S3."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.config import conf

from lit_data.core.addresses import RemoteOptions, parse_address
from lit_data.core.errors import DataError
from lit_data.wings.remote import Root
from lit_data.wings.remote.connection import S3Connection
from lit_data.wings.remote.transport import ServerTransport
from tests.wings.remote.proxy import FaultyProxy

FILES = {f"{number % 2}/{number}.png": os.urandom(1000 + number) for number in range(6)}
SECRET = "hunter2SECRET/abc"
Fetch = Callable[..., dict[str, bytes]]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def bucket(server: SimpleNamespace, request: pytest.FixtureRequest) -> str:
    name = f"b{hashlib.sha256(request.node.name.encode()).hexdigest()[:20]}"
    server.client.create_bucket(Bucket=name)
    for key, content in FILES.items():
        server.client.put_object(Bucket=name, Key=f"my set/{key}", Body=content)
    for folder in ("my set/", "my set/0/", "my set/empty/"):  # as the console makes folders
        server.client.put_object(Bucket=name, Key=folder, Body=b"")
    return name


@pytest.fixture
def fetch(
    server: SimpleNamespace, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Fetch:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE"),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")),
        ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
    ):
        monkeypatch.setenv(name, value)

    def read(**options: Any) -> dict[str, bytes]:
        chosen = RemoteOptions(
            **{"backoff_s": 0.001, "retries": 2, "endpoint_url": server.url, **options}
        )
        root = Root(f"s3://{bucket}/my set", tmp_path / "remote", chosen)
        root.refresh()
        paths = (path for path in root.folder.rglob("*") if path.is_file())
        return {path.relative_to(root.folder).as_posix(): path.read_bytes() for path in paths}

    return read


def test_a_folder_of_a_bucket(
    server: SimpleNamespace, bucket: str, fetch: Fetch, caplog: Any, tmp_path: Path
) -> None:
    def times() -> dict[str, int]:
        (folder,) = (tmp_path / "remote").glob("*/my_set")
        return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.png")}

    caplog.set_level("DEBUG")
    assert fetch() == FILES
    before = times()
    (tmp_path / "remote").rename(tmp_path / "old")
    fetch()
    assert times() == before  # as another machine sees them
    server.client.put_object(Bucket=bucket, Key="my set/1/1.png", Body=b"another")
    server.client.delete_object(Bucket=bucket, Key="my set/0/0.png")
    caplog.clear()
    left = {key: FILES[key] for key in FILES if key != "0/0.png"}
    assert fetch() == left | {"1/1.png": b"another"}
    assert "1 to read (7 bytes), 1 gone" in caplog.text
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET not in caplog.text
    assert SECRET.encode() not in written


def test_the_tag_of_an_object_is_its_sum(
    server: SimpleNamespace, bucket: str, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = hashlib.md5(b"as it was").hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(S3Connection, "find_md5", lambda self, _: tag)
        message = rf"its MD5 sum is \w+, the server states {tag}(.|\n)*6 of 6 files"
        with pytest.raises(DataError, match=message):
            fetch()
        assert fetch(checksums=False) == FILES
    # Objects made of parts have no sum.
    place = {"Bucket": bucket, "Key": "my set/large.png"}
    upload = server.client.create_multipart_upload(**place)["UploadId"]
    part = server.client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"x" * 10)
    parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
    server.client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts)
    assert fetch() == FILES | {"large.png": b"x" * 10}


def test_bad_keys_are_refused(
    server: SimpleNamespace, bucket: str, fetch: Fetch, tmp_path: Path
) -> None:
    for key in ("my set/../../evil.png", "my set//x.png", "my set/0"):
        server.client.put_object(Bucket=bucket, Key=key, Body=b"evil")
    with pytest.raises(DataError, match="3 bad names"):
        fetch()
    assert not list(tmp_path.rglob("*.png"))


def test_missing_buckets_and_credentials_say_what_to_do(
    server: SimpleNamespace,
    bucket: str,
    fetch: Fetch,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=r"s3://none/x: not found \(404\); check data\.root"):
        Root("s3://none/x", tmp_path, RemoteOptions(endpoint_url=server.url)).refresh()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(
        DataError, match=r"no credentials were found; .*AWS_PROFILE.*data\.remote\.anon=true"
    ):
        fetch()
    with monkeypatch.context() as patch:
        patch.setitem(
            conf,
            "s3",
            {"key": "writer", "secret": "writer", "config_kwargs": {"user_agent_extra": "me"}},
        )
        assert fetch() == FILES
    with pytest.raises(DataError, match=r"access denied \(403\)\n.*0/0\.png(.|\n)*6 of 6 files"):
        fetch(anon=True, endpoint_url=f"{server.url}/")  # another mirror, so all are read
    for key in FILES:
        server.client.put_object_acl(Bucket=bucket, Key=f"my set/{key}", ACL="public-read")
    assert fetch(anon=True, region="eu-west-1", endpoint_url=f"{server.url}/") == FILES


def test_a_file_is_put_again_until_it_is_there_and_never_seen_in_part(
    server: SimpleNamespace, bucket: str, fetch: Fetch, tmp_path: Path
) -> None:
    content = os.urandom(2**20)
    (tmp_path / "a.ckpt").write_bytes(content)
    key = {"Bucket": bucket, "Key": "put/a.ckpt"}
    for faults, retries in (([503, "cut", None], 20), ([403], 2)):
        with FaultyProxy(server.url, faults).running() as proxy:
            options = RemoteOptions(endpoint_url=proxy.url, backoff_s=0.001, retries=retries)
            with ServerTransport(parse_address(f"s3://{bucket}/put"), options) as transport:
                if faults == [403]:
                    (tmp_path / "a.ckpt").write_bytes(b"x" * len(content))
                    with pytest.raises(DataError, match=r"a\.ckpt: access denied \(403\)"):
                        transport.put(tmp_path / "a.ckpt", "a.ckpt")
                else:
                    transport.put(tmp_path / "a.ckpt", "a.ckpt")
                    assert transport.list_sizes("") == {"a.ckpt": len(content)}
        assert server.client.get_object(**key)["Body"].read() == content
