"""`AnomalyModule`: scores of images by their distance from good images, and a threshold for them."""

import logging
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_share
from lit_data.core.devices import exact_products
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.models.anomaly.bank import MemoryBank
from lit_data.models.anomaly.encoder import TextureEncoder, blur, pad_reflected
from lit_data.models.anomaly.normality import Candidates, Normality, take_sizes
from lit_data.models.image_ranks import rate_errors
from lit_data.models.one_pass import OnePassModule, count_steps
from lit_data.models.scored import is_marked
from lit_data.models.segmentation.anomaly_metrics import (
    ANOMALY_METRICS,
    AnomalyMetrics,
    join_curves,
)
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

_STEEPNESS = 4.0
LEAST_IMAGES = 5
"""Of each kind, that a balanced threshold needs: of fewer it is no better than one of good images alone."""


class AnomalyModule(OnePassModule):
    """Scores images by the distance of their features, from a frozen encoder, to those of good images.

    The encoder gives features at a few scales, each the mean of 3 x 3 places. A `Normality` learns
    the features of good images: `PlaceGaussians` or a `MemoryBank`. The score of a pixel is the
    distance of its place, upsampled and lightly smoothed; the score of an image is that of its
    highest pixel. Training is one pass and learns no weights. An optimizer without weights counts
    the batches, because Lightning's checkpoints depend on its steps.

    Takes batches with ``image`` [B, C, H, W] float32 in 0..1. To score defects, batches also have
    ``mask`` [B, 1, H, W] in {0, 1} or class numbers, 255 for ignored pixels, and ``unmarked`` [B]
    bool for images with a defect that no mask marks. C = 1 is copied to three channels. An encoder
    whose attribute ``learned_metric`` is True gets images whose channels have mean 0 and standard
    deviation 1 in the first training batch.

    Probabilities are ``d^4 / (d^4 + threshold^4)`` of distances d: 0.5 at the threshold, which
    validation sets to a quantile of the scores of its good images. With at least five good and five
    defective validation images, the threshold is lowered until both are wrong equally often, see
    `balance`. Logs after validation and test, with ``val/`` or ``test/`` before it:

    - ``threshold``, a distance, with ``good_images`` and ``defective_images``, whose scores chose
      it (validation alone);
    - ``false_alarms``: fraction of the images without a defect that reach the threshold;
    - ``misses``, the fraction of the images with a defect that do not, and all of
      `AnomalyMetrics`; NaN without such images.

    Args:
        net: The encoder: from [B, 3, H, W] images to a list of maps [B, C_i, H_i, W_i], the finest
            first, whose strides divide its attribute ``stride_px`` (32 where it has none);
            `TextureEncoder` by default.
        normality: Learns the features of good images; a `MemoryBank` by default, without whitening
            if the encoder has learned its metric.
        quantile: The threshold is this quantile of the scores of good validation images; 1: the
            highest score.
        margin: Fraction by which the threshold is raised.
        balanced: Balance false alarms and misses; False uses only the quantile.
        smooth_px: Standard deviation of the Gaussian blur of the scores; 0: no blur.

    Raises:
        ConfigError: An option is out of its range; later, that training images show defects, that
            the encoder gives no list of maps, that several processes train, or that it was not
            fitted yet.
    """

    threshold: Tensor
    pixel_mean: Tensor
    pixel_std: Tensor
    exported_as = "maps"
    image_score_fraction = 0.0
    """An image scores as its highest pixel, in `predict` too: one threshold is that of pixels and of images."""
    not_in_bar: ClassVar[tuple[str, ...]] = (
        *ANOMALY_METRICS[1:],
        "good_images",
        "defective_images",
        "average_precision",
        "dice",
    )

    def __init__(
        self,
        net: nn.Module | None = None,
        normality: Normality | None = None,
        *,
        quantile: float = 0.95,
        margin: float = 0.0,
        balanced: bool = True,
        smooth_px: float = 2.0,
    ) -> None:
        super().__init__(net or TextureEncoder(), optimizer=count_steps, schedule="none")
        _check_options(quantile, margin, smooth_px)
        self.normality = normality or MemoryBank(whiten=not self._has_metric)
        self.quantile = quantile
        self.margin = margin
        self.balanced = balanced
        self.smooth_px = smooth_px
        self._logged = ""
        self.freeze_net()
        self.register_buffer("threshold", torch.tensor(1.0))
        self.register_buffer("pixel_mean", torch.zeros(1))
        self.register_buffer("pixel_std", torch.zeros(()))
        self.scores = nn.ModuleDict()
        for stage in ("val", "test"):
            self.scores[f"{stage}_pixels"] = AnomalyMetrics(score_fraction=0.0)
        self.register_load_state_dict_pre_hook(take_sizes)  # type: ignore[no-untyped-call]
        self.save_hyperparameters("quantile", "margin", "balanced", "smooth_px")

    @property
    def needs_one_size(self) -> bool:
        """True if tiles must have the size of the training patches."""
        return self.normality.has_places

    @override
    def setup(self, stage: str) -> None:
        """Run the checks of the base class, and take the kinds of defects from the datamodule."""
        super().setup(stage)
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        for metric in self.scores.values():
            if isinstance(metric, AnomalyMetrics):
                metric.look_at(datamodule)

    @property
    @override
    def candidates(self) -> Candidates:
        return self.normality.candidates

    @override
    def sample(self, batch: Batch) -> None:
        if "mask" in batch and is_marked(batch["mask"]).any():
            raise ConfigError(
                "training images show defects, which would then count as good: set "
                "data.train_on=good, and synthesis=none if defects are drawn"
            )
        images = batch["image"].float()
        if not self.pixel_std > 0:
            self._measure_pixels(images)
        maps = self.find_maps(images)
        if not all(one.isfinite().all() for one in maps):
            raise ConfigError(
                "the encoder gives values that are not finite: check its weights and "
                "trainer.precision"
            )
        self.normality.add(maps)

    @override
    def learn(self) -> None:
        """Fit the candidates, and set a threshold until validation chooses a better one."""
        self.normality.fit()
        highest = self.normality.limit.to(self.device)
        self.threshold = highest if highest > 0 else torch.ones_like(highest)

    def _measure_pixels(self, images: Tensor) -> None:
        """Take what images are brought to mean 0 and standard deviation 1 by, where the encoder asks for it."""
        if not self._has_metric:
            self.pixel_std = torch.ones_like(self.pixel_std)
            return
        self.pixel_mean = images.mean((0, 2, 3))
        # Of all channels together, which keeps colours; above 0 for images of one value.
        self.pixel_std = images.std().clamp(min=1e-3)

    @property
    def _has_metric(self) -> bool:
        return bool(getattr(self.net, "learned_metric", False))

    def _pad_size(self, images: Tensor) -> tuple[int, int]:
        """Return the (height, width) of images that are padded to multiples of the encoder's stride."""
        stride_px = int(getattr(self.net, "stride_px", 32))
        height, width = (
            (side + stride_px - 1) // stride_px * stride_px for side in images.shape[-2:]
        )
        return height, width

    def find_maps(self, images: Tensor) -> list[Tensor]:
        """Return features of images at the scales of the encoder, each the mean of 3 x 3 places.

        Args:
            images: [B, C, H, W] float32 in 0..1.

        Returns:
            [B, C_i, h_i, w_i] of each scale, the finest first: the sides of the images, padded to
            multiples of the encoder's stride, by the stride of the scale.

        Raises:
            ConfigError: The encoder gives no list of maps.
        """
        scaled = (images - self.pixel_mean[:, None, None]) / self.pixel_std
        scaled = scaled.expand(-1, 3, -1, -1) if scaled.shape[1] == 1 else scaled
        height, width = self._pad_size(images)
        right, bottom = width - images.shape[-1], height - images.shape[-2]
        maps = self.net(pad_reflected(scaled, 0, right, 0, bottom))
        are_maps = isinstance(maps, list | tuple) and all(
            getattr(one, "ndim", 0) == 4 for one in maps
        )
        if not are_maps or not maps:
            raise ConfigError(
                f"{type(self.net).__name__} gives {_describe(maps)}: model.net must give a list of "
                "feature maps [B, C, H, W], the finest first"
            )
        return [F.avg_pool2d(pad_reflected(one.float(), 1, 1, 1, 1), 3, 1) for one in maps]

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the distance of each pixel to the features of good images.

        Args:
            images: [B, C, H, W] float32 in 0..1.

        Returns:
            [B, 1, H, W] float32.

        Raises:
            ConfigError: It was not fitted yet, or on images of another size or with another encoder.
        """
        if not self.normality.is_fitted:
            raise ConfigError(
                "this model is not trained yet: fit it first, or load a checkpoint of it"
            )
        maps = self.normality(self.find_maps(images.float()))
        return self._enlarge(maps, images)

    def _enlarge(self, maps: Tensor, images: Tensor) -> Tensor:
        """Resize maps [B, 1, h, w] to images [B, C, H, W], and blur them."""
        height, width = images.shape[-2:]
        padded = self._pad_size(images)
        if torch.compiler.is_exporting():
            maps = F.interpolate(maps, padded, mode="bilinear")
            return blur(maps[..., :height, :width], self.smooth_px)
        # Both are linear and go side by side: two products of small matrices do them at once.
        down = _make_enlargement(maps.shape[2], padded[0], height, self.smooth_px).to(maps)
        across = _make_enlargement(maps.shape[3], padded[1], width, self.smooth_px).to(maps)
        with exact_products(maps.device):
            return down @ maps @ across.T

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return probabilities, and the fields that place them in their image.

        Returns:
            ``probability`` [B, 1, H, W] float32 in 0..1, 0.5 at the threshold; and ``index``,
            ``image_index``, ``position`` of the batch.
        """
        answers: dict[str, Tensor] = {
            key: batch[key] for key in ("index", "image_index", "position") if key in batch
        }
        return answers | {"probability": find_probability(self(batch["image"]), self.threshold)}

    @override
    def invert(self, answers: Tensor, images: Tensor) -> Tensor:
        """Return the distances of probabilities [B, 1, H, W]."""
        return find_distance(answers, self.threshold).float()

    @override
    def score(self, batch: Batch, stage: str) -> None:
        if self.trainer.sanity_checking and not self.normality.is_fitted:
            return  # Lightning tries validation before training
        probability = find_probability(self(batch["image"]), self.threshold)
        masks = batch.get("mask", torch.zeros_like(probability))
        metric: Any = self.scores[f"{stage}_pixels"]
        # Where nothing says of which image a patch is, it is one of its own.
        patches = sum(map(len, metric.images)) + torch.arange(len(masks), device=masks.device)
        images = batch.get("image_index", patches)
        metric.update(probability, masks, images, batch.get("position"), batch.get("unmarked"))

    @override
    def take_scores(self, stage: str) -> dict[str, Tensor]:
        metric: Any = self.scores[f"{stage}_pixels"]
        if not metric.update_count:  # Lightning tries validation before training
            return {}
        _, scores, is_defective = metric.score_images()
        named: dict[str, Tensor] = {}
        before = self.threshold.clone()
        good, defective = scores[is_defective == 0], scores[is_defective == 1]
        if stage == "val" and len(good):
            named = self.choose_threshold(good, defective)
        # The scores were taken with the threshold as it was.
        metric.threshold = float(find_probability(self.threshold, before))
        metric.image_threshold = metric.threshold
        values = metric.compute()
        if metric.confusion is not None:
            self.confusion[stage] = metric.confusion
        self.curves[stage] = join_curves({"images": metric})
        rates = rate_errors(scores >= metric.threshold, is_defective.bool())
        named |= {name: rate.to(self.device) for name, rate in rates.items()}
        named |= values
        for name in ("f1_max_threshold", "image_f1_max_threshold"):
            distance = find_distance(values[name], before)
            named[name] = find_probability(distance, self.threshold)
        metric.reset()
        return named

    def choose_threshold(self, good: Tensor, defective: Tensor) -> dict[str, Tensor]:
        """Set the threshold from images of known truth.

        Args:
            good: [n] highest probabilities of good images on the host, n at least 1.
            defective: [m] highest probabilities of defective images.

        Returns:
            ``threshold`` and ``good_images``, with ``defective_images`` if these were used.
        """
        before = self.threshold.cpu()
        chosen = find_distance(good.double().quantile(self.quantile), before) * (1 + self.margin)
        source = f"quantile {self.quantile:g} of {counted(len(good), 'good validation image')}"
        used: dict[str, Tensor] = {}
        if self.balanced and can_balance(good, defective):
            balanced = find_distance(balance(good.double(), defective.double()), before)
            used["defective_images"] = torch.tensor(float(len(defective)))
            chosen = torch.minimum(chosen, balanced)
            source += f", balanced with {counted(len(defective), 'defective one')}"
        self.threshold = chosen.clamp(min=1e-6).to(self.threshold)
        text = f"threshold {self.threshold:.4g}: {source}"
        if text != self._logged:  # validation of the best checkpoint chooses the same again
            log.info("%s", text)
        self._logged = text
        good_images = torch.tensor(float(len(good)))
        return {"threshold": self.threshold, "good_images": good_images, **used}


