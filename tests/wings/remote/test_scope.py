import pytest

from lit_data.core.addresses import parse_address
from lit_data.core.errors import ConfigError, DataError
from lit_data.images.scope import Scope, check_names, parse_list
from lit_data.wings.remote.web import join_url, read_index

ADDRESS = parse_address("s3://bucket/set")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.png", True),
        ("deep/er/a.PNG", True),
        ("notes.txt", False),
        ("views.json", True),
        ("x/views.json", True),  # lists may lie in the folder of all images
        (".hidden.png", False),
        (".git/a.png", False),
        ("deep/__MACOSX/a.png", False),
        ("other/x.tif", False),
        ("masks/x.tif", True),
        ("../a.png", True),  # to be reported, not left out
        ("a//b.png", True),
    ],
)
def test_scope_of_images(name: str, wanted: bool) -> None:
    scope = Scope.of_images(("**/*.[pP][nN][gG]",), masks="./masks", also=("views.json",))
    assert scope.wants(name) is wanted


def test_scope_of_images_and_what_says_what_they_show() -> None:
    scope = Scope.of_images(("images/*",), beside=(".json", ".txt"))
    names = ["images/a.png", "a.png", "deep/boxes.JSON", ".boxes.json", "a.zip"]
    assert [name for name in names if scope.wants(name)] == ["images/a.png", "deep/boxes.JSON"]
    assert scope.key != Scope.of_images(("images/*",)).key


def test_scopes_that_want_the_same_have_one_key() -> None:
    assert Scope(("b", "a"), (".png", ".tif")).key == Scope(("a", "b", "a"), (".tif", ".png")).key
    assert Scope().key != Scope(("**/*",), (".png",)).key
    assert Scope.of_images(("**/*",), masks="/else/where").patterns == ("**/*",)
    with pytest.raises(ConfigError, match="leaves the folder"):
        Scope(("../*",))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("../../etc/passwd", "leads out of the folder"),
        ("/etc/passwd", "leads out of the folder"),
        ("a/../../b", "leads out of the folder"),
        ("a//b", "part without a name"),
        ("a/./b", "part without a name"),
        ("a\0b", "zero byte"),
        ("\ud800", "not valid text"),
        ("x" * 256, "longer than a local file system allows"),
        ("x/" * 2000 + "y", "longer than a local file system allows"),
    ],
)
def test_names_that_cannot_stand_on_the_disk(name: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        check_names([name, "good.png"], ADDRESS)


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["a/B.png", "a/b.png"], "in case or accents only"),
        (["\u00e9.png", "e\u0301.png"], "in case or accents only"),
        (["a", "a/b/c.png"], r"s3://bucket/set/a: is a file, and the folder of 'a/b/c\.png'"),
    ],
)
def test_names_that_cannot_stand_beside_one_another(names: list[str], match: str) -> None:
    with pytest.raises(DataError, match=match):
        check_names(names, ADDRESS)
    check_names(names[:1], ADDRESS)


def test_lists_of_files() -> None:
    one, two = "a" * 64, "B" * 64
    text = f"\ufeff# made today\n{one}  x/1.png\r\n{two} *./2.png\n\nwith space.png\n"
    found = parse_list(f"{text}{one}  x/1.png\n".encode(), "list")
    assert found == {"x/1.png": one, "2.png": two.lower(), "with space.png": None}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"<!DOCTYPE html>", "line 1: is HTML"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"# nothing\n", "names no file"),
        (f"{'a' * 64}  x\n{'b' * 64}  x\n".encode(), "line 2: x appears twice"),
    ],
)
def test_bad_lists(content: bytes, match: str) -> None:
    with pytest.raises(DataError, match=match):
        parse_list(content, "list")


def test_index_pages() -> None:
    links = [
        "a.png",
        "b%20c.png",
        "/data/set/d.png",
        "http://host/data/set/e.png",
        "sub/",
        "%E9.png",
        "..%2Fx.png",
        "../",
        "/",
        "/data/",
        "?C=N;O=D",
        "f.png?download=1",
        "http://other/data/set/g.png",
        "https://host/data/set/h",
        "",
        "#top",
        "mailto:me@host",
        "http://[bad/",
    ]
    shown = "".join(f"<A class=x HREF='{link}'>{link}</A>" for link in links)
    page = f"<html>{shown}<img src='no.png'>"
    files, folders = read_index(page, "http://host/data/set/")
    assert files == ["a.png", "b c.png", "d.png", "e.png", "\udce9.png", "../x.png"]
    assert folders == ["sub"]
    assert join_url("http://host", "b c/\udce9#.png") == "http://host/b%20c/%E9%23.png"
