"""Scores of boxes against those of pycocotools, and hits against false alarms."""

from typing import Any

import numpy as np
import pytest
import torch

from lit_data.core.errors import ConfigError
from lit_data.wings.detection.model.boxes import Objects
from lit_data.wings.detection.model.module import DetectionModule
from lit_data.wings.detection.model.net import DetectorNet
from lit_data.wings.detection.model.scores import BoxScores, match_objects

# COCOeval(..., "bbox") of pycocotools 2.0.11 for the boxes of `_draw_images`, crowds as iscrowd=1 and
# areas as width * height: its stats, and means over `precision` of the classes.
REFERENCE = {
    "map": 0.3030356616905397,
    "map50": 0.6924778213541202,
    "map_small": 0.28715556,
    "map_medium": 0.36895756,
    "map_large": 0.30103594,
    "ap50_0": 0.6352488004215023,
    "ap_0": 0.2616013302139984,
    "ap50_1": 0.7846917841189892,
    "ap_1": 0.3729303105617547,
    "ap50_2": 0.6574928795218686,
    "ap_2": 0.27457534429586594,
}


def _objects(boxes: Any, classes: Any, scores: Any = None) -> Objects:
    objects = {
        "boxes": torch.tensor(np.array(boxes), dtype=torch.float32).reshape(-1, 4),
        "classes": torch.tensor(np.array(classes), dtype=torch.int64),
    }
    if scores is not None:
        objects["scores"] = torch.tensor(np.array(scores), dtype=torch.float32)
    return objects


def _draw_images() -> tuple[list[Objects], list[Objects], list[Objects]]:
    """Return what is found, true and ignored in 12 images with 88 objects of 3 classes and 13 crowds."""
    rng = np.random.RandomState(7)
    found, true, ignored = [], [], []
    for _ in range(12):
        count = rng.randint(0, 14)
        corners = rng.uniform(0, 400, (count, 2))
        sides = np.exp(rng.uniform(np.log(8), np.log(200), (count, 2)))
        classes = rng.randint(0, 3, count)
        is_crowd = rng.uniform(size=count) < 0.15
        boxes = np.hstack((corners, corners + sides))
        true.append(_objects(boxes[~is_crowd], classes[~is_crowd]))
        ignored.append(_objects(boxes[is_crowd], classes[is_crowd]))
        rows = np.concatenate((np.arange(count), rng.randint(0, max(count, 1), 8 * bool(count))))
        shifted = boxes[rows] + rng.normal(0, 0.12, (len(rows), 4)) * np.tile(sides[rows], 2)
        is_right = rng.uniform(size=len(rows)) < 0.85
        labels = np.where(is_right, classes[rows], rng.randint(0, 3, len(rows)))
        scores = rng.uniform(0.02, 1, len(rows))
        has_area = (shifted[:, 2:] - shifted[:, :2] > 1).all(1)
        order = np.flatnonzero(has_area)[np.argsort(-scores[has_area], kind="stable")]
        found.append(_objects(shifted[order], labels[order], scores[order]))
    return found, true, ignored


def _compute(*parts: slice, **options: Any) -> dict[str, float]:
    found, true, ignored = _draw_images()
    metric = BoxScores(**options)
    metric.names = ("0", "1", "2")
    for part in parts:
        metric.update(found[part], true[part], ignored[part])
    return {name: float(value) for name, value in metric.compute().items()}


def test_scores_are_those_of_pycocotools() -> None:
    scores = _compute(slice(0, 5), slice(5, None))
    for name, value in REFERENCE.items():
        assert scores[name] == pytest.approx(value, abs=1e-6), name


def test_sizes_count_in_px_of_the_disk() -> None:
    found, true, ignored = _draw_images()
    halved = []
    for images in (found, true, ignored):
        halved.append([objects | {"boxes": objects["boxes"] / 2} for objects in images])
    metric = BoxScores()
    metric.update(*halved, scales=[2.0] * len(found))
    assert float(metric.compute()["map_small"]) == pytest.approx(REFERENCE["map_small"], abs=1e-6)
    limits = BoxScores((16.0, 48.0))
    limits.update(*halved)
    assert float(limits.compute()["map_small"]) == pytest.approx(REFERENCE["map_small"], abs=1e-6)


def test_hits_against_false_alarms_are_counted_from_the_highest_score_down() -> None:
    found, true, ignored = _draw_images()
    scores, is_false = [], []
    for parts in zip(found, true, ignored, strict=True):
        scores.append(parts[0]["scores"])
        is_false.append(match_objects(*parts)[1])
    alarms = torch.cat(scores)[torch.cat(is_false)].sort(descending=True).values
    values = _compute(slice(None))
    for rate in (0.1, 1.0):
        limit = alarms[int(12 * rate)]
        missed = 0
        for parts in zip(found, true, ignored, strict=True):
            is_above = parts[0]["scores"] > limit
            above = {name: value[is_above] for name, value in parts[0].items()}
            missed += int(match_objects(above, *parts[1:])[0].sum())
        assert values[f"froc_{rate:g}"] == pytest.approx(1 - missed / 88)


SQUARE, FAR = [0.0, 0.0, 10.0, 10.0], [50.0, 50.0, 60.0, 60.0]


def test_a_rank_without_an_image_takes_part() -> None:
    metric = BoxScores()
    metric.update([], [])
    scores = metric.compute()
    assert {"map50", "map", "map_small", "froc_1", "object_f1_max"} <= scores.keys()
    assert all(value.isnan() for value in scores.values())


def test_false_alarms_alone_have_no_precision_and_a_class_that_is_not_there_none_either() -> None:
    metric = BoxScores()
    metric.names = ("dent", "crack")
    corners, number = torch.tensor([[0.0, 0, 9, 9]]), torch.tensor([0])
    alarm = {"boxes": corners, "classes": number, "scores": torch.tensor([0.9])}
    nothing = {"boxes": corners[:0], "classes": number[:0]}
    metric.update([alarm], [nothing])  # type: ignore[list-item]
    assert all(value.isnan() for value in metric.compute().values())
    metric.update([alarm], [{"boxes": corners + 50, "classes": number}])  # type: ignore[list-item]
    scores = metric.compute()
    assert scores["map50"] == scores["ap50_dent"] == scores["object_f1_max"] == 0
    assert scores["ap50_crack"].isnan()
    assert scores["object_f1_max_threshold"].isnan()


@pytest.mark.parametrize("limits", [(32.0,), (96.0, 32.0), (0.0, 96.0)])
def test_impossible_limits_of_sizes(limits: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="must be two ascending sides"):
        DetectionModule(DetectorNet(2, width=8), size_limits_px=limits)
