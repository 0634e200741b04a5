import pytest

from lit_data.core.addresses import (
    RemoteOptions,
    check_plain,
    check_root,
    check_words,
    is_remote,
    parse_address,
)
from lit_data.core.errors import ConfigError
from lit_data.core.secrets import redact

SECRET = "hunter2SECRET"
WITH_SECRETS = [
    f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/folder",
    f"s3://key:with/slash/{SECRET}@bucket/folder",
    f"https://user:{SECRET}@host/data",
    f"https://{SECRET}@host/data",
    f"https://host/data/?X-Amz-Credential=abc&X-Amz-Signature={SECRET}",
    f"https://host/data?token={SECRET}",
    f"https://account.blob.core.windows.net/c?sv=2024&sig={SECRET}",
    f"https://host/data#access_token={SECRET}",
    f"sftp://user:{SECRET}@host:22/data",
    f"simplecache::s3://key:{SECRET}@bucket",
    f"http:/user:{SECRET}@host/data",
    f"https:user:{SECRET}@host/data",
    f"s3:///key:{SECRET}@bucket",
    f"https://user:pass word {SECRET}@host",
    f"https: //user:{SECRET}@host",
]


@pytest.mark.parametrize("root", WITH_SECRETS)
def test_credentials_are_refused_and_never_repeated(root: str) -> None:
    for refuse in (
        lambda: check_root(root),
        lambda: check_plain({"data": {"masks": [root]}}),
        lambda: check_words(["seed=1", f"data.root='{root}'"]),
        lambda: check_words([root]),
        lambda: RemoteOptions(endpoint_url=root),
    ):
        message = "holds a user name, password, token or signature"
        with pytest.raises(ConfigError, match=message) as caught:
            refuse()
        assert SECRET not in str(caught.value)
        assert "AWS_PROFILE" in str(caught.value)
    assert SECRET not in redact(f"GET {root}: 500, message='Oh', url='{root}'")


def test_known_secrets_are_cut_out_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    text = f"signed with {SECRET} of AKIAIOSFODNN7EXAMPLE\nAuthorization: Bearer abc.def, next"
    assert redact(text) == "signed with *** of *** Authorization: ***, next"


BOX = "abfs://box@account.dfs.core.windows.net/data"


@pytest.mark.parametrize(
    ("root", "shown", "slug"),
    [
        ("s3://bucket/my set/", "s3://bucket/my set", "my_set"),
        ("S3://bucket", "s3://bucket", "bucket"),
        ("https://host:8080/a@b/..c/", "https://host:8080/a@b/..c", "c"),
        ("http://[::1]:80/x@y", "http://[::1]:80/x@y", "x_y"),
        (BOX, BOX, "data"),
        ("sftp://user@host/data", "sftp://user@host/data", "data"),
        ("memory://...", "memory://...", "root"),
    ],
)
def test_addresses(root: str, shown: str, slug: str) -> None:
    assert is_remote(root)
    assert str(parse_address(root)) == shown
    assert parse_address(root).slug == slug


@pytest.mark.parametrize("root", [None, "images", "/data/set", "C:\\data", "./s3:/x"])
def test_local_roots_pass(root: str | None) -> None:
    assert not is_remote(root)
    check_root(root)


@pytest.mark.parametrize(
    ("root", "match"),
    [
        ("simplecache::s3://bucket", "read through another one"),
        ("zip://a.zip", "read through another one"),
        ("file:///data", "plain path"),
        ("https://host/data?page=2", "must not contain"),
        ("s3://bucket/../other", r"without '\.\.'"),
        ("s3://", "does not name a folder"),
        ("https:///data", "does not name a folder"),
    ],
)
def test_other_addresses_are_refused(root: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_root(root)


def test_words_are_named_by_their_keys() -> None:
    check_words(["data.root=s3://bucket/a@b:c", "trainer=cpu"])
    check_words(["data.remote.endpoint_url=http://host:9000/x@y"])
    with pytest.raises(ConfigError, match=r"^'data\.root': the address holds"):
        check_words(["data.root=a,https://me:secret@host"])
    node = {"_target_": "lit_data.core.addresses.RemoteOptions", "secret": SECRET}
    message = r"unknown key 'data\.remote\.secret'.*AWS_PROFILE"
    with pytest.raises(ConfigError, match=message) as caught:
        check_plain({"data": {"remote": node}})
    assert SECRET not in str(caught.value)
