"""`VerdictTable`: ``images.csv``, the verdicts of all images of a run, for all kinds of data."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lit_data.images.bank import ImageBank
from lit_data.predict.journal import Entry
from lit_data.predict.options import PredictOptions, PredictRun
from lit_data.predict.verdicts import KnowsTruth, choose_judge, score_verdicts
from lit_data.predict.writer import PredictionWriter
from lit_inspect.verdicts import DEFECT, GOOD, REVIEW, UNSURE

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

COLUMNS = ("image", "score", "verdict")
COUNTED_COLUMNS = ("image", "score", "defects", "verdict")
"""Columns if the defects of an image are counted."""

_TRUTHS = (GOOD, DEFECT)
_MANY = 10  # so many images are usually not all defective


class VerdictTable:
    """Table with the verdicts of all images of a run, by their scores and one rule.

    It always has the columns ``image``, ``score`` and ``verdict``. It has ``truth`` and ``kind`` if
    the truth of every image is known, and ``guarantee`` if the run is calibrated.

    Args:
        truth: Truth of the images.
        bank: The images.
        run: Run with the calibration, if any, and the doubt.
        options: Options with the threshold of image scores.
        expects_good: Warn if all of many images are defective, also if no score decides; False for
            boxes, because all photographs may show an object.

    Attributes:
        judge: Rule for the verdicts.
    """

    def __init__(
        self,
        truth: KnowsTruth,
        bank: ImageBank,
        run: PredictRun,
        options: PredictOptions,
        *,
        expects_good: bool = True,
    ) -> None:
        self._truth = truth
        self._bank = bank
        self._kinds = truth.image_kinds
        self._calibration = run.calibration
        self._doubt = run.doubt
        self._folder = run.folder
        self.judge = choose_judge(options.image_threshold, run.calibration, run.doubt)
        self._expects_good = expects_good or self.judge.goes_by_score

    def measure_margin(self, score: float, default: float) -> float:
        """Return the distance of a score from the value at which the verdict changes.

        Args:
            score: Score of an image.
            default: That value if no score decides.
        """
        judge = self.judge
        if judge.review is not None:
            return abs(score - sum(judge.review) / 2)
        return abs(score - (default if judge.threshold is None else judge.threshold))

    def make_row(self, entry: Entry, number: int, *, is_found: bool) -> dict[str, Any]:
        """Return the row of an image; its truth is empty if it is unknown.

        Args:
            entry: Score of the image, and a note with the references that do not fit.
            number: Number of the image.
            is_found: True if a defect was found in it.
        """
        has_defect = self._truth.has_defect(number)
        return {
            "image": entry.image,
            "score": entry.score,
            "verdict": self.judge(entry.score, is_found=is_found, fits=not entry.note),
            "truth": "" if has_defect is None else _TRUTHS[has_defect],
            "kind": self._kinds[number] if self._kinds else "",
            "threshold": self.judge.threshold,
        }

    def write(
        self,
        writer: PredictionWriter,
        rows: Sequence[Row],
        columns: Sequence[str],
        others: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write ``images.csv``.

        Args:
            writer: Writer of the run.
            rows: Rows of all images, see `make_row`.
            columns: First columns.
            others: Columns after the truth.

        Returns:
            Number of images with the verdict ``defect``, and the guarantee, misses, false alarms and
                AUROC if they are known.
        """
        is_known = self.is_known(rows)
        names = (*columns, *(("truth", "kind") if is_known else ()), *others)
        guarantee = self._find_guarantee(writer, rows)
        if guarantee:
            names = (*names, "guarantee")
        table = [{**row, "guarantee": guarantee} for row in rows]
        path = writer.write_rows(self._folder / "images", names, table)
        log.info("verdicts: %s", path)
        self._warn(rows)
        writer.verdicts = Counter(row["verdict"] for row in rows)
        judged_bad = sum(row["verdict"] == DEFECT for row in rows)
        metrics: dict[str, Any] = {"predict/images_with_defects": judged_bad}
        if guarantee:
            metrics["predict/guarantee"] = guarantee
            metrics["predict/review"] = sum(row["verdict"] == REVIEW for row in rows)
        if not is_known:
            return metrics
        truths = {row["truth"] for row in rows}
        if len(truths) == 1:
            lack = "all images show a defect" if DEFECT in truths else "no image shows a defect"
            log.info("%s, so there is no image AUROC", lack)
        return metrics | score_verdicts(rows)

    def is_known(self, rows: Sequence[Row]) -> bool:
        """Return True if the truth of every image is known."""
        return bool(rows) and all(row["truth"] for row in rows)

    def _find_guarantee(self, writer: PredictionWriter, rows: Sequence[Row]) -> str:
        """Return the guarantee of the verdicts, which may be withdrawn; empty if there is none."""
        if self._calibration is None or self._doubt:
            return ""
        numbers = [writer.numbers[row["image"]] for row in rows]
        return self._calibration.guarantee(self._bank, numbers)

    def _warn(self, rows: Sequence[Row]) -> None:
        if self._doubt:
            log.warning(
                "%s: all verdicts are %s: train longer, or look at report.html of the run",
                self._doubt,
                UNSURE,
            )
            return
        is_odd = len(rows) >= _MANY and all(row["verdict"] == DEFECT for row in rows)
        if is_odd and self._expects_good:
            log.warning(
                "all %d images are defective: is this the right model, and does its threshold fit "
                "these images? predict.image_threshold sets another",
                len(rows),
            )


def rank_errors(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return defective images in ascending order of scores, and good ones in descending order."""
    defective = [row for row in rows if row["truth"] == DEFECT]
    good = [row for row in rows if row["truth"] == GOOD]
    defective.sort(key=lambda row: row["score"])
    good.sort(key=lambda row: -row["score"])
    return defective, good


def is_wrong(row: Row) -> bool:
    """Return True for a miss or a false alarm."""
    return (row["truth"], row["verdict"]) in ((DEFECT, GOOD), (GOOD, DEFECT))


def describe_row(row: Row) -> str:
    """Return the verdict and score of an image, and whether it is wrong, for a picture's title."""
    score = f"score {row['score']:.2f}"
    if not row["truth"]:
        return f"{row['verdict']}, {score}"
    kind = row["kind"] or row["truth"]
    if is_wrong(row):
        is_missed = row["verdict"] == GOOD
        if row.get("threshold") is not None:
            sign = "<" if is_missed else "≥"
            score = f"score {row['score']:.3g} {sign} {row['threshold']:.3g}"
        return f"{kind}, {'missed' if is_missed else 'false alarm'}, {score}"
    return f"{kind}, {score}" if kind == row["verdict"] else f"{kind}: {row['verdict']}, {score}"
