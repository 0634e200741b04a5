"""Commands import nothing of the folder that they are started in, which may be a stranger's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.families import ROOT
from tests.helpers.fork_server import FRESH

SHADOWED = ("torch", "yaml", "faulthandler", "argparse", "multiprocessing", "hydra", "psutil")
GROUPS = ("lit_data.conf", "torch.backends", "lightning.pytorch.callbacks_factory", "fsspec.specs")
TOY = ("+experiment=stripe", "data.patch_px=64", "show.count=1", "data.samples.count=4")


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A folder in which every lookup of a module or an installed package would leave a file."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    mark = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + ' ')\n"
    for name in (*SHADOWED, "sitecustomize", "usercustomize"):
        (folder / f"{name}.py").write_text(mark)
    for package in ("evil", "evil/conf", "hydra_plugins/evil"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(mark)
    info = folder / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    points = "".join(f"[{group}]\nevil = evil.conf\n" for group in GROUPS)
    (info / "entry_points.txt").write_text(points)
    return folder


def _run(
    folder: Path, *words: str, path: str = str(ROOT), is_fresh: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": path, "LIT_DATA_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | environment | (FRESH if is_fresh else {}),
        check=False,
    )


def test_nothing_of_the_current_folder_is_imported(stranger: Path) -> None:
    done = _run(stranger, "-m", "lit_data", "show", *TOY)
    assert done.returncode == 0, done.stderr
    assert not (stranger.parent / "ran").exists()


@pytest.mark.slow
def test_nothing_of_it_is_imported_where_the_command_goes_elsewhere(stranger: Path) -> None:
    work = stranger.parent / "work"
    work.mkdir()
    done = _run(work, "-m", "lit_data", "show", *TOY, "hydra.run.dir=first", is_fresh=False)
    assert done.returncode == 0, done.stderr
    words = ("rerun", "../work/first", "--cwd", str(work))
    done = _run(stranger, "-m", "lit_data", *words)
    assert done.returncode == 0, done.stderr
    assert not (stranger.parent / "ran").exists()


PROBE = """
import os, subprocess, sys
sys.path.insert(0, os.getcwd())  # as python -m does
from lit_data.core.import_path import leave_current_folder
leave_current_folder()
os.chdir("elsewhere")
child = "import sys; print(sys.path[:2])"
print(sys.path[:2])
subprocess.run([sys.executable, "-c", child])
"""


@pytest.mark.parametrize(
    ("path", "stays"),
    [("{root}", False), ("{root}:", False), (":{root}", False), (".:{root}", True)],
)
def test_children_do_not_look_into_their_folder_either(
    tmp_path: Path, path: str, stays: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = _run(tmp_path, "-P", "-c", PROBE, path=path.format(root=ROOT))
    here, child = done.stdout.splitlines()
    assert (str(tmp_path) in here) == stays, done.stderr
    assert (str(tmp_path) in child) == stays
    assert "elsewhere" not in child
    assert "''" not in child


def test_a_package_that_is_typed_is_found_behind_all_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys, helper, wave\n"
        "from lit_data.models import UNet\n"
        f"assert sys.path[-1] == {str(tmp_path)!r}\n"
        "class Net(UNet): pass\n"
    )
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "wave.py").write_text("raise SystemExit(9)")  # the name of another one
    words = ["-m", "lit_data", "fit", "+experiment=stripe", "model.net._target_=mine.Net"]
    words += ["trainer.fast_dev_run=true", "data.patch_px=64", "data.samples.count=8"]
    done = _run(tmp_path, *words, is_fresh=False)
    assert "'model.net._target_' is 'mine.Net', which is not allowed" in done.stderr
    done = _run(tmp_path, *words, "--package", "mine", is_fresh=False)
    assert done.returncode == 0, done.stderr
