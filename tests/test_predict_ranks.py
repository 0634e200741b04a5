"""Ranks and parts of ``predict`` as they are typed: the files of one process, also where some are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
import torch

from lit_data.app.build import build_model
from lit_data.app.configuration.compose import compose
from tests.helpers.families import ROOT, list_children, run_family

IMAGES = 24
LIMIT_S = 240  # of runs that take 10 to 20 s where nothing else does
COMMAND = ["-W", "ignore", "-m", "lit_data"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lit_data"]
KINDS = {
    # Eight sides of each tile, so that a prediction lasts until it is killed.
    "segmentation": ["predict.tile_px=64", "predict.augment=d4", "model=unet", "model.net.width=4"],
    "classification": ["model=classifier", "data.classes=[dark,light]", "data.size_px=[64,64]"],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Folders:
    """Images, weights for them, and commands that predict them.

    Args:
        folder: Of all of them.
        kind: Experiment.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        rng = np.random.default_rng(0)
        for number in range(IMAGES):
            path = folder / "set" / ("dark", "light")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), rng.integers(0, 256, (200, 150, 3), dtype=np.uint8))
        self.words = [
            f"+experiment={kind}",
            *KINDS[kind],
            f"data.root={folder}/set",
            "data.cache=none",
            "predict.threads=1",
            "trainer.enable_progress_bar=false",
            f"paths.runs={folder}/runs",
            f"paths.cache={folder}/cache",
            f"ckpt={folder}/model.ckpt",
        ]
        torch.manual_seed(0)
        model = build_model(compose("predict", self.words))
        torch.save({"state_dict": model.state_dict()}, folder / "model.ckpt")

    def list_words(self, results: str, *words: str, start: list[str] = COMMAND) -> list[str]:
        """Return the command line that predicts into a folder."""
        place = f"predict.folder={self.folder}/{results}"
        return [sys.executable, *start, "predict", *self.words, place, *words]

    def predict(self, results: str, *words: str, start: list[str] = COMMAND) -> tuple[int, str]:
        """Predict into a folder; return exit code and output."""
        command = self.list_words(results, *words, start=start)
        return run_family(command, limit_s=LIMIT_S, cwd=self.folder, OMP_NUM_THREADS="1")

    def summarise(self, output: str) -> dict[str, Any]:
        """Return the metrics of the run that printed something."""
        (path,) = (line for line in output.splitlines() if line.endswith("summary.json"))
        summary = json.loads(Path(path).read_text())
        return {name: value for name, value in summary.items() if name.startswith("predict/")}

    def read(self, results: str) -> dict[str, bytes]:
        """Return all files of a folder but the journals."""
        folder = self.folder / results
        paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

    def count_lines(self, results: str) -> Counter[str]:
        """Return how often each image was predicted."""
        lines = []
        for path in (self.folder / results).glob("images*.jsonl"):
            lines += path.read_text().splitlines(keepends=True)
        return Counter(json.loads(line)["image"] for line in lines if line.endswith("\n"))

    def check(self, results: str) -> None:
        """Compare a folder with that of one process, which predicted each image once."""
        assert self.read(results) == self.read("alone")
        counts = self.count_lines(results)
        assert len(counts) == IMAGES
        assert set(counts.values()) == {1}