def find_probability(distances: Tensor, threshold: Tensor) -> Tensor:
    """Return ``d^4 / (d^4 + threshold^4)``, which rises with the distance and is 0.5 at the threshold."""
    return (_STEEPNESS * (distances / threshold).log()).sigmoid()


def find_distance(probability: Tensor, threshold: Tensor) -> Tensor:
    """Return the distance of a probability, see `find_probability`."""
    return threshold * (probability.double().logit(eps=1e-12) / _STEEPNESS).exp()


def can_balance(good: Tensor, defective: Tensor) -> bool:
    """Return True if scores [n] and [m] are enough for `balance`."""
    return min(len(good), len(defective)) >= LEAST_IMAGES


def balance(good: Tensor, defective: Tensor) -> Tensor:
    """Return the score at which the rate of misses equals the rate of false alarms.

    The largest F1 would depend on the number of defective validation images, which is arbitrary.

    Args:
        good: [n] scores of good images.
        defective: [m] scores of defective images.

    Returns:
        A scalar, halfway between two scores.
    """
    # One share falls and the other rises along the scores, so that they meet once.
    ranked = torch.cat([good, defective]).sort().values
    middles = (ranked[1:] + ranked[:-1]) / 2
    misses = torch.searchsorted(defective.sort().values, middles) / len(defective)
    false_alarms = 1 - torch.searchsorted(good.sort().values, middles) / len(good)
    return middles[(misses - false_alarms).abs().argmin()]


def _check_options(quantile: float, margin: float, smooth_px: float) -> None:
    check_share("quantile", quantile)
    if not (0 <= margin < math.inf and 0 <= smooth_px < math.inf):
        raise ConfigError(
            f"margin={margin}, smooth_px={smooth_px}: need finite numbers of 0 or more"
        )


def _make_enlargement(places: int, padded_px: int, side_px: int, sigma: float) -> Tensor:
    """[side, places]: weights with which places stand for the pixels of a side, padded and blurred."""
    each_place = torch.eye(places)[None, :, :, None]
    pixels = F.interpolate(each_place, (padded_px, 1), mode="bilinear")[:, :, :side_px]
    return blur(pixels, sigma)[0, :, :, 0].T


def _describe(output: object) -> str:
    if isinstance(output, list | tuple):
        return f"a list of {', '.join(map(_describe, output)) or 'nothing'}"
    return f"{list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
