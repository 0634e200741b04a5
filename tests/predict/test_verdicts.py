"""Calibrations: verdicts, the file beside a checkpoint, and what takes their guarantee away."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import StoreError
from lit_data.core.files import find_sha256
from lit_data.predict.verdicts import (
    Calibration,
    check_writable,
    describe_images,
    find_calibration,
    write_calibration,
)

_CONDITIONS = {"model": {"width": 8}, "predict": {"tile_px": (64, 64), "augment": None}}


def _make(checkpoint: Path, **changes: Any) -> Calibration:
    if not checkpoint.exists():
        checkpoint.write_bytes(b"weights")
    values = {
        "good_below": 0.2,
        "defect_above": 0.7,
        "miss": 0.02,
        "false_alarms": 0.05,
        "confidence": 0.95,
        "unit": "image",
        "checkpoint_sha256": find_sha256(checkpoint),
        "conditions": _CONDITIONS,
        "features": [[0.5, 0.1, 0.01]] * 40,
    }
    return Calibration(**(values | changes))


def test_scores_between_the_thresholds_are_for_review(tmp_path: Path) -> None:
    calibration = _make(tmp_path / "best.ckpt")
    verdicts = [calibration.judge(score) for score in (0.19, 0.2, 0.7, 0.71)]
    assert verdicts == ["good", "review", "review", "defect"]
    # Where both bounds overlap nothing is left to review, and a miss is what must not be.
    overlapping = _make(tmp_path / "best.ckpt", good_below=0.6, defect_above=0.3)
    assert [overlapping.judge(score) for score in (0.5, 0.6)] == ["good", "defect"]


def test_a_promise_by_synthetic_defects_says_so(tmp_path: Path) -> None:
    calibration = _make(tmp_path / "a.ckpt", defects="synthetic")
    assert calibration.promise.startswith("misses of synthetic defects <= ")


def test_it_is_found_beside_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "best.ckpt"
    calibration = _make(checkpoint)
    assert find_calibration(checkpoint, _CONDITIONS) is None
    assert write_calibration(checkpoint, calibration).name == "best.ckpt.calibration.json"
    known = find_calibration(checkpoint, _CONDITIONS)
    assert known is not None
    assert (known.good_below, known.defect_above, known.promise) == (
        0.2,
        0.7,
        "misses <= 0.02 and false alarms <= 0.05, each at 0.95",
    )
    assert [path.name for path in tmp_path.iterdir() if ".json" in path.name] == [
        "best.ckpt.calibration.json"
    ]


def test_other_weights_and_other_scores_have_no_guarantee(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "best.ckpt"
    write_calibration(checkpoint, _make(checkpoint))
    other = _CONDITIONS | {"predict": {"tile_px": (64, 64), "augment": "flips"}}
    assert find_calibration(checkpoint, other) is None
    assert caplog.messages[-1].endswith(
        ".calibration.json: predict.augment=flips (calibrated with None)"
    )
    checkpoint.write_bytes(b"others")
    assert find_calibration(checkpoint, _CONDITIONS) is None
    assert "belongs to other weights" in caplog.messages[-1]


@pytest.mark.parametrize(
    "change",
    [
        {"good_below": "low"},
        {"good_below": True},
        {"features": [[0.5, 0.1]]},
        {"features": [[0.5, 0.1, "x"]]},
        {"features": {}},
        {"features": []},
        {"conditions": []},
        {"version": 9},
        {"good_below": float("inf")},
        {"defect_above": 10**400},
        {"good_below": 10**400, "defect_above": 10**400},
        {"defect_above": True},
        {"miss": float("nan")},
        {"false_alarms": 2.0},
        {"confidence": -0.5},
        {"features": [[10**30, 0.5, 10**400]]},
        {"features": [[0.0, 0.0, float("nan")]]},
        {"more": 1},
        {"unit": "x" * 10**6},
        {"checkpoint_sha256": "0"},
        {"conditions": {"a": [[[[]]]] * 10**6}},
    ],
)
def test_a_foreign_file_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tmp_path / "best.ckpt"
    path = write_calibration(checkpoint, _make(checkpoint))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError, match=r"calibration\.json is damaged"):
        find_calibration(checkpoint, _CONDITIONS)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_writable(tmp_path / "best.ckpt")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"calibration\.json: .*calibrate a copy of the run"):
        check_writable(tmp_path / "file" / "best.ckpt")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 10**5, b"3"])
def test_a_cut_file_is_refused(content: bytes, tmp_path: Path) -> None:
    checkpoint = tmp_path / "best.ckpt"
    write_calibration(checkpoint, _make(checkpoint)).write_bytes(content)
    with pytest.raises(StoreError, match=r"calibration\.json is damaged"):
        find_calibration(checkpoint, _CONDITIONS)


def test_images_of_another_gain_withdraw_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = np.random.default_rng(0)
    pixels = (100 + 20 * random.normal(size=(240, 1, 16, 16))).clip(0, 255)
    pixels *= random.uniform(0.9, 1.1, (240, 1, 1, 1))
    bank = np.concatenate((pixels, 1.3 * pixels)).clip(0, 255).astype(np.uint8)
    features = describe_images(bank, range(200)).tolist()
    calibration = _make(tmp_path / "best.ckpt", features=features)
    assert calibration.guarantee(bank, range(200, 240)) == calibration.promise
    assert calibration.guarantee(bank, range(440, 480)) == "withdrawn"
    assert "differs from that of the calibration" in caplog.messages[-1]


def test_a_pipe_in_its_place_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "best.ckpt"
    checkpoint.write_bytes(b"weights")
    os.mkfifo(tmp_path / "best.ckpt.calibration.json")
    with pytest.raises(StoreError, match=r"not a regular file \(a named pipe\)"):
        find_calibration(checkpoint, {})


def test_the_entry_that_does_not_fit_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "best.ckpt"
    path = write_calibration(checkpoint, _make(checkpoint))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"features": [[0.5, 0.1, "x"]]}))
    with pytest.raises(StoreError, match=r"features\.0\.2='x': input should be a valid number"):
        find_calibration(checkpoint, _CONDITIONS)
