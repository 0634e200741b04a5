"""`Calibration`: thresholds of verdicts with bounded errors, in a file beside their checkpoint."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torchmetrics.functional.classification import binary_auroc

from lit_data.core.errors import DataError, StoreError, show_path
from lit_data.core.files import find_sha256, flatten, is_there, try_writing, write_json
from lit_data.core.opening import read_within
from lit_data.core.plain import check_size, parse_json, read_as
from lit_data.core.types import Array, Doubles
from lit_data.images.bank import ImageBank
from lit_data.images.store.store import cut_middle
from lit_inspect.drift import FEATURES, LOOKED_AT_PX, WITHDRAWN, describe_pixels, find_drift
from lit_inspect.verdicts import DEFECT, GOOD, Judge

log = logging.getLogger(__name__)

_VERSION = 2  # of 1 the scores had six decimals
_ENDING = ".calibration.json"
_MOST_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Thresholds of image scores, the bounds that they keep, and what they hold for.

    Args:
        good_below: Scores below it are ``good``.
        defect_above: Of the others those above it are ``defect``; the rest is for ``review``.
        miss: Bound of the fraction of defective images that are called good.
        false_alarms: Bound of the fraction of good images that are called defective.
        confidence: Probability that a bound holds, of each.
        unit: Independent of each other: ``image`` or ``lot``.
        checkpoint_sha256: Of the weights.
        conditions: Options that scores depend on.
        features: [n][3] of the images of the calibration, see `lit_inspect.drift`.
        defects: Those that the bound of misses is about.
        version: Of this file.
    """

    good_below: float
    defect_above: float
    miss: float
    false_alarms: float
    confidence: float
    unit: str
    checkpoint_sha256: str
    conditions: Mapping[str, Any]
    features: Sequence[Sequence[float]]
    defects: Literal["real", "synthetic"] = "real"
    version: int = _VERSION

    @property
    def judge(self) -> Judge:
        """Return the rule of the verdicts."""
        return Judge(review=(self.good_below, self.defect_above))

    @property
    def promise(self) -> str:
        """Bounds in words, as ``images.csv`` has them."""
        misses = "misses" if self.defects == "real" else "misses of synthetic defects"
        return (
            f"{misses} <= {self.miss:g} and false alarms <= {self.false_alarms:g}, "
            f"each at {self.confidence:g}"
        )

    def guarantee(self, bank: ImageBank, numbers: Sequence[int]) -> str:
        """Return the promise for the verdicts of some images, or that it is withdrawn, and why."""
        feature = find_drift(np.array(self.features), describe_images(bank, numbers))
        if feature is None:
            return self.promise
        log.warning(
            "the guarantee is withdrawn: the %s of these images differs from that of the "
            "calibration; calibrate with current images",
            feature,
        )
        return WITHDRAWN


class KnowsTruth(Protocol):
    """Truth of images by their numbers, such as a datamodule knows it.

    Attributes:
        image_kinds: Kind of each image, ``good`` without a defect; empty if unknown.
    """

    @property
    def image_kinds(self) -> Sequence[str]: ...  # noqa: D102 - see the class

    def has_defect(self, number: int, /) -> bool | None:
        """Return True if an image shows a defect; None if unknown."""
        ...

    def read_mask(self, number: int, /) -> Array | None:
        """Return [H, W] uint8, above 0 where there is a defect; None if unknown."""
        ...


class TellsDoubt(KnowsTruth, Protocol):
    """Truth that may be doubtful for a reason."""

    def describe_doubt(self) -> str:
        """Return the reason why the truth is not known, with advice; empty if it is known."""
        ...


def choose_judge(
    threshold: float | None, calibration: Calibration | None, doubt: str | None
) -> Judge:
    """Return the rule by which a run gives verdicts.

    Args:
        threshold: Of the options, or the one that validation chose.
        calibration: Takes its place.
        doubt: Why the model is worth nothing.
    """
    if calibration is not None:
        return replace(calibration.judge, is_unsure=bool(doubt))
    return Judge(threshold=threshold, is_unsure=bool(doubt))


def describe_images(bank: ImageBank, numbers: Sequence[int]) -> Doubles:
    """Return the features of some images by the middle of each: [n, 3]."""
    rows = [describe_pixels(cut_middle(bank, number, LOOKED_AT_PX)) for number in numbers]
    return np.array(rows).reshape(-1, len(FEATURES))


