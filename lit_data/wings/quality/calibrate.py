"""``calibrate``: thresholds of verdicts with bounds on misses and false alarms."""

import csv
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from lit_data.app.build import find_trained
from lit_data.app.configuration.names import resolve_target
from lit_data.app.configuration.targets import read_options
from lit_data.app.predict import LocalFolder, Prediction, prepare_prediction
from lit_data.app.result import print_table
from lit_data.app.shares import build_lone_trainer
from lit_data.app.trained import is_trained_root
from lit_data.core.checks import check_types
from lit_data.core.errors import ConfigError, show_path
from lit_data.core.files import find_sha256, refuse_links, write_table
from lit_data.datamodules.drawn_images import DrawnImages
from lit_data.datasets.splits import group_by_name
from lit_data.predict.options import PredictOptions, Share, Use
from lit_data.predict.task import find_task_of
from lit_data.predict.verdicts import (
    Calibration,
    check_writable,
    describe_images,
    write_calibration,
)
from lit_data.wings.quality.bounds import (
    Limit,
    count_needed,
    find_limit,
    import_scipy,
    upper_rate,
)
from lit_inspect.cells import restore_cell
from lit_inspect.verdicts import DEFECT, GOOD, REVIEW

log = logging.getLogger(__name__)

Made = TypeVar("Made")

