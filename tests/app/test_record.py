"""What a checkpoint says of its training is held to kinds and ranges before anything is built."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_data.app.record import read_record
from lit_data.core.errors import StoreError

RECORD = {
    "version": 1,
    "experiment": "segmentation",
    "root": "/data",
    "kind": "lit_data.datamodules.InspectionDataModule",
    "data": {"classes": None, "size_px": [64, 64]},
    "model": {"_target_": "lit_data.models.SegmentationModule", "net": {"width": 16}},
    "scores": {"val/dice": 0.9, "val/auroc": float("nan")},
    "look": {"channels": 1, "size_px": [96, 96], "grey": 0.4, "spread": 0.1},
}


def _write(folder: Path, **changes: object) -> Path:
    path = folder / "best.ckpt"
    torch.save({"state_dict": {}, "epoch": 4, "lit_data": {**RECORD, **changes}}, path)
    return path


def _unfold(depth: int) -> list[Any]:
    values: list[Any] = [1]
    for _ in range(depth):
        values = [values] * 10
    return values


def _hold_itself(kind: type[Any]) -> object:
    values = kind()
    if isinstance(values, dict):
        values["x"] = values
    else:
        values.append(values)
    return values


def test_a_record_says_how_long_it_was_trained(tmp_path: Path) -> None:
    record = read_record(_write(tmp_path))
    assert record is not None
    assert record["epochs"] == 5
    assert record["scores"]["val/dice"] == 0.9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"x": _unfold(30)}}, "holds more than 2000000 values"),
        ({"data": {"x": _unfold(5)}}, "holds more than 200000 values"),
        ({"data": {"x": _hold_itself(list)}}, "nested more than 60 deep"),
        ({"model": _hold_itself(dict)}, "nested more than 60 deep"),
        ({"data": {"size_px": [10**400]}}, "'data.size_px.0.' holds no plain value"),
        ({"data": {"read": "${oc.env:HOME}"}}, "'data.read' holds no plain value"),
        ({"data": {"x": torch.zeros(2)}}, "'data.x' holds no plain value"),
        ({"look": {**RECORD["look"], "grey": float("nan")}}, "look.grey=nan"),  # type: ignore[dict-item]
        ({"look": {**RECORD["look"], "size_px": [0, 5]}}, "look.size_px.0=0"),  # type: ignore[dict-item]
        ({"look": {**RECORD["look"], "channels": 10**30}}, "look.channels=1000"),  # type: ignore[dict-item]
        ({"scores": {"val/dice": "high"}}, "scores.val/dice='high'"),
        ({"root": 5}, "root=5"),
        ({"experiment": "x" * 10**6}, "experiment='xxx"),
        ({"model": [1]}, "model=a list of 1"),
    ],
)
def test_what_is_no_record_is_refused_in_a_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=message) as raised:
        read_record(_write(tmp_path, **changes))
    assert len(str(raised.value)) < 500
