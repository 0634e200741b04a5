"""`new-kind`: what it writes, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lit_data
from lit_data.app.cli import main
from lit_data.app.new_kind import write_kind
from lit_data.core.errors import ConfigError, StoreError

ROOT = Path(lit_data.__file__).parents[1]
FILES = [
    "parts/parts/__init__.py",
    "parts/parts/conf/experiment/parts.yaml",
    "parts/parts/datamodule.py",
    "parts/parts/dataset.py",
    "parts/pyproject.toml",
    "parts/tests/test_parts.py",
]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def _list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))


def test_a_package_is_written_and_its_files_named(
    in_empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-kind", "parts"]) == 0
    assert _list_files(in_empty_folder) == FILES
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:6]) == FILES
    assert "pip install -e ./parts" in lines[7]
    text = "".join((in_empty_folder / name).read_text() for name in FILES)
    assert "my_kind" not in text.lower().replace("mykind", "my_kind")
    assert "class PartsDataModule(" in text
    assert main(["new-kind", "boards"]) == 0  # a second kind stands beside the first
    assert len(_list_files(in_empty_folder)) == 12
    capsys.readouterr()
    assert main(["new-kind", "--help"]) == 0
    assert "NAME/NAME/conf/experiment/NAME.yaml" in capsys.readouterr().out


@pytest.mark.slow
def test_the_written_test_passes_and_tests_something(in_empty_folder: Path) -> None:
    write_kind("round_parts2", in_empty_folder)
    home = in_empty_folder / "round_parts2"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def run_test() -> int:
        done = subprocess.run([*words], cwd=home, env=environment, check=False)
        return done.returncode

    assert run_test() == 0
    module = home / "round_parts2" / "dataset.py"
    text = module.read_text()
    module.write_text(text.replace("self.labels[numbers]", "np.arange(len(numbers))"))
    assert run_test() == 1


@pytest.mark.parametrize(
    "words",
    [[], [""], ["parts", "more"], ["--force", "parts"]],
    ids=["none", "empty", "two", "option"],
)
def test_anything_but_one_name_is_refused(
    words: list[str], in_empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-kind", *words]) == 2
    assert capsys.readouterr().err.startswith("lit_data: ")
    assert list(in_empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("a/b", "/parts", "..", "../parts", "parts.py"), "names a Python module"),
        (("Parts", "2parts", "_parts", "my-parts", "my parts", "parts_"), "names a Python module"),
        (("parts\n", "größe", "p" * 41, "my__parts"), "names a Python module"),
        (("class", "import", "null", "true", "no", "nan", "conftest", "tests"), "reserves this"),
        (("json", "sys", "torch", "lit_data"), "a module with this name"),
        (("classification",), "an experiment with this name"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(
    names: tuple[str, ...], reason: str, in_empty_folder: Path, tmp_path: Path
) -> None:
    for name in names:
        with pytest.raises(ConfigError, match=f"^new-kind .*{reason}"):
            write_kind(name, in_empty_folder)
    assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link", "link to nothing"])
def test_what_is_there_is_not_touched(kind: str, in_empty_folder: Path) -> None:
    path, other = in_empty_folder / "parts", in_empty_folder.parent / "other"
    if kind == "folder":
        path.mkdir()
        (path / "image.png").write_text("mine")
    elif kind == "file":
        path.write_text("mine")
    else:
        if kind == "link":
            other.mkdir()
        path.symlink_to(other)
    with pytest.raises(ConfigError, match=r"already exists: choose another name"):
        write_kind("parts", in_empty_folder)
    assert _list_files(in_empty_folder) == (["parts/image.png"] if kind == "folder" else [])
    assert kind != "file" or path.read_text() == "mine"
    assert other.exists() == (kind == "link")
    assert kind != "link" or list(other.iterdir()) == []


def test_nothing_is_left_where_the_disk_is_full(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def fill(path: Path, text: str, **options: str) -> int:
        if path.suffix == ".yaml":
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(StoreError, match=r"cannot write .*parts: No space left"):
        write_kind("parts", in_empty_folder)
    assert list(in_empty_folder.iterdir()) == []


def test_a_folder_that_came_since_the_check_is_kept(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def come_first(path: Path, **options: bool) -> None:
        make(path)
        (path / "image.png").write_text("mine")
        make(path, **options)

    monkeypatch.setattr(Path, "mkdir", come_first)
    with pytest.raises(StoreError, match="File exists"):
        write_kind("parts", in_empty_folder)
    assert _list_files(in_empty_folder) == ["parts/image.png"]
