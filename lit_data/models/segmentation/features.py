"""`FeatureDifferenceModule`: comparison by features of a frozen encoder, with learned thresholds."""

import logging

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_counts
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.models.anomaly.normality import Candidates
from lit_data.models.layers import pad_sides
from lit_data.models.one_pass import OnePassModule, count_steps
from lit_data.models.pretrained.lite_compare import LiteDifference
from lit_data.models.segmentation.module import SegmentationModule
from lit_data.models.segmentation.top_pixels import SCORE_FRACTION

log = logging.getLogger(__name__)


class FeatureDifferenceModule(OnePassModule, SegmentationModule):
    """Scores a target by the distance of its features from those of its references.

    Nothing is trained. One pass over training images samples distances at places where no mask
    marks a defect, and the net uses them to scale its strides. Validation then chooses the
    thresholds of ``predict``, and training ends. The module takes the batches of
    `SegmentationModule`, and logs its scores.

    Args:
        net: Net that compares.
        places: Largest number of places in the sample.
        seed: Seed of the sample.
        false_alarms_per_patch: See `SegmentationModule` for this and the following.
        baseline: Score the difference of target and references too.
        anomaly_metrics: Score whole images too.
        image_score_fraction: Fraction of an image's pixels, the highest ones, whose mean scores it.
        quantile: Fraction of good validation images whose scores are below the thresholds.
        margin: Fraction by which the odds of the thresholds are raised.

    Raises:
        ConfigError: An option is out of its range, or the net is not a `LiteDifference`; later,
            several processes train, or no good place was seen.
    """

    net: LiteDifference

    def __init__(
        self,
        net: nn.Module,
        *,
        places: int = 100_000,
        seed: int = 0,
        false_alarms_per_patch: float | None = 0.1,
        baseline: bool = True,
        anomaly_metrics: bool = True,
        image_score_fraction: float = SCORE_FRACTION,
        quantile: float | None = None,
        margin: float = 0.05,
    ) -> None:
        check_counts(places=places)
        if not isinstance(net, LiteDifference):
            raise ConfigError(
                f"model.net is a {type(net).__name__}, and FeatureDifferenceModule needs a "
                "LiteDifference: train other nets with model=compare or model=compare_lite0"
            )
        super().__init__(
            net,
            optimizer=count_steps,
            schedule="none",
            false_alarms_per_patch=false_alarms_per_patch,
            baseline=baseline,
            anomaly_metrics=anomaly_metrics,
            image_score_fraction=image_score_fraction,
            quantile=quantile,
            margin=margin,
        )
        self._candidates = Candidates(places, seed)
        self.freeze_net()
        self.save_hyperparameters("places", "seed")

    @property
    @override
    def candidates(self) -> Candidates:
        return self._candidates

    @override
    def sample(self, batch: Batch) -> None:
        images = batch["image"]
        distances = self.net.find_distances(images)
        rows = distances.permute(0, 2, 3, 1)
        if "mask" in batch:
            marked = self._find_marked(batch["mask"], distances)
            rows = rows[~marked]
        self.candidates.add(rows.reshape(-1, distances.shape[1]))

    def _find_marked(self, masks: Tensor, distances: Tensor) -> Tensor:
        """[B, h, w] bool: places whose neighbourhood, a place of the coarsest stride, is not all good."""
        stride_px = self.net.encoder.stride_px
        counts = pad_sides((masks > 0).float(), stride_px)
        coarse = F.max_pool2d(counts, stride_px)
        return F.interpolate(coarse, distances.shape[2:])[:, 0] > 0

    @override
    def learn(self) -> None:
        if not len(self.candidates):
            raise ConfigError(
                "masks mark every pixel of the training images, but training needs unmarked "
                "ones: add images of good parts"
            )
        self.net.learn(self.candidates.rows)

    @override
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.trainer.should_stop = True
        log.info("one pass is enough for a net that is not trained")
