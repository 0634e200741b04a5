from collections.abc import Callable
from pathlib import Path

import pytest

from lit_data.core.errors import ConfigError, DataError
from lit_data.datasets.references import find_sources

FILES = {"target": "*_a.png", "ref1": "*_b.png", "ref2": "*_c.png"}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(*names: str) -> Path:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
        return tmp_path

    return make


@pytest.mark.parametrize("layout", [None, "channels", "single"])
def test_one_file_for_each_image(folder: Callable[..., Path], layout: str | None) -> None:
    root = folder("b.png", "a/c.png", "masks/c.png")
    sources = find_sources(root, layout, masks=root / "masks")
    paths = [(str(root / "a/c.png"),), (str(root / "b.png"),)]
    assert [source.paths for source in sources] == paths


def test_files_of_the_same_key_belong_together(folder: Callable[..., Path]) -> None:
    root = folder(*(f"x/{key}_{role}.png" for key in ("2", "10") for role in "abc"), "x/readme.txt")
    sources = find_sources(root, "files", files={role: f"x/{glob}" for role, glob in FILES.items()})
    assert [source.paths for source in sources] == [
        tuple(str(root / f"x/{key}_{role}.png") for role in "abc") for key in ("10", "2")
    ]


def test_pairs_have_one_reference(folder: Callable[..., Path]) -> None:
    root = folder("targets/1.png", "refs/1.png")
    sources = find_sources(root, "pairs", files={"target": "targets/*.png", "ref1": "refs/*.png"})
    assert sources[0].paths == (str(root / "targets/1.png"), str(root / "refs/1.png"))


def test_an_image_that_lacks_a_file_is_a_bad_image(folder: Callable[..., Path]) -> None:
    root = folder("1_a.png", "1_b.png", "1_c.png", "2_a.png", "3_b.png", "3_c.png")
    sources = find_sources(root, "files", files=FILES)
    assert [source.paths for source in sources] == [
        tuple(str(root / f"{key}_{role}.png") for role in "abc") for key in "123"
    ]


def test_files_without_any_partner_are_listed(folder: Callable[..., Path]) -> None:
    root = folder("2_a.png", "3_b.png", "3_c.png")
    with pytest.raises(DataError, match=r"3 files are missing") as caught:
        find_sources(root, "files", files=FILES)
    missing = ["2_b.png: ref1 is", "2_c.png: ref2 is", "3_a.png: target is"]
    lines = [line.strip() for line in str(caught.value).splitlines()[:-1]]
    assert lines == [f"{line} missing" for line in missing]


def test_a_star_stays_within_its_folder(folder: Callable[..., Path]) -> None:
    root = folder("1.png", "2.png", "ref/1.png", "ref/2.png")
    sources = find_sources(root, "pairs", files={"target": "*.png", "ref1": "ref/*.png"})
    assert [source.paths for source in sources] == [
        (str(root / f"{number}.png"), str(root / f"ref/{number}.png")) for number in (1, 2)
    ]


def test_brackets_count_as_the_letter_that_they_stand_for(folder: Callable[..., Path]) -> None:
    root = folder("lot7/1_a.png", "ref/1.png", "lot8/2_a.png", "ref/2.png")
    files = {"target": "lot[78]/*_?.png", "ref1": "ref/*.png"}
    assert len(find_sources(root, "pairs", files=files)) == 2
    folder("lot8/1_a.png")
    with pytest.raises(DataError, match=r"1_a\.png: target may be this file or .*lot8/1_a\.png"):
        find_sources(root, "pairs", files=files)


def test_layouts_that_do_not_fit_are_refused(folder: Callable[..., Path]) -> None:
    root = folder("masks/1_a.png")
    wrong = [None, {"target": "*_a.png"}, {**FILES, "ref2": "c.png"}, {**FILES, "ref2": "*_*.png"}]
    for files in wrong:
        message = r"layout=files needs files=\{target: <glob with one \*>"
        with pytest.raises(ConfigError, match=message):
            find_sources(root, "files", files=files)
    message = "layout='triple' is unknown: choose one of channels, files, pairs, single"
    with pytest.raises(ConfigError, match=message):
        find_sources(root, "triple")
    with pytest.raises(DataError, match="no images in"):
        find_sources(root, "channels", masks=root / "masks")
