"""`Calibration`: thresholds of verdicts with bounded errors, in a file next to the checkpoint."""

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

_VERSION = 2  # scores of version 1 had six decimals
_ENDING = ".calibration.json"
_MOST_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Thresholds of image scores, their bounds on errors, and the conditions under which they hold.

    Args:
        good_below: Images with scores below it are ``good``.
        defect_above: Of the others, images with scores above it are ``defect``, the rest ``review``.
        miss: Bound on the fraction of defective images that are called good.
        false_alarms: Bound on the fraction of good images that are called defective.
        confidence: Probability that each bound holds.
        unit: The unit whose samples are independent: ``image`` or ``lot``.
        checkpoint_sha256: Checksum of the checkpoint.
        conditions: Options that affect scores.
        features: [n][3] features of the calibration images, see `lit_inspect.drift`.
        defects: Kind of defects to which the bound on misses applies.
        version: Version of the file format.
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
        """Return the rule for verdicts."""
        return Judge(review=(self.good_below, self.defect_above))

    @property
    def promise(self) -> str:
        """Return the bounds in words for ``images.csv``."""
        misses = "misses" if self.defects == "real" else "misses of synthetic defects"
        return (
            f"{misses} <= {self.miss:g} and false alarms <= {self.false_alarms:g}, "
            f"each at {self.confidence:g}"
        )

    def guarantee(self, bank: ImageBank, numbers: Sequence[int]) -> str:
        """Return the promise for the verdicts of some images; withdraw it if the images have drifted."""
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
    """Truth of images by their numbers, for example of a datamodule.

    Attributes:
        image_kinds: Kind of each image, ``good`` for one without a defect; empty if unknown.
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
    """Truth that may be unknown for a reason."""

    def describe_doubt(self) -> str:
        """Return the reason why the truth is unknown, with advice; empty if it is known."""
        ...


def choose_judge(
    threshold: float | None, calibration: Calibration | None, doubt: str | None
) -> Judge:
    """Return the rule for the verdicts of a run.

    Args:
        threshold: Threshold of the options, or the one that validation chose.
        calibration: Calibration whose thresholds replace it, if any.
        doubt: Reason why the model is not reliable, if any.
    """
    if calibration is not None:
        return replace(calibration.judge, is_unsure=bool(doubt))
    return Judge(threshold=threshold, is_unsure=bool(doubt))


def describe_images(bank: ImageBank, numbers: Sequence[int]) -> Doubles:
    """Return the features of the center of some images: [n, 3]."""
    rows = [describe_pixels(cut_middle(bank, number, LOOKED_AT_PX)) for number in numbers]
    return np.array(rows).reshape(-1, len(FEATURES))


def score_verdicts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare verdicts with the truth.

    Args:
        rows: Rows of ``images.csv``.

    Returns:
        ``predict/missed`` and ``predict/false_alarms`` count images; ``predict/image_auroc`` is NaN
            unless there are good and defective images. Each kind also has its AUROC against good
            images if there are several kinds.
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
    if len(kinds) > 1:  # for a single kind it would be the same number
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
    """Write a calibration next to its checkpoint as a whole; return the path.

    Raises:
        StoreError: The file cannot be written.
    """
    path = _path_of(checkpoint)
    write_json(path, asdict(calibration))
    return path


def check_writable(checkpoint: Path) -> None:
    """Refuse a checkpoint if no calibration can be written next to it.

    Raises:
        StoreError: The folder is read-only or the disk is full.
    """
    try:
        try_writing(checkpoint.parent)
    except OSError as error:
        raise StoreError(
            f"cannot write {show_path(_path_of(checkpoint))}: {error.strerror}. The calibration is "
            "stored next to its checkpoint: make the folder writable, or calibrate a copy of the run"
        ) from error


def find_calibration(checkpoint: Path, conditions: Mapping[str, Any]) -> Calibration | None:
    """Return the calibration of a checkpoint if it applies; log the reason if it does not.

    Args:
        checkpoint: The checkpoint file.
        conditions: Current values of the options that affect scores.

    Raises:
        StoreError: The file next to the checkpoint is damaged.
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
            "verdicts have no guarantee, because options differ from those of %s: %s",
            show_path(path),
            "; ".join(changes),
        )
        return None
    return calibration


def _path_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + _ENDING)


def _read(path: Path) -> Calibration:
    """Read and validate a file from an untrusted source.

    Raises:
        StoreError: The file is damaged.
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
    values_now = flatten(json.loads(json.dumps(now)))  # with lists instead of tuples
    for key in sorted(values_before.keys() | values_now.keys()):
        if values_before.get(key) != values_now.get(key):
            yield f"{key}={values_now.get(key)} (calibrated with {values_before.get(key)})"