_TABLE = "images.csv"
_MOST_DESCRIBED = 1000  # images that inputs are compared with later
_UNUSED = (*PredictOptions.list_names(Use.INPUTS), "folder", "image_threshold")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The options of ``calibrate``; conf/calibrate.yaml has one line for each.

    Raises:
        ConfigError: A rate is not above 0 and below 1.
    """

    miss: float
    false_alarms: float
    confidence: float
    groups: str | None
    images: Literal["val", "test", "all"]

    def __post_init__(self) -> None:
        """Check the rates."""
        check_types(CalibrateOptions, vars(self))
        for name in ("miss", "false_alarms", "confidence"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ConfigError(f"{name}={value!r} must be above 0 and below 1, such as 0.02")


def run(cfg: DictConfig) -> dict[str, Any]:
    """Score images of known truth, and set the thresholds of verdicts from the scores.

    The thresholds are written to a file beside the checkpoint, and ``predict`` uses them for its
    verdicts from then on. The run folder gets the files of ``predict``, with these verdicts.

    Returns:
        Thresholds, and bounds on their misses and false alarms.

    Raises:
        ConfigError: Images of this kind have no verdicts, their truth is unknown, or there are too
            few for the bounds.
        StoreError: The calibration cannot be written.
    """
    options = read_own_options(CalibrateOptions, cfg)
    checkpoint = find_trained(cfg)
    # Before hours of prediction, like the check of the number of images.
    check_writable(checkpoint)
    prediction = open_split(cfg, checkpoint, options.images)
    task = prediction.task
    drawn = task.draw_truth("train" if options.images == "all" else options.images)
    if drawn is not None:
        prediction = prediction.choose(range(len(drawn)))
    images = KnownImages.open(prediction, options.groups, drawn)
    for name, is_chosen in images.by_bound:
        _refuse_few(name, options, images, is_chosen)
    rows = predict_scores(prediction)
    images = images.select([row["image"] for row in rows])
    scores = np.array([row["score"] for row in rows], np.float64)
    calibration, metrics = calibrate(scores, images, options, prediction)
    _write_verdicts(prediction.run.folder, rows, images, calibration)
    path = write_calibration(checkpoint, calibration)
    log.info("calibration: %s", path)
    if options.images == "val":
        log.info(
            "validation chose the checkpoint too, so the bounds are slightly optimistic: "
            "images=test, or images=all data.root=FOLDER with new images, is strict"
        )
    return metrics


def read_own_options(kind: Callable[..., Made], cfg: DictConfig) -> Made:
    """Return the options at the top level of the configuration of a command.

    Args:
        kind: Dataclass of the options.
        cfg: The configuration.
    """
    names = list(inspect.signature(kind).parameters)
    return read_options(kind, OmegaConf.masked_copy(cfg, names), "")


def open_split(
    cfg: DictConfig, checkpoint: Path, images: Literal["val", "test", "all"]
) -> Prediction:
    """Open the data and the model for a prediction of a split into the run folder.

    Args:
        cfg: The configuration.
        checkpoint: The file of the weights.
        images: A split, or ``all``.

    Raises:
        ConfigError: Images of this kind have no verdicts, SciPy is missing, options of ``predict``
            have no effect here, the model is unusable, or all images are those of the training.
    """
    kind = resolve_target(cfg.data._target_, "data")
    if not find_task_of(kind).has_verdicts():
        raise ConfigError(
            f"{cfg.command} is for verdicts on whole images, but a {kind.__name__} has none: use "
            "experiment=stripe, segmentation, anomaly, classification or detection"
        )
    options = read_options(PredictOptions, cfg.predict, "predict")
    import_scipy()  # if it is missing, nothing is scored first
    options.refuse(str(cfg.command), *_UNUSED)
    # A single CSV with all images is read again.
    options = replace(options, many_inputs=sys.maxsize)
    folder = Path(cfg.paths.run)
    refuse_links(folder, "paths.run")
    split = None if images == "all" else images
    prediction = prepare_prediction(
        cfg,
        options,
        checkpoint,
        LocalFolder(folder),
        Share(),
        build_lone_trainer(cfg),
        split=split,
    )
    root = cfg.data.get("root")
    if split is None and root is not None and is_trained_root(prediction.record, root):
        raise ConfigError(
            f"images=all of {root} holds the training images of the model, whose scores say "
            "nothing about new ones: give data.root=FOLDER of others, or images=test"
        )
    if prediction.run.doubt is not None:
        raise ConfigError(f"{prediction.run.doubt}: train longer, or choose another run")
    return prediction


@dataclass(frozen=True)
class KnownImages:
    """Images with known truth.

    Attributes:
        names: [n] paths relative to the root, as in tables.
        numbers: [n] numbers of the images in their bank.
        is_defective: [n] truth.
        lots: [n] number of the lot of each image; None if images are independent.
        is_drawn: True if the defects are synthetic.
    """

    names: Sequence[str]
    numbers: NDArray[np.int64]
    is_defective: NDArray[np.bool_]
    lots: NDArray[np.int64] | None
    is_drawn: bool = False

    @classmethod
    def open(
        cls, prediction: Prediction, groups: str | None, drawn: DrawnImages | None = None
    ) -> "KnownImages":
        """Read the truth of the images of a prediction.

        Args:
            prediction: Prediction that has not started.
            groups: Regular expression that identifies lots, if any.
            drawn: The images, if their defects are synthetic.

        Raises:
            ConfigError: The truth of an image is unknown.
        """
        if drawn is not None:
            return cls._of_drawn(drawn, groups)
        datamodule = prediction.task.datamodule
        all_names = datamodule.source.names(datamodule.bank)
        chosen = prediction.run.chosen
        numbers = range(len(all_names)) if chosen is None else chosen
        names = [all_names[number] for number in numbers]
        known = prediction.task.truth
        kinds = known.image_kinds
        doubt = known.describe_doubt()
        truth = []
        for name, number in zip(names, numbers, strict=True):
            has_defect = known.has_defect(number)
            if has_defect is None and doubt:
                raise ConfigError(doubt)
            if has_defect is None and not kinds[number]:
                raise ConfigError(
                    f"it is unknown whether {show_path(name)} shows a defect: it has no mask, no "
                    "box and no folder such as good; see docs/masks.md"
                )
            truth.append(kinds[number] != GOOD if has_defect is None else has_defect)
        lots = None
        if groups is not None and names:
            lots = group_by_name(names, groups, "groups")
        return cls(names, np.array(numbers, np.int64), np.array(truth, np.bool_), lots)

    @classmethod
    def _of_drawn(cls, drawn: DrawnImages, groups: str | None) -> "KnownImages":
        is_defective = np.array([drawn.has_defect(number) for number in range(len(drawn))])
        lots = None if groups is None else group_by_name(drawn.originals, groups, "groups")
        return cls(drawn.names, drawn.numbers, is_defective, lots, is_drawn=True)

    def select(self, names: Sequence[str]) -> "KnownImages":
        """Return the images with these names, in their order."""
        position_of = {name: position for position, name in enumerate(self.names)}
        at = np.array([position_of[name] for name in names], np.int64)
        lots = None if self.lots is None else self.lots[at]
        return KnownImages(names, self.numbers[at], self.is_defective[at], lots, self.is_drawn)

    @property
    def by_bound(self) -> tuple[tuple[str, NDArray[np.bool_]], ...]:
        """Option of each bound, and a mask [n] of the images that it applies to."""
        return ("miss", self.is_defective), ("false_alarms", ~self.is_defective)

    def count_units(self, is_chosen: NDArray[np.bool_]) -> int:
        """Return the number of the chosen images, or of their lots."""
        if self.lots is None:
            return int(is_chosen.sum())
        return len(np.unique(self.lots[is_chosen]))


def predict_scores(prediction: Prediction) -> list[dict[str, Any]]:
    """Predict all images of a prediction; return the rows of ``images.csv``."""
    # The defects listed with verdicts would come after the scores.
    replace(prediction, run=replace(prediction.run, lists_defects=False)).start()
    path = prediction.run.folder / _TABLE
    with path.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row["image"] = restore_cell(row["image"])
    return rows


def _write_verdicts(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    images: KnownImages,
    calibration: Calibration,
) -> None:
    """Write ``images.csv`` again, with the verdicts of a calibration."""
    for row, is_defective in zip(rows, images.is_defective, strict=True):
        row["verdict"] = calibration.judge(float(row["score"]))
        row["truth"] = DEFECT if is_defective else GOOD
    columns = ("image", "score", "verdict", "truth")
    write_table(folder / _TABLE, columns, rows)


def calibrate(
    scores: NDArray[np.float64],
    images: KnownImages,
    options: CalibrateOptions,
    prediction: Prediction,
) -> tuple[Calibration, dict[str, Any]]:
    """Choose both thresholds.

    Args:
        scores: [n] scores of the images.
        images: Images with their truth.
        options: The bounds.
        prediction: Prediction that made the scores.

    Returns:
        The calibration, and numbers for summary.json.

    Raises:
        ConfigError: There are too few images for a bound.
    """
    is_defective = images.is_defective
    misses = _find_limit("miss", options, scores, images, is_defective)
    # The same search with negative scores: false alarms are good images above a threshold.
    alarms = _find_limit("false_alarms", options, -scores, images, ~is_defective)
    numbers = np.unique(images.numbers)  # both of an image with synthetic defects have one
    step = -(-len(numbers) // _MOST_DESCRIBED)
    bank = prediction.task.datamodule.bank
    calibration = Calibration(
        good_below=misses.threshold,
        defect_above=-alarms.threshold,
        miss=options.miss,
        false_alarms=options.false_alarms,
        confidence=options.confidence,
        unit="image" if images.lots is None else "lot",
        checkpoint_sha256=find_sha256(prediction.checkpoint),
        conditions=prediction.conditions,
        features=describe_images(bank, numbers[::step].tolist()).tolist(),
        defects="synthetic" if images.is_drawn else "real",
    )
    verdicts = np.array([calibration.judge(score) for score in scores.tolist()])
    _print_verdicts(verdicts, is_defective, calibration)
    return calibration, {
        "calibrate/good_below": calibration.good_below,
        "calibrate/defect_above": calibration.defect_above,
        "calibrate/defective_images": int(is_defective.sum()),
        "calibrate/good_images": int((~is_defective).sum()),
        "calibrate/misses": int((verdicts[is_defective] == GOOD).sum()),
        "calibrate/miss_bound": misses.upper_rate,
        "calibrate/false_alarms": int((verdicts[~is_defective] == DEFECT).sum()),
        "calibrate/false_alarm_bound": alarms.upper_rate,
        "calibrate/review": int((verdicts == REVIEW).sum()),
    }


def _find_limit(
    name: str,
    options: CalibrateOptions,
    scores: NDArray[np.float64],
    images: KnownImages,
    is_chosen: NDArray[np.bool_],
) -> Limit:
    _refuse_few(name, options, images, is_chosen)
    lots = None if images.lots is None else images.lots[is_chosen]
    limit = find_limit(scores[is_chosen], getattr(options, name), options.confidence, lots)
    assert limit is not None  # the images are enough
    return limit


def _refuse_few(
    name: str, options: CalibrateOptions, images: KnownImages, is_chosen: NDArray[np.bool_]
) -> None:
    """Refuse images that are too few for a bound, even if none of them were wrong.

    Raises:
        ConfigError: There are too few images; the message says how many are needed.
    """
    rate: float = getattr(options, name)
    needed = count_needed(rate, options.confidence)
    count = images.count_units(is_chosen)
    if count >= needed:
        return
    kind = "defective images" if name == "miss" else "good images"
    unit = kind if images.lots is None else f"lots with {kind}"
    cure = "give more with images=all data.root=FOLDER"
    if count:
        # Rounded up, so that the suggested bound can be reached.
        least = np.ceil(1000 * upper_rate(0, count, options.confidence)) / 1000
        cure += f", or accept {name}={least:g}"
    raise ConfigError(
        f"{name}={rate:g}: {100 * rate:g} % at {100 * options.confidence:g} % needs at least "
        f"{needed} {unit}, and images={options.images} has {count}: {cure}"
    )


def _print_verdicts(
    verdicts: NDArray[np.str_], is_defective: NDArray[np.bool_], calibration: Calibration
) -> None:
    """Print how many images of either truth get each verdict."""
    rows = []
    for truth, is_of_truth in ((GOOD, ~is_defective), (DEFECT, is_defective)):
        of_truth = verdicts[is_of_truth]
        counts = [int((of_truth == verdict).sum()) for verdict in (GOOD, REVIEW, DEFECT)]
        rows.append([truth, *counts])
    print_table(
        ["truth", GOOD, REVIEW, DEFECT],
        rows,
        texts=["truth"],
        title="images by their verdicts",
        caption=calibration.promise,
    )
