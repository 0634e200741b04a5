"""Verdict on a model by its scores: what it finds, of how many, and what may help where that is little."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lit_data.app.result import find_monitor, format_value, read_number, split_stage
from lit_inspect.counts import counted

_BAD = 0.5  # of what there is to find or to leave alone: a model that is wrong on more is no good
_FEW = 10  # on which a share says little
_FEW_TO_LEARN = 30
_FEW_EPOCHS = 10
_ONE_PASS = (
    "AnomalyModule",
    "FeatureDifferenceModule",
)  # learn no weights, and from good images alone
_STAGES = ("test", "val")
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


class Verdict(NamedTuple):
    """Judgement of a model.

    Attributes:
        sentence: What it finds, without a point; empty where nothing was measured.
        cures: What may help; empty of a model that is right in most cases.
    """

    sentence: str = ""
    cures: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All of it in a line."""
        if not self.cures:
            return self.sentence
        return f"{self.sentence}. What may help: {'; '.join(self.cures)}"


def judge(evidence: Evidence) -> Verdict:
    """Return what a model finds, and what may help where it is wrong in most cases."""
    sentence, is_bad = _find_verdict(evidence)
    if not is_bad and (doubt := find_doubt({"scores": evidence.scores})):
        sentence, is_bad = f"{sentence}; {doubt}" if sentence else doubt, True
    return Verdict(sentence, tuple(_list_cures(evidence)) if is_bad else ())


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
    risk = f"about {_bound(alarms, good)} of new good images may count as defective"
    defective = read_number(scores, "val/defective_images")
    misses = read_number(scores, "val/misses")
    # A summary holds counts as floats.
    if not defective or misses is None:
        return f"threshold from {counted(round(good), 'good validation image')}: {risk}"
    return (
        f"threshold from {good:.0f} good and "
        f"{counted(round(defective), 'defective validation image')}: "
        f"{risk}, and about {_bound(misses, defective)} of new defective ones missed"
    )


def _bound(share: float, count: float) -> str:
    """Return ``1 in 13`` or ``24 %`` for one image more than a share of some images."""
    beyond = round(share * count)  # a summary holds shares alone
    return f"1 in {count + 1:.0f}" if beyond == 0 else f"{(beyond + 1) / (count + 1):.0%}"


def _find_verdict(evidence: Evidence) -> tuple[str, bool]:
    """Return the verdict, and True for one on a model that is wrong in most cases."""
    verdicts = _as_mapping(evidence.confusion.get("verdicts"))
    classes = evidence.confusion.get("classes")
    for names, tables in ((["good", "defect"], verdicts), (classes, evidence.confusion)):
        for stage in _STAGES:
            counts = _read_counts(names, tables.get(stage))
            if isinstance(names, list) and counts is not None and any(map(any, counts)):
                return _judge_images(evidence, counts, stage, names)
    model = _as_mapping(evidence.config.get("model"))
    rate = model.get("false_alarms_per_patch")
    per_patch = (
        f"{rate} false alarms per patch" if rate else "the rate of false alarms it is taken at"
    )
    recalls = {
        "froc_1": "of the objects at one false alarm per image",
        "defect_recall": f"of the defects at {per_patch}",
    }
    for name, words in recalls.items():
        for stage in _STAGES:
            recall = read_number(evidence.scores, f"{stage}/{name}")
            if recall is not None:
                return f"the model finds {recall:.0%} {words}, in {stage}", 1 - recall >= _BAD
    return _name_score(evidence), False


def _name_score(evidence: Evidence) -> str:
    """Return the score that chose the checkpoint; empty where there is none."""
    monitor, _ = find_monitor(_as_mapping(evidence.config.get("callbacks")))
    metric = split_stage(monitor or "")[1]
    for stage in _STAGES:
        name = f"{stage}/{metric}"
        score, baseline = (read_number(evidence.scores, key) for key in (name, f"{name}_baseline"))
        if metric and score is not None:
            beside = "" if baseline is None else f" (baseline {format_value(name, baseline)})"
            return f"{metric.replace('_', ' ')} of the model is {format_value(name, score)}{beside}, in {stage}"
    return ""


def _judge_images(
    evidence: Evidence, counts: Sequence[Sequence[int]], stage: str, classes: Sequence[str]
) -> tuple[str, bool]:
    """Judge by the images of each class (rows) and what the model takes them for (columns)."""
    if "good" not in classes:
        total = sum(map(sum, counts))
        right = sum(row[number] for number, row in enumerate(counts))
        text = f"the model classifies {right / total:.0%} of the images correctly"
        return f"{text} ({right} of {total} in {stage})", 1 - right / total >= _BAD
    good = classes.index("good")
    good_images = sum(counts[good])
    alarms = good_images - counts[good][good]
    defective_images = sum(map(sum, counts)) - good_images
    missed = sum(row[good] for row in counts) - counts[good][good]
    shares = []
    if defective_images:
        hits = defective_images - missed
        share = f"finds {hits / defective_images:.0%} of the defective images"
        shares.append(f"{share} ({hits} of {defective_images} in {stage})")
    if good_images:
        share = f"marks {alarms / good_images:.0%} of the good images as defective"
        shares.append(f"{share} ({alarms} of {good_images} in {stage})")
    sentence = f"the model {' and '.join(shares)}{_describe_ranking(evidence.scores, stage)}"
    if 0 < defective_images < _FEW:
        sentence += "; measured on few defective images"
    is_bad = missed >= _BAD * max(1, defective_images) or alarms >= _BAD * max(1, good_images)
    return sentence, is_bad


def _describe_ranking(scores: Mapping[str, Any], stage: str) -> str:
    """Return how well images are ranked, whatever the threshold is."""
    auroc = read_number(scores, f"{stage}/image_auroc")
    if auroc is None:
        return ""
    remark = ", hardly better than chance" if auroc < _NEAR_CHANCE else ""
    return f"; image AUROC {auroc:.2f}{remark}"


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
        yield (
            "set another threshold with predict.image_threshold or calibrate, because images "
            "are ranked well"
        )
    model = _as_mapping(evidence.config.get("model"))
    data = _as_mapping(evidence.config.get("data"))
    trains_by_steps = not str(model.get("_target_")).endswith(_ONE_PASS)
    epochs = _as_mapping(evidence.config.get("trainer")).get("max_epochs")
    if trains_by_steps and isinstance(epochs, int) and 0 < epochs < _FEW_EPOCHS:
        yield f"train longer than {counted(epochs, 'epoch')}, such as trainer.max_epochs={5 * epochs}"
    if data.get("size_px") is not None:
        patches = ", or set data.size_px=null data.patch_px=128" if "patch_px" in data else ""
        yield (
            "small defects vanish when images are scaled down: raise "
            f"data.size_px above {data['size_px']}{patches}"
        )
    elif data.get("scale") is not None:
        yield f"small defects vanish when images are scaled down: raise data.scale above {data['scale']}"
    counts = Counter(kind != "good" for split, kind in evidence.splits if split == "train" and kind)
    count = counts[True] if trains_by_steps else counts[False]
    if 0 < count < _FEW_TO_LEARN:
        kind = "defective image" if counts[False] else "image"  # no class may be of good parts
        yield f"train on more than {counted(count, kind if trains_by_steps else 'good image')}"
    if _as_mapping(model.get("net")).get("weights", "") is None:
        yield "start from a pretrained net, see docs/pretrained.md"
    if not trains_by_steps:
        yield "see docs/anomaly.md for when to use it"
    yield "look at predictions.png"


def _as_mapping(node: object) -> Mapping[str, Any]:
    return node if isinstance(node, Mapping) else {}
