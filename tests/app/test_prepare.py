"""What ``prepare`` says of a set beside its numbers."""

import os
import stat
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.app.cli import main


def _write_set(root: Path) -> None:
    """Images with masks of three colours; and folders of kinds, with an image beside them."""
    rng = np.random.default_rng(0)
    mask = np.zeros((40, 40, 3), np.uint8)
    mask[5:20, 5:20] = 0, 0, 255
    mask[30:38, 30:38] = 0, 255, 0
    for name in ("images", "masks", "kinds/good", "kinds/dent"):
        (root / name).mkdir(parents=True)
    for number in range(8):
        image = rng.integers(60, 200, (40, 40), dtype=np.uint8)
        for name in ("images", "kinds/good"):
            cv2.imwrite(str(root / name / f"{number}.png"), image)
        cv2.imwrite(str(root / f"kinds/dent/dent{number}.png"), image.T)
        cv2.imwrite(str(root / f"masks/{number}.png"), mask)
    for name in ("images/old.png", "kinds/stray.png", "kinds/good/old.png"):
        cv2.imwrite(str(root / name), image)


@pytest.mark.parametrize(
    ("words", "check", "line"),
    [
        ("experiment=segmentation data.classes=[a,b]", "true", "masks hold 3 colors"),
        ("experiment=classification data.root=set/kinds", "false", "stray.png is skipped"),
        ("experiment=gan_images data.root=set/kinds", "true", "skipped by data.exclude"),
        ("experiment=gan_images data.root=set/kinds", "false", "skipped by data.exclude"),
    ],
)
def test_a_set_is_listed_once(
    words: str, check: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    _write_set(tmp_path / "set")
    places = ["data.root=set", "paths.cache=cache", "hydra.run.dir=run"]
    exclude = "data.exclude=['**/old.png','*/nothing*']"
    # The last word for a key counts.
    assert main(["prepare", *places, exclude, f"prepare.check={check}", *words.split()]) == 0
    lines = Path("run/prepare.log").read_text().splitlines()
    messages = [text.split(" ", 2)[2] for text in lines]  # without date and time
    assert len(messages) == len(set(messages))
    assert sum(line in text for text in messages) == 1
    assert capsys.readouterr().out.count(line) == 1


def test_nothing_in_the_cache_is_writable_for_all_whatever_the_umask(tmp_path: Path) -> None:
    _write_set(tmp_path / "set")
    places = [f"data.root={tmp_path}/set/images", f"paths.cache={tmp_path}/cache"]
    umask = os.umask(0)
    try:
        words = ["prepare", "experiment=segmentation", *places, f"hydra.run.dir={tmp_path}/run"]
        assert main(words) == 0
    finally:
        os.umask(umask)
    folders = [path for path in (tmp_path / "cache").rglob("*") if path.is_dir()]
    assert folders
    assert [path for path in folders if path.stat().st_mode & stat.S_IWOTH] == []


def test_a_set_without_masks_is_warned_of_where_they_are_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "set").mkdir()
    for number in range(12):
        pixels = rng.integers(0, 255, (40, 40), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / "set" / f"{number}.png"), pixels)
    words = ["prepare", "data.patch_px=32", f"data.root={tmp_path}/set"]
    words += [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
    told = (
        "no image has a mask, so fit has nothing to learn: name their folder with data.masks=FOLDER"
    )
    for check in ("true", "false"):
        assert main([*words, "+experiment=segmentation", f"prepare.check={check}"]) == 0
        assert told in capsys.readouterr().out
    assert main([*words, "+experiment=segmentation", "synthesis=gaussian"]) == 0
    assert main([*words, "+experiment=anomaly", "data.size_px=null"]) == 0
    assert told not in capsys.readouterr().out
