"""Judgement of a model by its scores: what it misses, of how many, and what may help."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lit_data.commands.result import read_number

_BAD = 0.5  # of what there is to find or to leave alone: a model that is wrong on more is no good
_FEW = 10  # on which a share says little
_FEW_TO_LEARN = 30
_FEW_EPOCHS = 10
_STAGES = ("test", "val")
_RECALLS = {
    "froc_1": "of the objects are missed at one false alarm per image",
    "defect_recall": "of the defects are missed at the rate of false alarms that recall is taken at",
}
"""Scores of what is found, where no images are counted, and what they leave."""
_NEAR_CHANCE = 0.6  # AUROC of images
_RANKS_WELL = 0.8  # from which AUROC on another threshold is right on most images
_LEAST_SCORES = {
    "val/image_auroc": _NEAR_CHANCE,
    "val/f1_max": 0.02,
    "val/map50": 0.05,
    "val/mean_dice": 0.02,
}
"""Scores below which a model is no better than chance."""


class Evidence(NamedTuple):
    """Files of a run by which it is judged.

    Attributes:
        scores: Figures of summary.json, or of a checkpoint.
        confusion: confusion.json, which may be anybody's.
        splits: Split and class of each image.
        config: The configuration.
    """

    scores: Mapping[str, Any]
    confusion: Mapping[str, Any]
    splits: Sequence[tuple[str, str]]
    config: Mapping[str, Any]


def judge(evidence: Evidence) -> str:
    """Return what a model is wrong on in most cases and what may help; empty where it is not."""
    fault = _find_fault(evidence) or find_doubt({"scores": evidence.scores}) or ""
    if not fault:
        return ""
    return f"{fault}. What may help: {'; '.join(_list_cures(evidence))}"


def find_doubt(record: Mapping[str, Any] | None) -> str | None:
    """Return why the scores of validation say that a model is of no use; None where they do not.

    Args:
        record: Of a checkpoint, with its ``scores``; None where there is none.
    """
    scores = {} if record is None else record.get("scores", {})
    for name, least in _LEAST_SCORES.items():
        score = read_number(scores, name)
        if score is not None and score < least:
            return f"{name} of the model is {score:.3g}, which is no better than chance"
    return None


def describe_threshold(scores: Mapping[str, Any]) -> str:
    """Return how sure a threshold is that validation images chose; empty where none of them were counted.

    Where k of n images lie beyond a threshold, one more image of the same kind does so with a
    probability of at most (k + 1) / (n + 1), as each of the n + 1 is equally likely to be the new one.

    Args:
        scores: Figures of summary.json.
    """
    good = read_number(scores, "val/good_images")
    alarms = read_number(scores, "val/false_alarms")
    if not good or alarms is None:
        return ""
    risk = f"of new good images about {_bound(alarms, good)} may be called defective"
    defective = read_number(scores, "val/defective_images")
    misses = read_number(scores, "val/misses")
    if not defective or misses is None:
        return f"threshold by {good:.0f} good validation images: {risk}"
    return (
        f"threshold by {good:.0f} good and {defective:.0f} defective validation images: {risk}, and "
        f"of new defective ones about {_bound(misses, defective)} missed"
    )


def _bound(share: float, count: float) -> str:
    """Return ``1 in 13`` or ``24 %`` for one image more than a share of some images."""
    beyond = round(share * count)  # a summary holds shares alone
    return f"1 in {count + 1:.0f}" if beyond == 0 else f"{(beyond + 1) / (count + 1):.0%}"


def _find_fault(evidence: Evidence) -> str:
    for stage in _STAGES:
        table = evidence.confusion.get(stage)
        if table is not None:
            fault = _judge_images(evidence.confusion.get("classes"), table, stage)
            return fault + _describe_ranking(evidence.scores, stage) if fault else ""
    for name, words in _RECALLS.items():
        for stage in _STAGES:
            recall = read_number(evidence.scores, f"{stage}/{name}")
            if recall is not None:
                return f"{1 - recall:.0%} {words} ({stage})" if 1 - recall >= _BAD else ""
    return ""


def _describe_ranking(scores: Mapping[str, Any], stage: str) -> str:
    """Return how well images are ranked, whatever the threshold is."""
    auroc = read_number(scores, f"{stage}/image_auroc")
    if auroc is None:
        return ""
    remark = ", hardly better than chance" if auroc < _NEAR_CHANCE else ""
    return f", image AUROC {auroc:.2f}{remark}"


def _judge_images(classes: object, table: object, stage: str) -> str:
    """Judge by the images of each class (rows) and what the model takes them for (columns)."""
    counts = _read_counts(classes, table)
    if counts is None or not isinstance(classes, list):
        return ""
    if "good" not in classes:
        total = sum(map(sum, counts))
        wrong = total - sum(row[number] for number, row in enumerate(counts))
        text = f"are taken for another class ({wrong} of {total} in {stage})"
        return (
            f"{wrong / total:.0%} of the images {text}" if total and wrong / total >= _BAD else ""
        )
    good = classes.index("good")
    good_images = sum(counts[good])
    alarms = good_images - counts[good][good]
    defective_images = sum(map(sum, counts)) - good_images
    missed = sum(row[good] for row in counts) - counts[good][good]
    shares = []
    if defective_images:
        share = f"{missed / defective_images:.0%} of defective images are missed"
        shares.append(f"{share} ({missed} of {defective_images} in {stage})")
    if good_images:
        share = f"{alarms / good_images:.0%} of good images are called defective"
        shares.append(f"{share} ({alarms} of {good_images} in {stage})")
    is_bad = missed >= _BAD * max(1, defective_images) or alarms >= _BAD * max(1, good_images)
    if 0 < defective_images < _FEW:
        shares.append("which is measured on few")
    return ", ".join(shares) if is_bad else ""


def _read_counts(classes: object, table: object) -> list[list[int]] | None:
    """Return a square table of counts; None for anything else."""
    if not isinstance(classes, list) or not isinstance(table, list) or len(table) != len(classes):
        return None
    for row in table:
        if not isinstance(row, list) or len(row) != len(classes):
            return None
        if not all(isinstance(count, int) and count >= 0 for count in row):
            return None
    return table


def _list_cures(evidence: Evidence) -> Iterator[str]:
    """Yield what may help, by what the run was trained with."""
    auroc = read_number(evidence.scores, "test/image_auroc")
    if auroc is not None and auroc >= _RANKS_WELL:
        yield "another threshold, of predict.image_threshold or calibrate, as images are ranked well"
    model = _as_mapping(evidence.config.get("model"))
    data = _as_mapping(evidence.config.get("data"))
    trains_by_steps = not str(model.get("_target_")).endswith("AnomalyModule")
    epochs = _as_mapping(evidence.config.get("trainer")).get("max_epochs")
    if trains_by_steps and isinstance(epochs, int) and 0 < epochs < _FEW_EPOCHS:
        yield f"train longer than {epochs} epochs, such as trainer.max_epochs={5 * epochs}"
    if data.get("size_px") is not None:
        yield f"small defects vanish where images are scaled: raise data.size_px={data['size_px']}"
    elif data.get("scale") is not None:
        yield f"small defects vanish where images are scaled: raise data.scale={data['scale']}"
    counts = Counter(kind != "good" for split, kind in evidence.splits if split == "train" and kind)
    count = counts[True] if trains_by_steps else counts[False]
    if 0 < count < _FEW_TO_LEARN:
        yield f"give more images to learn from than {count} {'defective' if trains_by_steps else 'good'} ones"
    if _as_mapping(model.get("net")).get("weights", "") is None:
        yield "start from a pretrained net, see docs/pretrained.md"
    if not trains_by_steps:
        yield "see docs/anomaly.md for when to use it"
    yield "look at predictions.png"


def _as_mapping(node: object) -> Mapping[str, Any]:
    return node if isinstance(node, Mapping) else {}
