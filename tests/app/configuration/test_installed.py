"""Groups and experiments of installed packages, by the entry point ``lit_data.conf``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENT = """# @package _global_
# Lines of our mill.
defaults:
  - override /data: mill
name: mill
"""
DATA = """defaults:
  - segmentation
_target_: my_mill.data.MillDataModule
"""
CODE = """from lit_data.datamodules import InspectionDataModule


class MillDataModule(InspectionDataModule):
    pass
"""


def _install(site: Path, value: str = "my_mill.conf", name: str = "my_mill") -> None:
    package = site / name
    for file, text in {
        "__init__.py": "",
        "data.py": CODE,
        "conf/__init__.py": "",
        "conf/experiment/mill.yaml": EXPERIMENT,
        "conf/data/mill.yaml": DATA,
    }.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    owner = name.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lit_data.conf]\nmill = {value}\n")


def _add_wing(site: Path, text: str) -> Path:
    wing = site / "my_mill" / "wing"
    wing.mkdir()
    (wing / "__init__.py").write_text(text)
    with (site / "my_mill-1.0.dist-info" / "entry_points.txt").open("a") as file:
        file.write("[lit_data.wings]\nmill = my_mill.wing\n")
    return wing


def _run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "lit_data", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )


def test_experiments_and_classes_of_an_installed_package_need_no_flags(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "work"
    folder.mkdir()
    _install(site)
    done = _run(site, folder, "fit", "+experiment=mill", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "_target_: my_mill.data.MillDataModule" in done.stdout
    assert "patch_px: 128" in done.stdout  # of the data group that it builds on
    page = _run(site, folder, "--help").stdout
    assert "mill" in page
    assert "Lines of our mill." in page
    assert "Lines of our mill." in _run(site, folder, "fit", "experiment=mill", "--help").stdout
    words = ["--complete", "lit-data", "fit", "experiment=m"]
    assert _run(site, folder, *words).stdout == "experiment=mill\n"


def test_a_package_that_lies_in_the_current_folder_is_not_installed(tmp_path: Path) -> None:
    _install(tmp_path)
    done = _run(tmp_path, tmp_path, "fit", "+experiment=mill", "--cfg", "job")
    assert done.returncode == 2
    assert "unknown experiment 'mill'" in done.stderr


@pytest.mark.parametrize("value", ["my_mill.gone", "nowhere.conf", "my_mill.data", ".."])
def test_an_entry_point_that_leads_nowhere_names_its_owner(tmp_path: Path, value: str) -> None:
    site, folder = tmp_path / "site", tmp_path / "work"
    folder.mkdir()
    _install(site, value)
    done = _run(site, folder, "fit", "+experiment=stripe", "--cfg", "job")
    assert (done.returncode, "name: stripe" in done.stdout) == (0, True)
    blamed = f"{value} of the installed package my-mill (entry point lit_data.conf) "
    assert done.stderr.count(blamed) == 1
    assert done.stderr.endswith("install my-mill again, or uninstall it. It is skipped.\n")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("my_mill/__init__.py", "import sys; sys.exit(0)"),
        ("my_mill/__init__.py", "def ("),
        ("my_mill-1.0.dist-info/METADATA", None),
        ("my_mill-1.0.dist-info/entry_points.txt", "[lit_data.conf]\nno value\n"),
    ],
)
def test_a_damaged_package_is_named_and_skipped(
    tmp_path: Path, file: str, text: str | None
) -> None:
    site, folder = tmp_path / "site", tmp_path / "work"
    folder.mkdir()
    _install(site, "my_mill.conf" if text else "gone")
    if text is None:
        (site / file).unlink()
    else:
        (site / file).write_text(text)
    done = _run(site, folder, "--help")
    assert done.returncode == 0
    assert "stripe" in done.stdout
    assert done.stderr.startswith("lit_data: ")
    assert "my" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    words = ["--complete", "lit-data", "fit", "experiment=str"]
    assert _run(site, folder, *words).stdout == "experiment=stripe\n"


def test_files_of_one_name_are_not_chosen_by_the_order_of_packages(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "work"
    folder.mkdir()
    _install(site)
    _install(site, "other.conf", "other")
    done = _run(site, folder, "fit", "experiment=mill", "--cfg", "job")
    assert done.returncode == 2
    assert "my_mill/conf/data/mill.yaml and " in done.stderr
    assert "other/conf/data/mill.yaml have one name" in done.stderr
    assert _run(site, folder, "fit", "experiment=stripe", "--cfg", "job").stderr == ""
    (site / "other/conf/experiment/stripe.yaml").write_text(EXPERIMENT)
    done = _run(site, folder, "fit", "experiment=stripe", "--cfg", "job")
    assert (done.returncode, "name: stripe" in done.stdout) == (0, True)
    assert done.stderr.count("other/conf/experiment/stripe.yaml is not read") == 1
    done = _run(site, folder, "new-kind", "mill")
    assert "my_mill.conf has an experiment with this name" in done.stderr


def test_commands_of_an_installed_package(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "work"
    folder.mkdir()
    _install(site)
    wing = _add_wing(site, 'TOOLS = {"grind-it": "compare lines", "report": "hides ours"}\n')
    (wing / "grind_it.py").write_text("def main(words):\n    print('ground', words)\n")
    done = _run(site, folder, "grind-it", "a", "--b")
    assert (done.returncode, done.stdout) == (0, "ground ['a', '--b']\n"), done.stderr
    page = _run(site, folder, "--help").stdout
    assert "compare lines" in page
    assert "hides ours" not in page
    assert "did you mean 'grind-it'" in _run(site, folder, "grindit").stderr.lower()
    (wing / "grind_it.py").unlink()
    lacking = _run(site, folder, "grind-it")
    assert lacking.returncode == 2
    assert "my-mill" in lacking.stderr
    assert "has no module my_mill.wing.grind_it: " in lacking.stderr
    for text in ("import nowhere\n", "raise SystemExit(0)\n", "TOOLS = ['grind-it']\n"):
        (wing / "__init__.py").write_text(text)
        broken = _run(site, folder, "grind-it")
        assert broken.returncode == 2
        assert "my_mill.wing of the installed package my-mill" in broken.stderr
        assert "unknown command 'grind-it'" in broken.stderr
        assert _run(site, folder, "--help").returncode == 0
    assert _run(site, folder, "fit", "--cfg", "job", "+experiment=mill").returncode == 0


def test_a_folder_is_recognized_by_an_installed_package(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "work"
    folder.mkdir()
    (folder / "line.mill").touch()
    _install(site)
    _add_wing(
        site,
        "def recognize(folder, *, has_images):\n"
        "    if not has_images and list(folder.glob('*.mill')):\n"
        "        yield 'mill'\n",
    )
    done = _run(site, folder, "fit", "data.root=.")
    assert done.returncode == 2
    assert "looks like mill: lit-data fit experiment=mill data.root=." in done.stderr
    (site / "my_mill/wing/__init__.py").write_text("def recognize(folder):\n    return None\n")
    done = _run(site, folder, "fit", "data.root=.")
    assert done.returncode == 2
    assert "my_mill.wing of the installed package my-mill" in done.stderr
    assert "does not look like any" in done.stderr
