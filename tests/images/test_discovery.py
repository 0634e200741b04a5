"""Finding images: nothing is missed, nothing is guessed, and order depends on names only."""

import os
import socket
import time
import unicodedata
from pathlib import Path

import pytest

from lit_data.core.errors import ConfigError, DataError
from lit_data.images.discovery import compile_patterns, find_images, list_shown, match_by_stem
from lit_inspect.counts import counted
from tests.helpers.files import touch


def _found(root: Path, *patterns: str) -> list[str]:
    listing = find_images(root, patterns=patterns) if patterns else find_images(root)
    return [path.relative_to(root).as_posix() for path in listing.paths]


def test_images_are_listed_once_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = ["a/10.JPG", "a/9.tif", "a/b/x.jpeg", "b/2.png", "c.npy", "y.tiff", "z.bmp"]
    touch(tmp_path, *names[::-1])
    assert _found(tmp_path) == names
    assert _found(tmp_path, "**/*.JPG", "b/*", "b/2.*") == ["a/10.JPG", "b/2.png"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.png", ["1.png"]),
        ("**/*.png", ["1.png", "a/2.png", "a/b/3.png"]),
        ("a/*.png", ["a/2.png"]),
        ("a/**/*.png", ["a/2.png", "a/b/3.png"]),
        ("a/**", ["a/2.png", "a/b/3.png", "a/b/4.jpg"]),
        ("**/[23].*", ["a/2.png", "a/b/3.png"]),
        ("**/[!2-4].png", ["1.png"]),
        ("**/?.jpg", ["a/b/4.jpg"]),
        ("**/4.*", ["a/b/4.jpg"]),
        ("**/b/*", ["a/b/3.png", "a/b/4.jpg"]),
        ("**/**/b/***", ["a/b/3.png", "a/b/4.jpg"]),
        ("**/*.*p*g", ["1.png", "a/2.png", "a/b/3.png", "a/b/4.jpg"]),
    ],
)
def test_patterns_choose_files(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    touch(tmp_path, "1.png", "a/2.png", "a/b/3.png", "a/b/4.jpg")
    assert _found(tmp_path, pattern) == expected


@pytest.mark.parametrize(
    "pattern", ["*a" * 3000, "*" * 3000, "**/*" + "?*" * 2000 + "c", "**/" * 3000 + "*a*b*c"]
)
def test_patterns_of_thousands_of_stars_take_no_long_time(pattern: str) -> None:
    begin = time.perf_counter()
    matches = compile_patterns([pattern]).fullmatch
    assert bool(matches("a" * 250)) == (pattern == "*" * 3000)
    assert matches("ab" * 3000 + ("a" if pattern.endswith("a") else "c"))
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (["a"], ["1.png", "b/a/3.png"]),
        (["a/"], ["1.png", "b/a/3.png"]),
        (["**/a"], ["1.png"]),
        (["a/**", "*.png"], ["b/a/3.png"]),
        (["a*"], ["1.png", "b/a/3.png"]),
        (["**/3.png"], ["1.png", "a/2.png", "a/c/4.png"]),
        ([], ["1.png", "a/2.png", "a/c/4.png", "b/a/3.png"]),
    ],
)
def test_excluded_files_and_folders_are_left_out_and_counted(
    tmp_path: Path, exclude: list[str], left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    names = {"1.png", "a/2.png", "b/a/3.png", "a/c/4.png"}
    touch(tmp_path, *names, "a/notes.txt")
    listing = find_images(tmp_path, exclude=exclude)
    assert [path.relative_to(tmp_path).as_posix() for path in listing.paths] == left
    assert {path.relative_to(tmp_path).as_posix() for path in listing.excluded} == names - set(left)
    files = counted(4 - len(left), "file is", "files are")
    said = [f"{tmp_path}: {files} skipped by data.exclude"] if exclude else []
    assert caplog.messages == said


def test_exclusions_of_nothing_and_of_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, "a.png", "a.jpg")  # the names do not clash
    assert len(find_images(tmp_path, exclude=["*.jpg", "b\n*"]).paths) == 1
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"data.exclude: 'b\\n*' matches no image below {tmp_path}"]
    message = r"no image matches '\*\*/\*'; found 2 skipped by data.exclude"
    with pytest.raises(DataError, match=message):
        find_images(tmp_path, exclude=["**"])
    with pytest.raises(ConfigError, match=r"data.exclude: pattern '\.\./\*' leaves the folder"):
        find_images(tmp_path, exclude=["../*"])
    with pytest.raises(ConfigError, match=r"exclude='a' must be a list"):
        find_images(tmp_path, exclude="a")


