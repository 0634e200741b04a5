"""`JudgedModule`: each image gets a score, and a verdict by a threshold that validation chooses."""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc, binary_average_precision
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_data.models.schedule import OptimizerFactory, Schedule
from lit_data.models.score_curves import Curve, ImageScores, count_images, rank_curve
from lit_data.models.scored import Confusion, ScoredModule, append_rows, find_best_f1

log = logging.getLogger(__name__)

NO_THRESHOLD = -1.0
"""Threshold of images where validation had images of one kind only, or none."""

OF_IMAGES = (
    "image_auroc",
    "image_average_precision",
    "image_f1_max",
    "image_f1_max_threshold",
)
_ERRORS = ("misses", "false_alarms")
_EPS = 1e-9  # logits go up to 20.7


class Ranking(NamedTuple):
    """Good and defective images, ranked by their scores.

    Attributes:
        values: The scores that `OF_IMAGES` lists.
        confusion: Good and defective images (rows) by their verdicts (columns).
        image_scores: Scores of the same images.
        curve: Recall and precision of the same images.
    """

    values: dict[str, Tensor]
    confusion: Confusion
    image_scores: ImageScores
    curve: Curve


def rank_images(scores: Tensor, defective: Tensor, threshold: float | None = None) -> Ranking:
    """Rank images by their scores.

    Args:
        scores: [images] float in 0..1, on the host.
        defective: [images] int64 in {0, 1}, with both values.
        threshold: Lowest score of a defective image; None: that of the largest F1.
    """
    best_f1, best_threshold = choose_threshold(scores, defective)
    least = best_threshold if threshold is None else threshold
    values = {
        "image_auroc": binary_auroc(scores, defective),
        "image_average_precision": binary_average_precision(scores, defective),
        "image_f1_max": torch.tensor(best_f1),
        "image_f1_max_threshold": torch.tensor(best_threshold),
    }
    confusion = count_confusion(scores >= least, defective.bool())
    curve = rank_curve(scores, defective)
    return Ranking(values, confusion, count_images(scores, defective, least), curve)


def choose_threshold(scores: Tensor, defective: Tensor) -> tuple[float, float]:
    """Return the largest F1 of images, and the lowest score of a defective image.

    The threshold is halfway, in logits, between the lowest score that counts as defective at the
    largest F1 and the next lower score. Middles of wider ranges (F1 within 1, 2, 5 % of the best)
    were no better on other images of the same datasets.

    Args:
        scores: [images] float in 0..1.
        defective: [images] int64 in {0, 1}, of both kinds.
    """
    ranked, order = scores.double().sort(descending=True)
    hits = defective[order].cumsum(0)
    f1, threshold = find_best_f1(ranked, hits, int(hits[-1]), eps=_EPS)
    return float(f1), float(threshold)


def count_confusion(is_alarm: Tensor, is_defective: Tensor) -> Confusion:
    """Count good and defective images by their verdicts; both arguments are [images] bool."""
    counts = []
    for is_row in (~is_defective, is_defective):
        alarms = int((is_row & is_alarm).sum())
        counts.append([int(is_row.sum()) - alarms, alarms])
    return Confusion(("good", "defect"), counts)


def rate_errors(is_alarm: Tensor, is_defective: Tensor) -> dict[str, Tensor]:
    """Return ``misses`` among defective images and ``false_alarms`` among good ones, as fractions.

    Both arguments are [images] bool. A fraction of no images is NaN.
    """
    rates = (~is_alarm[is_defective]).float().mean(), is_alarm[~is_defective].float().mean()
    return dict(zip(_ERRORS, rates, strict=True))