@pytest.fixture(scope="module")
def segmentation(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders = Folders(tmp_path_factory.mktemp("segmentation"), "segmentation")
    code, output = folders.predict("alone", "trainer=cpu")
    assert code == 0, output
    return folders


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_predict_as_one_process_does(kind: str, tmp_path: Path) -> None:
    folders = Folders(tmp_path, kind)
    bad = int(kind == "segmentation")  # a batch with such an image is not cut
    if bad:
        path = tmp_path / "set" / "light" / "3.png"
        path.write_bytes(path.read_bytes()[:-2000])  # its header is good: the second rank finds it
    summaries = []
    words = ("trainer=cpu", "predict.batch_size=3", "predict.augment=null")
    code, output = folders.predict("alone", *words)
    assert code == 3 * bad, output
    summaries.append(folders.summarise(output))
    assert summaries[0]["predict/images_bad"] == bad
    starts = [("ranks", COMMAND, 3 * bad)]
    if bad:  # torchrun has an exit code of its own
        starts.append(("torchrun", TORCHRUN, bad))
    for results, start, expected in starts:
        words = ("trainer=ddp_cpu", "predict.batch_size=3", "predict.augment=null")
        code, output = folders.predict(results, *words, start=start)
        assert code == expected, output
        assert ("1 input is bad and has no prediction" in output) == bool(bad)
        summaries.append(folders.summarise(output))
        assert folders.read(results) == folders.read("alone")
        names = {file.name for file in (tmp_path / results).glob("*.jsonl")}
        assert names == {"images-0-of-2.jsonl", "images-1-of-2.jsonl"}
    assert summaries[1:] == summaries[:1] * len(starts)


@contextmanager
def _running(command: list[str], folder: Path) -> Iterator[psutil.Popen]:
    """Start a command; nothing of it outlives the context."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("ab") as output:
        process = psutil.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def _wait_for_images(folders: Folders, results: str, count: int) -> None:
    until_s = time.monotonic() + LIMIT_S
    while sum(folders.count_lines(results).values()) < count:
        assert time.monotonic() < until_s, (folders.folder / "output.txt").read_text()
        time.sleep(0.01)


def kill_ranks(folders: Folders, results: str, kills: int, rng: random.Random) -> None:
    """Let ranks predict, kill one of them at random, and go on with another number of ranks."""
    for _ in range(kills):
        done = sum(folders.count_lines(results).values())
        words = ("trainer=ddp_cpu", f"trainer.devices={rng.choice((2, 3))}", "predict.resume=true")
        with _running(folders.list_words(results, *words), folders.folder) as process:
            _wait_for_images(folders, results, done + rng.randint(1, 4))
            family = [process, *list_children(process.pid)]
            victim = rng.randrange(len(family))
            family[victim].kill()
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive
            output = (folders.folder / "output.txt").read_text()
            text = f"rank {victim} of this machine was killed by SIGKILL" if victim else "is gone"
            assert text in output


@pytest.mark.parametrize("seed", [1])
def test_ranks_that_are_killed_lose_and_double_nothing(segmentation: Folders, seed: int) -> None:
    kill_ranks(segmentation, "killed", 2, random.Random(seed))
    done = sum(segmentation.count_lines("killed").values())
    code, output = segmentation.predict("killed", "trainer=cpu", "predict.resume=true")
    assert code == 0, output
    assert segmentation.summarise(output)["predict/images_kept"] == done
    segmentation.check("killed")


def kill_parts(folders: Folders, results: str, kills: int, rng: random.Random) -> None:
    """Let two of three parts predict at once, and kill one of them at random."""
    for _ in range(kills):
        done = sum(folders.count_lines(results).values())
        numbers = rng.sample(range(3), 2)
        commands = [folders.list_words(results, f"predict.part={each}/3") for each in numbers]
        with (
            _running(commands[0], folders.folder) as first,
            _running(commands[1], folders.folder) as second,
        ):
            _wait_for_images(folders, results, done + rng.randint(1, 4))
            rng.choice((first, second)).kill()
            time.sleep(rng.random())  # the other one is killed too, a little later


def test_parts_that_are_killed_lose_and_double_nothing(segmentation: Folders) -> None:
    kill_parts(segmentation, "parts", 1, random.Random(2))
    code, output = segmentation.predict("parts", "predict.finish=true")
    assert code == 4, output
    assert f"of {IMAGES} inputs are missing in" in output
    for number in range(3):
        code, output = segmentation.predict("parts", f"predict.part={number}/3")
        assert code == 0, output
    code, output = segmentation.predict("parts", "predict.finish=true")
    assert code == 0, output
    assert segmentation.summarise(output)["predict/images_kept"] == IMAGES
    segmentation.check("parts")