def test_an_excluded_link_may_lead_anywhere(tmp_path: Path) -> None:
    touch(tmp_path, "set/a.png", "outside/b.png")
    (tmp_path / "set/old").symlink_to(tmp_path / "outside")
    (tmp_path / "set/gone.png").symlink_to(tmp_path / "nothing.png")
    with pytest.raises(DataError, match="2 bad names"):
        find_images(tmp_path / "set")
    assert len(find_images(tmp_path / "set", exclude=["old", "gone.*"]).paths) == 1


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("../*.png",), "pattern '../\\*.png' leaves the folder"),
        (("/etc/*",), "pattern '/etc/\\*' leaves the folder"),
        ((), "must be a list of at least one pattern"),
        ("*.png", "must be a list of at least one pattern"),
        (("[z-a].png",), "cannot be understood: bad character range z-a"),
        (("**/a/" * 5 + "*.png",), r"'\*\*/a/.*' holds '\*\*/' more than 4 times; remove some"),
    ],
)
def test_a_wrong_pattern_is_named(tmp_path: Path, patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_images(tmp_path, patterns=patterns)


# row 41
def test_junk_is_ignored_and_counted(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "b.jpg", ".DS_Store", "._a.png", "Thumbs.db", "sub/thumbs.db")
    touch(tmp_path, ".git/b.png", "notes.txt", "__MACOSX/c.png", "sub/__MACOSX/d.png")
    listing = find_images(tmp_path, patterns=("*.png",))
    assert [path.name for path in listing.paths] == ["a.png"]
    counts = {"hidden": 5, "system files": 2, "of another type": 1, "outside the patterns": 1}
    assert listing.ignored == counts


def test_nothing_hidden_is_shown(tmp_path: Path) -> None:
    touch(tmp_path, "b.csv", "a/c.csv", "__MACOSX/d.csv", "a/.git/e.csv", "._b.csv", "a/f.txt")
    assert list_shown(tmp_path, "*.csv") == [tmp_path / "a/c.csv", tmp_path / "b.csv"]


# rows 35 and 36
def test_empty_and_misspelt_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no image matches '\*\*/\*'; found nothing"):
        find_images(tmp_path)
    with pytest.raises(DataError, match=f"trian/images: no such folder; {tmp_path} exists"):
        find_images(tmp_path / "trian" / "images")
    touch(tmp_path, "a.jpg", "b.txt")
    with pytest.raises(DataError, match=r"a.jpg: not a folder"):
        find_images(tmp_path / "a.jpg")
    message = r"no image matches '\*.png', 'x/\*'; found 1 (outside the patterns|of another type)"
    with pytest.raises(DataError, match=f"{message}, 1 "):
        find_images(tmp_path, patterns=("*.png", "x/*"))


# rows 37 and 39
def test_two_files_of_one_name_are_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "a.png", "a.jpg", "b.png", "B.PNG", "c/a.png")
    with pytest.raises(DataError) as caught:
        find_images(tmp_path)
    assert str(caught.value).splitlines() == [
        f"  {tmp_path}/a.png: the same name as {tmp_path}/a.jpg",
        f"  {tmp_path}/b.png: the same name as {tmp_path}/B.PNG",
        f"2 bad names under {tmp_path}",
    ]
    touch(tmp_path / "accents", "caf\u00e9.png", "cafe\u0301.jpg")  # composed and decomposed
    with pytest.raises(DataError, match="the same name as"):
        find_images(tmp_path / "accents")


