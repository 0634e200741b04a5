"""The pictures of families and of augmentation."""

import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.cli import main

Show = Callable[..., tuple[dict[str, object], Path]]


@pytest.fixture
def show(tmp_path: Path) -> Show:
    images = tmp_path / "images"

    def call(*words: str, channels: int = 3) -> tuple[dict[str, object], Path]:
        images.mkdir()
        for number in range(5):
            pixels = np.random.default_rng(number).integers(
                60, 180, (80, 80, channels), dtype=np.uint8
            )
            cv2.imwrite(str(images / f"{number}.png"), pixels)
        places = [
            f"data.root={images}",
            f"paths.runs={tmp_path}/runs",
            f"paths.cache={tmp_path}/cache",
        ]
        assert main(["show", "experiment=stripe", "data.patch_px=64", *places, *words]) == 0
        newest = max(
            (tmp_path / "runs").rglob("summary.json"), key=lambda path: path.stat().st_mtime_ns
        )
        return json.loads(newest.read_text()), newest.parent

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
    words = [
        "show.stage=val",
        "show.examples=1",
        "data.layout=single",
        "~data.synthesis.families.spot",
    ]
    summary, folder = show(*words, "+data.synthesis.families.stain={}", channels=1)
    assert summary["show/families"] == 1
    assert not (folder / "augment.png").exists()
