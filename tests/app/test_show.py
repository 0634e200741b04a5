"""The pictures of families and of augmentation."""

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.app.cli import main

Show = Callable[..., tuple[dict[str, object], Path]]


@pytest.fixture
def show(tmp_path: Path) -> Show:
    images = tmp_path / "images"

    def call(*words: str, channels: int = 3) -> tuple[dict[str, object], Path]:
        images.mkdir()
        rng = np.random.default_rng(0)
        for number in range(5):
            pixels = rng.integers(60, 180, (80, 80, channels), dtype=np.uint8)
            cv2.imwrite(str(images / f"{number}.png"), pixels)
        places = [f"data.root={images}", f"hydra.run.dir={tmp_path}/run"]
        places += [f"paths.cache={tmp_path}/cache", "data.patch_px=64"]
        assert main(["show", "experiment=stripe", *places, *words]) == 0
        path = tmp_path / "run" / "summary.json"
        return json.loads(path.read_text()), path.parent

    return call


@pytest.mark.slow
def test_each_family_has_a_row(show: Show) -> None:
    summary, folder = show("synthesis=library", "show.examples=2")
    assert summary["show/families"] == 12
    height, width = cv2.imread(str(folder / "families.png")).shape[:2]
    assert height > 2 * width
    assert (folder / "augment.png").is_file()
    header, *rows = (folder / "plan.csv").read_text().splitlines()
    assert header.startswith("index,family,y,x,amplitude,is_true,target,ref1,ref2,parameters")
    assert len(rows) == summary["show/defects"]


@pytest.mark.slow
def test_nothing_is_drawn_of_what_there_is_not(show: Show) -> None:
    words = ["show.stage=val", "show.examples=1", "data.layout=single"]
    words += ["~data.synthesis.families.spot", "+data.synthesis.families.stain={}"]
    summary, folder = show(*words, channels=1)
    assert summary["show/families"] == 1
    assert not (folder / "augment.png").exists()
