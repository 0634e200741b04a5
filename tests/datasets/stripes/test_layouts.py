from collections.abc import Callable
from pathlib import Path

import pytest

from lit_data.datasets.stripes.layouts import list_sources
from lit_data.errors import ConfigError, DataError

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


def test_one_file_for_each_image(folder: Callable[..., Path]) -> None:
    root = folder("b.png", "a/c.png", "masks/c.png")
    found = list_sources(root, "channels", masks=(root / "masks",))
    assert found.names == ("a/c.png", "b.png")
    assert [source.paths for source in found.sources] == [
        (str(root / name),) for name in found.names
    ]


def test_files_of_the_same_key_belong_together(folder: Callable[..., Path]) -> None:
    root = folder(*(f"x/{key}_{role}.png" for key in ("2", "10") for role in "abc"), "x/readme.txt")
    found = list_sources(root, "files", files={role: f"x/{glob}" for role, glob in FILES.items()})
    assert found.names == ("x/10_a.png", "x/2_a.png")
    assert found.sources[1].paths == tuple(str(root / f"x/2_{role}.png") for role in "abc")


def test_pairs_have_one_reference(folder: Callable[..., Path]) -> None:
    root = folder("targets/1.png", "refs/1.png")
    found = list_sources(root, "pairs", files={"target": "targets/*.png", "ref1": "refs/*.png"})
    assert found.sources[0].paths == (str(root / "targets/1.png"), str(root / "refs/1.png"))


def test_files_without_partner_are_listed(folder: Callable[..., Path]) -> None:
    root = folder("1_a.png", "1_b.png", "1_c.png", "2_a.png", "3_b.png", "3_c.png")
    with pytest.raises(DataError, match=r"3 files are missing") as caught:
        list_sources(root, "files", files=FILES)
    assert [line.strip() for line in str(caught.value).splitlines()[:-1]] == [
        "2_b.png: ref1 is missing",
        "2_c.png: ref2 is missing",
        "3_a.png: target is missing",
    ]


@pytest.mark.parametrize(
    "files", [None, {"target": "*_a.png"}, {**FILES, "ref2": "c.png"}, {**FILES, "ref2": "*_*.png"}]
)
def test_globs_must_fit_the_layout(
    folder: Callable[..., Path], files: dict[str, str] | None
) -> None:
    with pytest.raises(ConfigError, match=r"layout=files needs files=\{target: <glob with one \*>"):
        list_sources(folder("1_a.png"), "files", files=files)


def test_unknown_layout(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="layout='triple' is unknown: choose one of channels, files, pairs, single",
    ):
        list_sources(tmp_path, "triple")


def test_a_folder_of_masks_alone(folder: Callable[..., Path]) -> None:
    root = folder("masks/a.png")
    with pytest.raises(DataError, match="no images in"):
        list_sources(root, "channels", masks=(root / "masks",))
