"""`python -m benchmarks learning_pairs`: sets of pairs, ways to compare them, and one scorer."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks import pair_sets
from benchmarks.__main__ import run as measure
from benchmarks.learning_pairs import PAIR_SCORES, find_false_alarms, perturb, score_pairs
from benchmarks.learning_sets import read_split
from benchmarks.pair_sets import GOOD_SPLITS, Grey, Pair, read_grey, write_tiles
from benchmarks.pair_ways import find_difference
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


def test_good_tiles_alone_train_beside_a_table_of_all(tmp_path: Path) -> None:
    root = _write_pairs(tmp_path)
    assert len(read_split(root, "train")) == 8
    good = (root / GOOD_SPLITS).read_text().splitlines()
    for line in good[1:]:
        name, split = line.split(",")
        is_defective = read_grey(root / "masks" / Path(name).name).any()
        assert split == "test" or not is_defective
    assert sum(line.endswith("test") for line in good) == len(read_split(root, "test"))


def test_boxes_of_boards_become_masks_and_kinds_of_boards_stay_apart(tmp_path: Path) -> None:
    for group in ("00041", "77000", "12000"):
        folder = tmp_path / f"PCBData/group{group}"
        (folder / group).mkdir(parents=True)
        (folder / f"{group}_not").mkdir()
        for ending in ("test", "temp"):
            image = np.full((640, 640), 255, np.uint8)
            cv2.imwrite(str(folder / group / f"{group}000_{ending}.jpg"), image)
        (folder / f"{group}_not/{group}000.txt").write_text("10 20 40 60 1\n")
    pairs = list(pair_sets.list_boards(tmp_path))
    assert [pair.split for pair in pairs] == ["train", "val", "test"]
    assert np.argwhere(pairs[0].mask).min(0).tolist() == [20, 10]
    assert np.count_nonzero(pairs[0].mask) == 30 * 40
    write_tiles(pairs, tmp_path / "set", 320)
    tiles = sorted((tmp_path / "set/masks").glob("00041000_*.png"))
    assert [bool(read_grey(tile).any()) for tile in tiles] == [True, False, False, False]


def test_references_of_wafers_are_moved_by_whole_pixels(tmp_path: Path) -> None:
    part = np.random.default_rng(0).integers(0, 255, (200, 220)).astype(np.uint8)
    (tmp_path / "defective_examples").mkdir()
    text = "case 1:\ndefect #1 at x=100, y=90\n"
    (tmp_path / "defective_examples/defects locations.txt").write_text(text)
    stem = tmp_path / "defective_examples/case1"
    cv2.imwrite(f"{stem}_inspected_image.tif", part[10:, 4:])
    cv2.imwrite(f"{stem}_reference_image.tif", part[:-10, :-4])
    (pair,) = pair_sets.list_wafers(tmp_path)
    assert pair.split == "test"
    assert np.array_equal(pair.target, pair.reference)
    y, x = np.argwhere(pair.mask).mean(0)
    assert pair.target[round(y), round(x)] == part[10 + 90, 4 + 100]


def test_the_difference_forgives_shift_and_gain_but_no_defect() -> None:
    part = cv2.GaussianBlur(_make_part(0), (0, 0), 2).astype(np.float32) / 255
    reference = 0.8 * np.roll(part, (2, -3), (0, 1))
    target = part.copy()
    target[70:76, 70:76] += 0.4
    found = find_difference(target, reference, blur_px=0.0, tolerance_px=1)
    inner = np.s_[10:-10, 10:-10]
    assert found[72:74, 72:74].min() > 0.2
    found[68:78, 68:78] = 0
    assert found[inner].max() < 0.1


@pytest.mark.parametrize("change", ["", "shift_2", "gain_0.5", "noise_0.1", "blur_2"])
def test_references_change_as_they_are_told(change: str) -> None:
    part = _make_part(1)
    changed = perturb(part, change)
    assert changed.dtype == np.uint8
    assert np.array_equal(changed, part) == (change == "")
    if change == "shift_2":
        assert np.array_equal(changed[2:, 2:], part[:-2, :-2])
    if change == "gain_0.5":
        assert abs(changed.mean() - part.mean() / 2) < 1


def test_false_alarms_are_those_where_most_defects_are_found() -> None:
    truth = np.array([True] * 20 + [False] * 4)
    scores = np.array([0.1, *[0.5] * 19, 0.6, 0.5, 0.4, 0.2])
    assert find_false_alarms(scores, truth) == 0.5  # one of 20 defects may be missed


def test_a_map_that_is_the_mask_is_perfect(tmp_path: Path) -> None:
    root = _write_pairs(tmp_path / "set")
    (tmp_path / "maps").mkdir()
    for name in map(Path, read_split(root, "test")):
        mask = read_grey(root / "masks" / name.name).astype(np.uint16)
        cv2.imwrite(str(tmp_path / "maps" / name.name), mask * 257)
    assert list(score_pairs(tmp_path / "maps", root).values()) == [1, 1, 0]


def test_pairs_are_compared_by_each_way(tmp_path: Path) -> None:
    _write_pairs(tmp_path / "set")
    ways = ["difference", "compare_features", "compare", "compare_real", "alone", "alone_real"]
    words = ["suite.seconds=[5]", "suite.seeds=[0]", "suite.perturbations=[shift_1]"]
    places = [f"suite.root={tmp_path}/set", f"hydra.run.dir={tmp_path}/run"]
    assert measure(["learning_pairs", f"suite.ways=[{','.join(ways)}]", *words, *places]) == 0
    rows = read_table(tmp_path / "run")
    names = [name for way in ways for name in (way, f"{way} shift_1")]
    assert [row["way"] for row in rows] == names
    assert all(0 <= float(row[name]) <= 1 for row in rows for name in PAIR_SCORES)
    assert float(rows[0]["image_auroc"]) == 1
