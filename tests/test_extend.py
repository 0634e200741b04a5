"""A kind of data as `new-kind` writes it and docs/extend.md goes on, with every command."""

import csv
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from venv import EnvBuilder

import cv2
import numpy as np
import pytest

from lit_data.app.cli import main
from lit_data.core.errors import DataError
from lit_data.images.readers import read_image
from lit_data.testing import check_datamodule, write_images
from tests.outputs import NO_TIMELINES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python|yaml)\n(.*?)```", PAGE, re.DOTALL)
(TASK,) = (text for _, text in BLOCKS if "class PartsTask" in text)
(TASK_NAME,) = (text for _, text in BLOCKS if "    task = " in text)
(PAIRS,) = (text for _, text in BLOCKS if "PairFiles" in text)
UNINSTALLED = ["--config-dir", "parts/parts/conf", "--package", "parts"]
MEASURED = (
    "benchmark.repeats=1",
    "benchmark.seconds_per_row=0.05",
    "benchmark.samples_per_row=4",
    "benchmark.workers=[1]",
    "benchmark.micro_batch_sizes=[2]",
)
Run = Callable[..., Path]


def _add_task(home: Path) -> None:
    package = home / "parts" / "parts"
    (package / "task.py").write_text(TASK)
    path = package / "datamodule.py"
    keys = '    batch_keys = ("image", "label", "index", "epoch")\n'
    text = path.read_text()
    assert text.count(keys) == 1
    path.write_text(text.replace(keys, TASK_NAME + keys))


pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page leaves, with images that can be told apart."""
    folder = tmp_path_factory.mktemp("extend")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["new-kind", "parts"]) == 0
    _add_task(folder)
    rng = np.random.default_rng(0)
    for kind, level in (("bright", 170), ("dark", 60)):
        (folder / "images" / kind).mkdir(parents=True)
        for number in range(12):
            pixels = rng.normal(level, 30, (40, 50, 3)).clip(0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / "images" / kind / f"{number:02d}.png"), pixels)
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder / "parts"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "parts"]:
        del sys.modules[name]


@pytest.fixture
def run(folder: Path) -> Run:
    def call(command: str, *words: str, code: int = 0) -> Path:
        places = [f"paths.cache={folder}/cache", "data.root=images", "data.size_px=32"]
        quiet = ["trainer.enable_progress_bar=false", "data.loader.num_workers=0"]
        quiet += NO_TIMELINES
        assert main([command, "+experiment=parts", *places, *quiet, *words, *UNINSTALLED]) == code
        paths = (folder / "runs" / command).rglob("summary.json")
        return max(paths, key=lambda path: path.stat().st_mtime_ns).parent

    return call


def _summary(run_folder: Path) -> dict[str, Any]:
    return json.loads((run_folder / "summary.json").read_text())


def test_the_page_shows_what_is_written(folder: Path) -> None:
    paths = [path for path in (folder / "parts").rglob("*") if path.suffix in {".py", ".yaml"}]
    text = "".join(path.read_text() for path in paths)
    quotes = [quote for language, quote in BLOCKS if language != "bash" and quote != PAIRS]
    assert len(quotes) >= 9
    for quote in quotes:
        assert quote in text, quote


def test_pairs_of_images_with_two_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    request.addfinalizer(lambda: sys.modules.pop("pairs"))
    pairs = importlib.import_module("pairs")
    root = tmp_path / "parts"
    before = write_images(root / "before", 6, (32, 40))
    (root / "after").mkdir()
    for path in before:
        inverse = 255 - np.moveaxis(read_image(path)[::-1], 0, -1)
        cv2.imwrite(str(root / "after" / path.name), inverse)
    for folder, row in (("scratches", 3), ("stains", 8)):
        for number in range(6):
            mask = np.zeros((32, 40), np.uint8)
            mask[row + number, 5:20] = 255
            (root / folder).mkdir(exist_ok=True)
            cv2.imwrite(str(root / folder / f"{number:02d}.png"), mask)
    data = pairs.PairDataModule(root, patch_px=32, cache_dir=tmp_path / "cache")
    check_datamodule(data)
    batch = data.transform(next(iter(data.make_loader("val"))), "val")
    (number,) = set(batch["image_index"].tolist())
    left = int(batch["position"][0, 1])
    crop = read_image(before[number])[..., left : left + 32].astype(np.float32) / 255
    np.testing.assert_allclose(batch["image"][0], np.concatenate((crop, 1 - crop)), atol=1e-6)
    assert batch["mask"][0].amax(2).argmax(1).tolist() == [3 + number, 8 + number]
    (root / "stains" / f"{number:02d}.png").unlink()
    with pytest.raises(DataError, match=rf"{number:02d}.png"):
        data.check_sources()


def _make_environment(folder: Path) -> tuple[Path, Path]:
    """Make an environment with all that is installed here; return its interpreter and packages."""
    EnvBuilder(symlinks=True).create(folder)
    python = folder / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    packages = Path(done.stdout.strip())
    here = sysconfig.get_path("purelib")
    (packages / "installed_here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return python, packages


def _list_commands(block: str, pip: Path) -> list[list[str | Path]]:
    """Return each command of a block of the page; what is more than words is left to the shell.

    Args:
        block: Text of the page.
        pip: Interpreter that packages are installed for; others are forked, which takes a third of the time.
    """
    if "python -c" in block:
        return [["bash", "-ec", block]]
    commands = [shlex.split(line) for line in block.splitlines()]
    programs: dict[str, list[str | Path]] = {
        "pip": [pip, "-m", "pip"],
        "lit-data": [sys.executable, "-m", "lit_data"],
        "python": [sys.executable],
    }
    commands = [[*programs[words[0]], *words[1:]] for words in commands]
    return [[*words, *(MEASURED if "benchmark" in words else ())] for words in commands]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_can_be_followed_in_an_empty_folder(tmp_path: Path) -> None:
    python, packages = _make_environment(tmp_path / "environment")
    paths = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    # Where the interpreter of the environment would find lit_data, what pip installed, and its files.
    imported = (ROOT, packages, tmp_path / "empty" / "parts")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, imported)), "PATH": paths}
    environment["LIT_DATA_CACHE"] = str(tmp_path / "cache")
    # pip asks no server: what the package needs is here
    environment |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    home = tmp_path / "empty"
    home.mkdir()
    for language, text in BLOCKS:
        if text == TASK:
            _add_task(home)
        for words in _list_commands(text, python) if language == "bash" else []:
            done = subprocess.run(
                words, cwd=home, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
            assert "could not be drawn" not in done.stdout + done.stderr
    fits = sorted(home.glob("runs/fit/parts/*/samples.png"))
    assert fits, "a datamodule without a task has pictures of its samples"
    assert list(home.glob("runs/show/parts/*/samples.png"))
    (labels,) = home.glob("runs/predict/parts/*/labels.csv")
    assert len(labels.read_text().splitlines()) == 25
    prepared, measured = (
        _summary(next(home.glob(f"runs/{command}/parts/*/summary.json")).parent)
        for command in ("prepare", "benchmark")
    )
    assert prepared["prepare/images"] == 24
    assert measured["benchmark/best_samples_per_s"] > 0
    (table,) = (home / "runs").rglob("sweep.csv")
    statuses = [row["status"] for row in csv.DictReader(table.read_text().splitlines())]
    assert statuses == ["done", "done"]


@pytest.mark.slow
def test_it_is_trained_tested_and_drawn(run: Run) -> None:
    fitted = run("fit", "trainer.max_epochs=12", "trainer.log_every_n_steps=1")
    assert _summary(fitted)["test/accuracy"] == 1
    assert (fitted / "report.html").is_file()
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted / name)).shape[1] > 500
    assert _summary(run("test", f"ckpt={fitted}/checkpoints/best.ckpt"))["test/accuracy"] == 1
    assert _summary(run("show", "show.count=3"))["show/patches"] == 3
    predicted = run("predict", f"ckpt={fitted}/checkpoints/best.ckpt")
    assert {_summary(predicted)[f"predict/{kind}"] for kind in ("bright", "dark")} == {12}
    rows = list(csv.DictReader((predicted / "labels.csv").read_text().splitlines()))
    assert all(row["image"].startswith(row["label"]) for row in rows)
    assert main(["report", str(fitted.parents[1])]) == 0
    assert _summary(run("prepare", "prepare.verify=true"))["prepare/train_samples"] > 12
