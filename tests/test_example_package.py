"""Somebody else's kind of data, in three files outside of lit_data, with every command."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.cli import main
from lit_data.loading import LoaderOptions
from lit_data.testing import check_datamodule
from tests.example_package.data import LabelDataModule

HERE = Path(__file__).resolve().parent
PACKAGE = HERE / "example_package"
PAGE = (HERE.parent / "docs" / "extend.md").read_text(encoding="utf-8")
Run = Callable[..., Path]

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("labels") / "images"
    for kind, level in (("bright", 170), ("dark", 60)):
        (folder / kind).mkdir(parents=True)
        for number in range(12):
            pixels = rng.normal(level, 30, (40, 50, 3)).clip(0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / kind / f"{number:02d}.png"), pixels)
    return folder


@pytest.fixture(scope="module")
def place(root: Path) -> Path:
    return root.parent


@pytest.fixture
def run(root: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.syspath_prepend(str(HERE))

    def call(command: str, *words: str, code: int = 0) -> Path:
        package = ["--config-dir", str(PACKAGE / "conf"), "--package", "example_package"]
        places = [f"paths.runs={place}/runs", f"paths.cache={place}/cache", f"data.root={root}"]
        quiet = ["trainer.enable_progress_bar=false", "data.loader.num_workers=0"]
        assert main([command, "+experiment=labels", *places, *quiet, *words, *package]) == code
        newest = max(
            (place / "runs" / command).rglob("summary.json"),
            key=lambda path: path.stat().st_mtime_ns,
        )
        return newest.parent

    return call


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_three_files_are_enough() -> None:
    files = [
        path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sorted(path.name for path in files) == ["data.py", "labels.yaml", "model.py"]


def test_the_page_shows_what_is_there() -> None:
    text = "".join(
        (PACKAGE / name).read_text()
        for name in ("data.py", "model.py", "conf/experiment/labels.yaml")
    )
    text += Path(__file__).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        assert block in text, block
    commands = re.findall(r"python -m lit_data (\w+)", PAGE)
    assert commands == ["fit", "show", "predict", "prepare", "benchmark"]


def test_its_samples_depend_on_index_and_epoch_alone(root: Path, place: Path) -> None:
    data = LabelDataModule(str(root), cache_dir=str(place), loader=LoaderOptions(batch_size=4))
    check_datamodule(data)


def test_it_is_trained_tested_and_drawn(run: Run) -> None:
    fitted = run("fit", "trainer.max_epochs=20", "trainer.log_every_n_steps=1")
    assert _summary(fitted)["test_hits"] == 1
    assert (fitted / "report.html").is_file()
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted / name)).shape[1] > 500
    assert _summary(run("test", f"ckpt={fitted}/checkpoints/best.ckpt"))["test_hits"] == 1
    assert _summary(run("show", "show.count=3"))["show/patches"] == 3
    predicted = run("predict", f"ckpt={fitted}/checkpoints/best.ckpt")
    assert {_summary(predicted)[f"predict/{kind}"] for kind in ("bright", "dark")} == {12}
    rows = list(csv.DictReader((predicted / "labels.csv").read_text().splitlines()))
    assert all(row["image"].startswith(row["label"]) for row in rows)
    assert main(["report", str(fitted.parents[1])]) == 0


@pytest.mark.slow
def test_a_prediction_goes_on_and_tells_of_bad_images(
    run: Run, root: Path, place: Path, tmp_path: Path
) -> None:
    fitted = run("fit", "trainer.max_epochs=1", "trainer.log_every_n_steps=1")
    words = [f"ckpt={fitted}/checkpoints/last.ckpt", f"predict.folder={tmp_path}/found"]
    run("predict", *words)
    journal = tmp_path / "found" / "images.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:20]))
    assert _summary(run("predict", *words, "predict.resume=true"))["predict/images_kept"] == 20
    (root / "dark" / "bad.png").write_bytes(b"no image")
    try:
        folder = run("predict", *words, "predict.folder=null", code=3)
        assert "bad.png" in (folder / "bad.csv").read_text()
        assert _summary(folder)["predict/images_bad"] == 1
        assert (
            main(
                [
                    "prepare",
                    "+experiment=labels",
                    f"data.root={root}",
                    "prepare.check=true",
                    *_package(),
                ]
            )
            == 3
        )
    finally:
        (root / "dark" / "bad.png").unlink()


@pytest.mark.slow
def test_it_is_prepared_measured_and_swept(run: Run, place: Path) -> None:
    assert _summary(run("prepare", "prepare.check=true"))["prepare/images"] == 24
    assert _summary(run("prepare", "prepare.verify=true"))["prepare/train_samples"] > 12
    times = ["benchmark.repeats=1", "benchmark.seconds_per_row=0.05", "benchmark.samples_per_row=4"]
    sizes = [
        "benchmark.workers=[1]",
        "benchmark.batch_sizes=[4]",
        "benchmark.micro_batch_sizes=[2]",
    ]
    assert _summary(run("benchmark", *times, *sizes))["benchmark/best_samples_per_s"] > 0
    run(
        "fit",
        "-m",
        "model.width=2,4",
        "trainer.max_epochs=1",
        "sweep.isolate=none",
        "trainer.log_every_n_steps=1",
    )
    (table,) = (place / "runs" / "fit").rglob("sweep.csv")
    assert [row["status"] for row in csv.DictReader(table.read_text().splitlines())] == [
        "done",
        "done",
    ]


@pytest.mark.slow
def test_it_trains_from_shards_as_from_files(run: Run, place: Path) -> None:
    words = ["trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
    shards = place / "images.shards"
    assert (
        _summary(run("prepare", f"prepare.store={shards}", "prepare.shard_bytes=10000"))[
            "prepare/shards"
        ]
        > 4
    )
    where: list[list[str]] = [
        [],
        [f"data.root={shards}"],
        [f"data.root={shards}", "+data.cache_bytes=90000"],
    ]
    digests = [_summary(run("fit", *words, *root))["samples_sha256"] for root in where]
    assert digests[0]
    assert len(set(digests)) == 1


def _package() -> list[str]:
    return ["--config-dir", str(PACKAGE / "conf"), "--package", "example_package"]