def score_verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare verdicts with the truth.

    Args:
        rows: Of ``images.csv``.

    Returns:
        ``predict/missed`` and ``predict/false_alarms``, images; and ``predict/image_auroc`` of all,
        NaN where not both are there, and of each kind against the good ones.
    """
    good = [row for row in rows if row["truth"] == GOOD]
    defective = [row for row in rows if row["truth"] == DEFECT]
    metrics: dict[str, Any] = {
        "predict/missed": sum(row["verdict"] == GOOD for row in defective),
        "predict/false_alarms": sum(row["verdict"] == DEFECT for row in good),
    }
    metrics["predict/image_auroc"] = math.nan
    if not good or not defective:
        return metrics
    metrics["predict/image_auroc"] = _measure_auroc(good, defective)
    kinds = sorted({row["kind"] for row in defective})
    if len(kinds) > 1:  # of a single kind it would be the same number again
        for kind in kinds:
            of_kind = [row for row in defective if row["kind"] == kind]
            metrics[f"predict/image_auroc_{kind}"] = _measure_auroc(good, of_kind)
    return metrics


def _measure_auroc(
    good: Sequence[Mapping[str, Any]], defective: Sequence[Mapping[str, Any]]
) -> float:
    scores = torch.tensor([row["score"] for row in (*good, *defective)])
    truth = torch.tensor([0] * len(good) + [1] * len(defective))
    return round(float(binary_auroc(scores, truth)), 4)


def write_calibration(checkpoint: Path, calibration: Calibration) -> Path:
    """Write a calibration beside its checkpoint, whole or not at all; return the path.

    Raises:
        StoreError: The file cannot be written.
    """
    path = _path_of(checkpoint)
    write_json(path, asdict(calibration))
    return path


def check_writable(checkpoint: Path) -> None:
    """Refuse a checkpoint beside which no calibration can be written.

    Raises:
        StoreError: Its folder is read-only or full.
    """
    try:
        try_writing(checkpoint.parent)
    except OSError as error:
        raise StoreError(
            f"cannot write {show_path(_path_of(checkpoint))}: {error.strerror}. The calibration is "
            "stored next to its checkpoint: make the folder writable, or calibrate a copy of the run"
        ) from error


def find_calibration(checkpoint: Path, conditions: Mapping[str, Any]) -> Calibration | None:
    """Return the calibration of a checkpoint if it applies, and log if it does not.

    Args:
        checkpoint: The file of the weights.
        conditions: Options that scores depend on, as they are now.

    Raises:
        StoreError: The file beside the checkpoint is damaged.
    """
    path = _path_of(checkpoint)
    if checkpoint.is_dir() or not is_there(path):
        return None
    calibration = _read(path)
    if calibration.checkpoint_sha256 != find_sha256(checkpoint):
        log.warning(
            "%s belongs to other weights, so verdicts have no guarantee: calibrate the run again",
            show_path(path),
        )
        return None
    changes = list(_list_changes(calibration.conditions, conditions))
    if changes:
        log.warning(
            "verdicts have no guarantee, because the scores differ from those that %s was made "
            "with: %s",
            show_path(path),
            "; ".join(changes),
        )
        return None
    return calibration


def _path_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + _ENDING)


def _read(path: Path) -> Calibration:
    """Read a file that may be anybody's.

    Raises:
        StoreError: It is damaged.
    """
    from lit_data.predict.calibration_file import CONTENT

    try:
        content = read_as(CONTENT, parse_json(read_within(path, _MOST_BYTES)))
        check_size(content["conditions"])
        return Calibration(**content)
    except (DataError, ValueError) as error:
        text = str(error).removeprefix(f"{show_path(path)}: ")
        raise StoreError(
            f"{show_path(path)} is damaged ({text}): calibrate the run again, or remove it"
        ) from error


def _list_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield each option that differs, with both values."""
    values_before = flatten(before)
    values_now = flatten(json.loads(json.dumps(now)))  # with lists in the place of tuples
    for key in sorted(values_before.keys() | values_now.keys()):
        if values_before.get(key) != values_now.get(key):
            yield f"{key}={values_now.get(key)}, then {values_before.get(key)}"
