import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_data.app.result import (
    KEYS,
    find_direction,
    find_summary,
    join_scores,
    read_summary,
    write_confusion,
    write_summary,
)
from lit_data.core.errors import DataError, StoreError
from lit_data.models.score_curves import Curve, ScoreCurves
from lit_data.models.scored import Confusion


def test_summary_is_flat_and_ordered(tmp_path: Path) -> None:
    metrics = {"test/b": 0.5, "seconds": 2.0, "samples_sha256": "ab", "test/a": 1, "val/c": "x"}
    path = write_summary(tmp_path, "fit", "stripe", metrics)
    assert path == tmp_path / "summary.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    assert list(values) == [*KEYS, "test/a", "test/b", "val/c"]
    given = {"command": "fit", "experiment": "stripe"} | metrics
    assert values == dict.fromkeys(KEYS) | given


def test_any_name_is_taken_as_it_is_and_numbers_become_plain_and_finite(tmp_path: Path) -> None:
    metrics = {
        "v/nan": (math.nan, None),
        "v/inf": (-math.inf, None),
        "v/f32": (np.float32(0.5), 0.5),
        "val_i64": (np.int64(7), 7),
        "val_loss/dataloader_idx_0": (torch.tensor(0.25), 0.25),
        "Größe": (None, None),
    }
    given = {name: value for name, (value, _) in metrics.items()}
    values = json.loads(write_summary(tmp_path, "test", "x", given).read_text(encoding="utf-8"))
    assert {name: values[name] for name in metrics} == {
        name: plain for name, (_, plain) in metrics.items()
    }


def test_no_score_takes_the_place_of_another() -> None:
    metrics = join_scores(
        {"seconds": 3.0, "train/mean_step_s": 0.1}, {"loss": 1.0, "val_acc": 0.5}, "val"
    )
    metrics = join_scores(metrics, {"loss": 2.0, "test_acc": 0.25, "seconds": 9.0}, "test")
    assert metrics == {
        "seconds": 3.0, "train/mean_step_s": 0.1, "loss": 1.0, "val_acc": 0.5,
        "test/loss": 2.0, "test_acc": 0.25, "test/seconds": 9.0,
    }  # fmt: skip


def test_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_summary(tmp_path, "fit", "old", {})

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    text = r"cannot write .*summary\.json: No space left on device; free some space, or set"
    with pytest.raises(StoreError, match=text):
        write_summary(tmp_path, "fit", "new", {})
    assert json.loads(path.read_text(encoding="utf-8"))["experiment"] == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write_summary(tmp_path, "fit", "x", {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_confusions_of_a_run_share_their_classes(tmp_path: Path) -> None:
    write_confusion(tmp_path, {}, {"test": ScoreCurves({})})
    assert not list(tmp_path.glob("*.json"))
    counts = [[3, 1], [0, 2]]
    curves = {"test": ScoreCurves({"pixels": Curve([0.5, 1.0], [1.0, 0.25])})}
    write_confusion(tmp_path, {"test": Confusion(("good", "bad"), counts)}, curves)
    content = json.loads((tmp_path / "confusion.json").read_text(encoding="utf-8"))
    assert content == {"classes": ["good", "bad"], "test": counts}
    content = json.loads((tmp_path / "curves.json").read_text(encoding="utf-8"))
    pixels = {"recall": [0.5, 1.0], "precision": [1.0, 0.25]}
    assert content == {"test": {"precision_recall": {"pixels": pixels}, "image_scores": None}}


def test_a_summary_that_is_no_object_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("[1, 2]")
    with pytest.raises(DataError, match=r"summary.json is not a JSON object"):
        read_summary(tmp_path)
    assert find_summary(tmp_path) is None


def test_more_is_better_of_scores_of_a_class_too() -> None:
    higher = ("val/ap50_rolled-in_scale", "ap_scratches", "test/map50", "image_auroc_bent")
    assert {find_direction(name) for name in higher} == {1}
    assert find_direction("train/loss") == -1
    assert find_direction("apples") == find_direction("lr") == 0
