"""`python -m benchmarks learning`: both ways train on one split, and one scorer reads both."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks.__main__ import run as measure
from benchmarks.learning import (
    LABEL_SCORES,
    MASK_SCORES,
    auroc,
    average_precision,
    score_maps,
)
from benchmarks.learning_sets import list_classes, prepare_labels
from tests.benchmarks.suites import read_table, write_masked


def test_scores_of_pixels_share_a_threshold_where_they_are_equal() -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(500) < 0.2
    scores = (rng.random(500) * 20 + 6 * truth).round()
    precision, best_f1 = average_precision(scores, truth)
    above = [scores >= threshold for threshold in np.unique(scores)[::-1]]
    hits = np.array([(truth & high).sum() for high in above])
    counts = np.array([high.sum() for high in above])
    steps = np.diff(hits, prepend=0) / truth.sum()
    assert precision == pytest.approx((steps * hits / counts).sum())
    assert best_f1 == pytest.approx((2 * hits / (truth.sum() + counts)).max())
    pairs = scores[truth][:, None] - scores[~truth]
    assert auroc(scores, truth) == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)


def test_a_map_that_is_the_mask_is_perfect_and_a_blank_one_is_chance() -> None:
    truths = [np.zeros((9, 9), bool) for _ in range(4)]
    truths[1][2:4, 3:6] = truths[3][5:, 5:] = True
    right = score_maps([truth.astype(float) for truth in truths], truths)
    assert right == dict.fromkeys(right, 1.0) | {"false_alarms": 0.0}
    blank = score_maps([np.zeros((9, 9))] * 4, truths)
    assert (blank["pixel_auroc"], blank["image_auroc"], blank["false_alarms"]) == (0.5, 0.5, 1)


def _write_labelled(folder: Path, images: int) -> None:
    rng = np.random.default_rng(0)
    for name, grey in (("dark spot", 60), ("bright", 180)):
        (folder / name).mkdir(parents=True)
        for number in range(images):
            image = rng.normal(grey, 20, (40, 40)).clip(0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / name / f"{number}.png"), image)


@pytest.mark.slow
def test_labels_are_trained_and_scored_both_ways(tmp_path: Path) -> None:
    _write_labelled(tmp_path / "source", 20)
    prepare_labels(tmp_path / "source", tmp_path / "set", list_classes)
    _assert_scored("learning_labels", LABEL_SCORES, tmp_path, seconds=2)


@pytest.mark.slow
def test_both_ways_are_trained_and_scored(tmp_path: Path) -> None:
    write_masked(tmp_path / "set", images=40, side_px=140)
    _assert_scored("learning", MASK_SCORES, tmp_path, seconds=2)


def _assert_scored(suite: str, scores: Sequence[str], folder: Path, *, seconds: int) -> None:
    words = [f"suite.root={folder}/set", "suite.seeds=[0]", f"hydra.run.dir={folder}"]
    assert measure([suite, *words, f"suite.seconds=[{seconds}]"]) == 0
    rows = read_table(folder)
    assert [row["way"] for row in rows] == ["plain", "ours"]
    assert all(0 < float(row[name]) <= 1 for row in rows for name in scores)
