"""`python -m benchmarks learning_pairs`: sets of pairs, ways to compare them, and one scorer."""

from pathlib import Path

import cv2
import numpy as np

from benchmarks.__main__ import run as measure
from benchmarks.learning_pairs import PAIR_SCORES
from benchmarks.pair_sets import Grey, Pair, write_tiles
from tests.benchmarks.suites import read_table

SIDE_PX = 140


def _make_part(number: int) -> Grey:
    noise = np.random.default_rng(number).integers(60, 200, (SIDE_PX, SIDE_PX))
    return np.asarray(cv2.GaussianBlur(noise.astype(np.uint8), (0, 0), 2), np.uint8)


def _write_pairs(folder: Path, count: int = 8) -> Path:
    pairs = []
    for number in range(3 * count):
        target, mask = _make_part(number), np.zeros((SIDE_PX, SIDE_PX), np.uint8)
        reference = target.copy()
        if number % 2:
            target[60:72, 40:52] = 255
            mask[60:72, 40:52] = 255
        split = ("train", "val", "test")[number % 3]
        pairs.append(Pair(f"{number:02}", split, target, reference, mask))
    write_tiles(pairs, folder, SIDE_PX)
    return folder


def test_pairs_are_compared_by_each_way(tmp_path: Path) -> None:
    _write_pairs(tmp_path / "set")
    ways = ["difference", "compare_features", "compare_real", "alone"]
    words = ["suite.seconds=[2]", "suite.seeds=[0]", "suite.perturbations=[shift_1]"]
    places = [f"suite.root={tmp_path}/set", f"hydra.run.dir={tmp_path}/run"]
    assert measure(["learning_pairs", f"suite.ways=[{','.join(ways)}]", *words, *places]) == 0
    rows = read_table(tmp_path / "run")
    names = [name for way in ways for name in (way, f"{way} shift_1")]
    assert [row["way"] for row in rows] == names
    assert all(0 <= float(row[name]) <= 1 for row in rows for name in PAIR_SCORES)
    assert float(rows[0]["image_auroc"]) == 1