def test_any_name_works(tmp_path: Path) -> None:
    long, odd = "n" * 251 + ".png", os.fsdecode(b"\xe9.png")
    names = sorted(["ünï 日本.png", "with space.png", "line\nbreak.png", long, odd])
    touch(tmp_path, *names)
    assert _found(tmp_path) == names


# row 10
def test_what_is_no_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "fifo.png")
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.png")
    (tmp_path / "link.png").symlink_to("fifo.png")
    with pytest.raises(DataError) as caught:
        find_images(tmp_path)
    assert sorted(str(caught.value).splitlines()[:-1]) == [
        f"  {tmp_path}/fifo.png: not a regular file (a named pipe)",
        f"  {tmp_path}/folder.png: not a regular file (a folder)",
        f"  {tmp_path}/link.png: not a regular file (a named pipe)",
        f"  {tmp_path}/socket.png: not a regular file (a socket)",
    ]


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("broken.png", "gone.png", "a broken link to gone.png"),
        ("train", "gone", "a broken link to gone"),  # was a folder
        ("loop.png", "loop.png", "a circular link, to loop.png"),
        ("out.png", "../out.png", r"leads out of the data folder, to .*/out.png\n(.|\n)*data.root"),
        ("out", "../outside", r"leads out of the data folder, to .*/outside\n(.|\n)*copy it into"),
        ("circle", ".", "a circular link to "),
    ],
)
def test_bad_links_are_named(tmp_path: Path, name: str, target: str, message: str) -> None:
    touch(tmp_path, "data/a.png", "out.png", "outside/b.png")
    (tmp_path / "data" / name).symlink_to(target)
    with pytest.raises(DataError, match=f"data/{name}: {message}"):
        find_images(tmp_path / "data")


def test_good_links_are_followed(tmp_path: Path) -> None:
    touch(tmp_path, "data/a.png", "out.png", "outside/b.png", "data/x/d.png")
    (tmp_path / "data" / "c.png").symlink_to("a.png")
    (tmp_path / "data" / "y").symlink_to("x")
    (tmp_path / "data" / "notes.txt").symlink_to("gone.txt")  # nobody's image
    assert _found(tmp_path / "data") == ["a.png", "c.png", "x/d.png", "y/d.png"]
    (tmp_path / "data" / "e.png").symlink_to("../out.png")
    (tmp_path / "data" / "z").symlink_to("../outside")
    with pytest.raises(DataError, match="2 bad names"):
        find_images(tmp_path / "data")


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a.png", "kept/b.png")
    (tmp_path / "locked").symlink_to("kept")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("locked"):  # root may read everything, so the refusal is made up
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"locked: cannot be read, EACCES \(Permission denied\)"):
        find_images(tmp_path)


def test_images_and_masks_are_matched_by_stem() -> None:
    composed, decomposed = "caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")
    pairs = match_by_stem(
        [f"i/{composed}.png", "i/b.jpg"], ["m/b.png", f"m/{decomposed}.png"]
    )  # row 39
    assert pairs == [
        (Path(f"i/{composed}.png"), Path(f"m/{decomposed}.png")),
        (Path("i/b.jpg"), Path("m/b.png")),
    ]


# row 42
def test_what_has_no_partner_is_listed_on_both_sides() -> None:
    with pytest.raises(DataError) as caught:
        match_by_stem(["i/a.png", "i/b.png"], ["m/b.png", "m/c.png", "m/d.png"])
    assert str(caught.value).splitlines() == [
        "  i/a.png: an image without a mask",
        "  m/c.png: a mask without an image",
        "  m/d.png: a mask without an image",
        "1 image without a mask, 2 masks without an image",
    ]


def test_two_masks_of_one_name_clash() -> None:
    with pytest.raises(DataError, match=r"m/2/a.png: the same name as m/1/a.png(.|\n)*1 name is"):
        match_by_stem(["i/a.png"], ["m/1/a.png", "m/2/a.png"])