class ImageRanks(Metric):
    """Exact scores of images whose truth is known.

    Attributes:
        threshold: Score from which an image counts as defective; None: that of the largest F1.
        ranking: Result of the last `compute`; None without both good and defective images.
        lack: Text that says what is missing in that case.
    """

    full_state_update = False
    scores: list[Tensor]
    defective: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.threshold: float | None = None
        self.ranking: Ranking | None = None
        self.lack = ""
        for name in ("scores", "defective"):
            self.add_state(name, [], dist_reduce_fx="cat")

    @override
    def update(self, scores: Tensor, defective: Tensor) -> None:
        """Add images; a rank without images calls this too.

        Args:
            scores: [n] float in 0..1.
            defective: [n] bool.
        """
        append_rows(self.scores, scores.float())
        append_rows(self.defective, defective.long())

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the scores that `OF_IMAGES` lists, and the fractions ``misses`` and ``false_alarms``.

        Scores without images are NaN.
        """
        scores = dim_zero_cat(self.scores).cpu().clamp(0, 1)
        defective = dim_zero_cat(self.defective).cpu()
        kinds = set(defective.tolist())
        self.ranking, self.lack = None, ""
        values = dict.fromkeys((*OF_IMAGES, *_ERRORS), torch.tensor(torch.nan))
        least = self.threshold
        if len(kinds) == 2:
            self.ranking = rank_images(scores, defective, self.threshold)
            values |= self.ranking.values
            least = self.ranking.image_scores.threshold
        else:
            self.lack = "all images show a defect" if 1 in kinds else "no image shows a defect"
        if least is not None:
            values |= rate_errors(scores >= least, defective.bool())
        return {name: value.to(self.device) for name, value in values.items()}


class JudgedModule(ScoredModule):
    """A `ScoredModule` whose images get verdicts.

    In addition to the scores of the subclass, it logs these for images whose truth is known:
    ``image_auroc``, ``image_average_precision``, ``image_f1_max`` with
    ``image_f1_max_threshold``, and ``misses`` and ``false_alarms``, fractions of the defective and
    of the good images. Validation uses its own threshold for these, and test the threshold of
    validation.

    Checkpoints hold the threshold of the last validation as ``image_threshold``, which ``predict``
    uses; -1 if validation did not have both good and defective images. Older checkpoints without it
    can be loaded.

    Args:
        net: The net.
        optimizer: Makes the optimizer from the parameters.
        schedule: Learning rate over the run.
        thresholds: First values of other thresholds that checkpoints hold.
    """

    image_threshold: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory,
        schedule: Schedule,
        **thresholds: float,
    ) -> None:
        super().__init__(net, optimizer=optimizer, schedule=schedule)
        self._thresholds = {**thresholds, "image_threshold": NO_THRESHOLD}
        for name, value in self._thresholds.items():
            self.register_buffer(name, torch.tensor(value))
        self.register_load_state_dict_pre_hook(_add_thresholds)  # type: ignore[no-untyped-call]
        self.ranks = nn.ModuleDict({"val": ImageRanks(), "test": ImageRanks()})
        self._unranked: set[str] = set()

    def rank(self, stage: str, scores: Tensor, defective: Tensor) -> None:
        """Add images to a stage; see `ImageRanks.update`."""
        ranks: Any = self.ranks[stage]
        ranks.update(scores, defective)

    def take_ranks(self, stage: str) -> dict[str, Tensor]:
        """Return the scores of a stage's images; validation chooses the threshold from them."""
        ranks: Any = self.ranks[stage]
        # So that a rank without an image takes part.
        ranks.update(torch.zeros(0, device=self.device), torch.zeros(0, device=self.device))
        is_chosen = stage == "test" and self.image_threshold >= 0
        ranks.threshold = float(self.image_threshold) if is_chosen else None
        values: dict[str, Tensor] = ranks.compute()
        ranks.reset()
        chosen = values["image_f1_max_threshold"]
        if stage == "val" and chosen.isfinite():
            self.image_threshold.fill_(chosen)
        is_trial = getattr(self._trainer, "sanity_checking", False)
        if ranks.lack and stage not in self._unranked and not is_trial:
            self._unranked.add(stage)
            log.info("%s has no image AUROC: %s", stage, ranks.lack)
        return values

    def find_ranking(self, stage: str) -> Ranking | None:
        """Return the last result of `take_ranks`; None if there were only good or only defective images."""
        ranks: Any = self.ranks[stage]
        ranking: Ranking | None = ranks.ranking
        return ranking

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the thresholds of the last validation, because callbacks that average weights average buffers too."""
        for name in self._thresholds:
            checkpoint["state_dict"][name] = getattr(self, name)


def _add_thresholds(module: nn.Module, states: dict[str, Any], prefix: str, *_: object) -> None:
    """Complete the weights of a checkpoint from before there were thresholds."""
    names: Any = module._thresholds
    for name in names:
        states.setdefault(prefix + name, getattr(module, name))
