"""The wheel of lit_inspect runs where there is no torch."""

import csv
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

import lit_inspect
from tests.lit_inspect.boards import write_board

NEEDED = (
    "numpy",
    "onnxruntime",
    "cv2",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
    "typing_extensions",
)
RUN = """
import importlib.util, runpy, sys
sys.path.insert(0, sys.argv[1])
assert importlib.util.find_spec("torch") is None
assert importlib.util.find_spec("lit_data") is None
sys.argv[:2] = ["lit_inspect"]
runpy.run_module("lit_inspect", run_name="__main__")
"""


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.mark.slow  # builds a wheel
def test_the_wheel_runs_without_torch(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(Path(lit_inspect.__file__).parent, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    built = subprocess.run(
        [*build, "--outdir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    wheel = next(tmp_path.glob("*.whl"))
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        if spec.submodule_search_locations is None:  # a single file
            _link(spec.origin, str(site / f"{name}.py"))
            continue
        # Not one link to the folder: OpenCV looks for its parts where its files really lie.
        shutil.copytree(folder, site / name, copy_function=_link)
        for libraries in folder.parent.glob("*.libs"):
            if not (site / libraries.name).exists():
                (site / libraries.name).symlink_to(libraries)
    write_board(tmp_path / "a.inspect")
    (tmp_path / "images").mkdir()
    pixels = np.zeros((70, 90), np.uint8)
    pixels[20:24, 70:75] = 200
    cv2.imwrite(str(tmp_path / "images" / "a.png"), pixels)
    words = [str(tmp_path / name) for name in ("site", "a.inspect", "images")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", RUN, *words, "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    with (tmp_path / "out/defects.csv").open(newline="") as file:
        (defect,) = csv.DictReader(file)
    assert (defect["y"], defect["x"], defect["area_px"]) == ("21.5", "72.0", "20")
    assert defect["score"] == "0.784"
