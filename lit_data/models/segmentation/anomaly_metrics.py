"""`AnomalyMetrics`: scores for comparing methods of anomaly detection."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_data.core.devices import widest_float
from lit_data.core.types import IGNORED, Array, Doubles
from lit_data.models.image_ranks import OF_IMAGES, rank_images
from lit_data.models.score_curves import Curve, ImageScores, ScoreCurves
from lit_data.models.scored import (
    BINS,
    Confusion,
    PixelScores,
    append_rows,
    bin_edge,
    find_bins,
    is_marked,
    where_counted,
)
from lit_data.models.segmentation.top_pixels import (
    SCORE_FRACTION,
    TopPixels,
    keep_highest,
    mean_by_image,
    take_highest,
)
from lit_data.models.segmentation.whole_masks import (
    WholeMasks,
    count_bins,
    find_aupimo,
    find_regions,
)
from lit_inspect.regions import MOST_PX, count_top_px

_EPS = 1e-9  # logits go up to 20.7
_LIMITS = {"aupro_30": 0.3, "aupro_5": 0.05}
ANOMALY_METRICS = (
    *OF_IMAGES,
    "pixel_auroc",
    *_LIMITS,
    "aupimo",
    "f1_max",
    "f1_max_threshold",
)
_SMOOTH = 50  # bins to each side, of 42 / 8192 logits
_TOP_PIXELS = ("top_images", "top_pixels", "top_scores")
_OVERLAP = ("overlap_keys", "overlap_counts")
MERGE_AFTER = 2**20  # rows of a state, before those of an image are put together


def _weigh_patch(
    whole_masks: WholeMasks,
    images: Sequence[int],
    corners: Sequence[tuple[int, int]],
    row: int,
    mask: Array,
) -> Doubles:
    return whole_masks.weigh(images[row], corners[row], mask)


class AnomalyMetrics(PixelScores):
    """`PixelScores` and the common metrics of anomaly detection, from patches of images.

    - ``image_auroc``, ``image_average_precision``: of images, whose score is the mean of the
      highest `score_fraction` of their pixels; exact, and NaN where all images have a defect or
      none has;
    - ``image_f1_max`` of the images, and the threshold of their scores that `choose_threshold`
      gives for it; NaN in the same cases;
    - ``image_auroc_KIND``: that of the defective images of a kind against the good ones, if there
      are several `kinds`;
    - ``pixel_auroc``: area under the ROC curve of the pixels;
    - ``aupro_30``, ``aupro_5``: area under the curve of per-region overlap over the false positive
      rate, up to 0.3 and 0.05, as a fraction of the limit (Bergmann et al., "The MVTec anomaly
      detection dataset", IJCV 2021). A region is a connected part (8 neighbors) of the mask of an
      image; without `whole_masks`, of that of a patch, so a divided region counts in each patch;
    - ``aupimo``: see `find_aupimo`; with `whole_masks`, and NaN without enough pixels of good images;
    - ``f1_max`` of the pixels, and ``f1_max_threshold``, where the mean F1 of the thresholds within
      a quarter of a logit is largest: the single best threshold moves with few pixels.

    The curves have 8192 thresholds. A region weighs 1 in a histogram of its pixels' scores, so the
    state of the pixels is of fixed size; that of the images is three numbers for each patch, for
    each image up to 1024 pixels, and for each defective one up to 8192 bins of its marked pixels.

    The patches of an image may come in any batches and on any ranks. Reflect-padded pixels do not
    count, and a pixel in several patches counts once: for the score of an image by its highest
    score, with `sizes_px`; otherwise in the patch whose edge is farthest away, with `whole_masks`.
    Without these, or the positions of patches, all pixels of all patches count.

    Args:
        kinds: Kind of the defects of each image, by its number; empty if none is known.
        score_fraction: Fraction of the pixels that scores an image, see `count_top_px`.

    Attributes:
        sizes_px: [images, 2] int64 (height, width) of each image, by its number; None if they are
            not known.
        whole_masks: Masks of the images, by their numbers; None if they are not known.
        good_quantile: Fraction of the good images below ``good_threshold`` of pixels and
            ``image_good_threshold`` of images, which are then chosen too; None does not choose them.
        margin: Fraction by which the odds of these thresholds are raised.
        image_threshold: Score from which an image counts as defective in `confusion`; None uses the
            one of the good images, or without `good_quantile` the one of the largest F1.
        confusion: Good and defective images (rows) by the threshold's verdict (columns) in the last
            `compute`; None if all images have a defect or none has.
        image_scores: Scores of the same images.
        image_curve: Recall and precision of the same images.
    """

    regions: Tensor
    region_count: Tensor
    good_bins: Tensor
    overlap_keys: list[Tensor]
    overlap_counts: list[Tensor]
    images: list[Tensor]
    areas_px: list[Tensor]
    defective: list[Tensor]
    top_images: list[Tensor]
    top_pixels: list[Tensor]
    top_scores: list[Tensor]

    def __init__(
        self, kinds: Sequence[str] = (), *, score_fraction: float = SCORE_FRACTION
    ) -> None:
        super().__init__(threshold=0.5)
        self.kinds = kinds
        self.score_fraction = score_fraction
        self.sizes_px: Tensor | None = None
        self.whole_masks: WholeMasks | None = None
        self.good_quantile: float | None = None
        self.margin = 0.0
        self._merged_px = self._merged_rows = 0  # by the last merge of each state
        self.image_threshold: float | None = None
        self.confusion: Confusion | None = None
        self.image_scores: ImageScores | None = None
        self.image_curve: Curve | None = None
        for name in ("regions", "good_bins"):
            self.add_state(name, torch.zeros(BINS, dtype=widest_float()), dist_reduce_fx="sum")
        region_count = torch.tensor(0.0, dtype=widest_float())
        self.add_state("region_count", region_count, dist_reduce_fx="sum")
        for name in ("images", "areas_px", "defective", *_TOP_PIXELS, *_OVERLAP):
            self.add_state(name, [], dist_reduce_fx="cat")

    def look_at(self, datamodule: object) -> None:
        """Read kinds of defects, sizes and masks of whole images from a datamodule that has them."""
        self.kinds = getattr(datamodule, "image_kinds", ())
        self.sizes_px = getattr(datamodule, "image_sizes_px", None)
        self.whole_masks = WholeMasks.of(datamodule)

    @override
    def update(
        self,
        scores: Tensor,
        masks: Tensor,
        images: Tensor | None = None,
        positions: Tensor | None = None,
        unmarked: Tensor | None = None,
    ) -> None:
        """Count pixels, regions and images.

        Args:
            scores: [B, 1, H, W] float in 0..1.
            masks: The same shape, in {0, 1}; 255 where pixels are ignored.
            images: [B] int64, the number of each patch's image; without it images are not scored.
            positions: [B, 2] int64 (y, x) of each patch in its image, in px; without it patches
                share no pixel.
            unmarked: [B] bool, True for images with a defect that no mask marks: they count as
                defective, with all their pixels in their score; None if there are none.
        """
        defective = is_marked(masks).flatten(1).any(1)
        scored = masks
        if unmarked is not None:
            defective = defective | unmarked
            scored = masks.masked_fill(unmarked[:, None, None, None], 0)
        if self.whole_masks is None or images is None or positions is None:
            super().update(scores, masks)
            self._count_regions(scores, masks, lambda row, mask: find_regions(mask).weight)
        else:
            shared = self.whole_masks.find_shared(images, positions)
            once = masks.masked_fill(shared, IGNORED)
            weigh = partial(_weigh_patch, self.whole_masks, images.tolist(), positions.tolist())
            super().update(scores, once)
            self._count_regions(scores, once, weigh)
            self._count_overlap(scores, once, images)
        if images is not None:
            append_rows(self.images, images)
            append_rows(self.areas_px, torch.full_like(images, scores.shape[1:].numel()))
            append_rows(self.defective, defective)
            most = self._count_most()
            self._add(take_highest(scores, scored, images, positions, self.sizes_px, most))

    def _add(self, top: TopPixels) -> None:
        """Add pixels to the states; if these grow large, each image keeps only its highest ones."""
        for name, part in zip(_TOP_PIXELS, top, strict=True):
            append_rows(getattr(self, name), part)
        if sum(map(len, self.top_images)) > max(MERGE_AFTER, 2 * self._merged_px):
            merged = keep_highest(self._collect(), self._count_most())
            self._merged_px = len(merged.score)
            for name, part in zip(_TOP_PIXELS, merged, strict=True):
                setattr(self, name, [part.to(top.score.device)])

    def _collect(self) -> TopPixels:
        return TopPixels(*(dim_zero_cat(getattr(self, name)) for name in _TOP_PIXELS))

    def _count_most(self) -> int:
        """Return the largest number of pixels that the score of any image uses."""
        if self.score_fraction == 0:
            return 1
        if self.sizes_px is None:
            return MOST_PX
        return count_top_px(int(self.sizes_px.prod(1).max()), self.score_fraction)

    def _count_regions(
        self, scores: Tensor, masks: Tensor, weigh: Callable[[int, Array], Doubles]
    ) -> None:
        """Count the marked pixels of patches, weighted by `weigh` for each patch and its mask."""
        marks = is_marked(masks)
        for row in torch.nonzero(marks.flatten(1).any(1)).flatten().tolist():
            weights = weigh(row, masks[row, 0].cpu().numpy())
            # On the CPU: CUDA adds weights in any order, so that two runs would differ.
            bins = find_bins(scores[row].detach()[marks[row]]).cpu().numpy()
            counts = torch.from_numpy(np.bincount(bins, weights, BINS)).to(self.regions.dtype)
            self.regions += counts.to(self.regions.device)
            self.region_count += float(weights.sum())

    def _count_overlap(self, scores: Tensor, masks: Tensor, images: Tensor) -> None:
        """Count the pixels of good images, and the marked ones of each other image, by their bins."""
        assert self.whole_masks is not None
        marks = is_marked(masks)
        for image in sorted(set(images.tolist())):
            regions = self.whole_masks.regions_of(image)
            if not len(regions.pixel):
                is_good = (images == image)[:, None, None, None] & (masks != IGNORED)
                counts = torch.bincount(find_bins(scores[is_good]), minlength=BINS)
                self.good_bins += counts.to(self.good_bins.dtype) / regions.counted_px
        bins = find_bins(scores.detach()[marks])
        image_of = images[torch.nonzero(marks)[:, 0]]
        self._add_overlap(*count_bins(image_of, bins, torch.ones_like(bins)))

    def _add_overlap(self, keys: Tensor, counts: Tensor) -> None:
        """Add counts to the states; if these grow large, merge equal keys."""
        append_rows(self.overlap_keys, keys)
        append_rows(self.overlap_counts, counts)
        if sum(map(len, self.overlap_keys)) > max(MERGE_AFTER, 2 * self._merged_rows):
            keys, counts = self._merge_overlap()
            self._merged_rows = len(keys)
            self.overlap_keys, self.overlap_counts = [keys], [counts]

    def _merge_overlap(self) -> tuple[Tensor, Tensor]:
        keys = dim_zero_cat(self.overlap_keys)
        return count_bins(keys // BINS, keys % BINS, dim_zero_cat(self.overlap_counts))

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the scores; NaN without a defect, and if needed without anything good."""
        false_counts, true_counts = self.count_above()
        false = false_counts / false_counts[-1].clamp(min=1)
        true = true_counts / true_counts[-1].clamp(min=1)
        above = self.regions.cpu().flip(0).cumsum(0)  # CUDA adds up floats in any order
        overlap = above.to(self.regions.device) / self.region_count.clamp(min=1)
        dice = self.dice_curve()
        values = super().compute() | self._choose_by_good()
        values |= self._rank_images(values.get("image_good_threshold"))
        areas = {"pixel_auroc": _area(false, true, 1.0)}
        areas |= {name: _area(false, overlap, limit) for name, limit in _LIMITS.items()}
        threshold = bin_edge(BINS - 1 - _find_best(dice))
        best = {"f1_max": dice.max().float(), "f1_max_threshold": threshold.to(dice.device)}
        has_both = true_counts[-1] * false_counts[-1]
        values |= {name: where_counted(area, has_both) for name, area in areas.items()}
        values |= {name: where_counted(value, true_counts[-1]) for name, value in best.items()}
        if self.whole_masks is not None:
            values["aupimo"] = torch.tensor(self._find_aupimo(), device=self.device)
        return values

    def _find_aupimo(self) -> float:
        if not len(self.overlap_keys):
            return math.nan
        pixels = (part.cpu().numpy() for part in self._merge_overlap())
        return find_aupimo(self.good_bins.cpu().double().numpy(), *pixels)

    def score_images(self, fraction: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the score of each image that this process has seen.

        Args:
            fraction: See `count_top_px`; None uses `score_fraction`.

        Returns:
            The ascending image numbers [images] int64, their scores as float32, and int64 in
            {0, 1} that is 1 if any of their patches shows a defect, on the host.
        """
        numbers, image_of = torch.unique(dim_zero_cat(self.images).cpu(), return_inverse=True)
        if self.sizes_px is None:
            areas_px = torch.bincount(image_of, dim_zero_cat(self.areas_px).cpu().double())
        else:
            areas_px = self.sizes_px.prod(1)[numbers]
        fraction = self.score_fraction if fraction is None else fraction
        limits = [count_top_px(int(area), fraction) for area in areas_px.tolist()]
        top = self._collect()
        renumbered = TopPixels(torch.searchsorted(numbers, top.image.cpu()), top.pixel, top.score)
        scores = mean_by_image(keep_highest(renumbered, np.array(limits)), len(numbers)).float()
        defective = torch.zeros(len(numbers), dtype=torch.int64)
        defective[image_of[dim_zero_cat(self.defective).cpu()]] = 1
        return numbers, scores, defective

    def _choose_by_good(self) -> dict[str, Tensor]:
        """Choose the thresholds that `good_quantile` requests; none if no image is good."""
        if self.good_quantile is None or not len(self.images):
            return {}
        thresholds = {}
        # Defects are found in a good image if its highest pixel reaches the threshold of pixels.
        for name, fraction in (("good_threshold", 0.0), ("image_good_threshold", None)):
            _, scores, defective = self.score_images(fraction)
            if defective.all():
                return {}
            level = scores[defective == 0].double().quantile(self.good_quantile)
            odds = torch.logit(level, eps=_EPS) + math.log1p(self.margin)
            thresholds[name] = odds.sigmoid().float().to(self.device)
        return thresholds

    def _rank_images(self, good_threshold: Tensor | None) -> dict[str, Tensor]:
        self.confusion = self.image_scores = self.image_curve = None
        if not len(self.images):
            return {}
        numbers, scores, defective = self.score_images()
        if defective.all() or not defective.any():
            return dict.fromkeys(OF_IMAGES, torch.tensor(torch.nan, device=self.device))
        threshold = self.image_threshold
        if threshold is None and good_threshold is not None:
            threshold = float(good_threshold)
        ranking = rank_images(scores, defective, threshold)
        values = dict(ranking.values)
        _, self.confusion, self.image_scores, self.image_curve = ranking
        for kind, rows in self._find_by_kind(numbers, defective).items():
            values[f"image_auroc_{kind}"] = binary_auroc(scores[rows], defective[rows])
        return {name: score.to(self.device) for name, score in values.items()}

    def _find_by_kind(self, numbers: Tensor, defective: Tensor) -> dict[str, Tensor]:
        """Return a bool mask of the images that are good or of a kind, for each of several kinds."""
        if not self.kinds:
            return {}
        kinds = []
        for number, is_bad in zip(numbers.tolist(), defective.tolist(), strict=True):
            kinds.append(self.kinds[number] if is_bad else "")
        named_kinds = sorted(set(kinds) - {""})
        if len(named_kinds) < 2:  # of a single kind it would be the same number again
            return {}
        rows = {}
        for kind in named_kinds:
            rows[kind] = torch.tensor([one in ("", kind) for one in kinds])
        return rows


def join_curves(metrics: Mapping[str, Any]) -> ScoreCurves:
    """Return the curves of computed metrics.

    Args:
        metrics: `AnomalyMetrics` under ``images``, and `PixelScores` under ``pixels``; without the
            latter, the curve of pixels comes from the images.
    """
    images = metrics.get("images")
    curves = {"pixels": metrics.get("pixels", images).curve}
    if images is not None:
        curves = {"images": images.image_curve, **curves}
    known = {name: curve for name, curve in curves.items() if curve is not None}
    return ScoreCurves(known, None if images is None else images.image_scores)


def _find_best(f1: Tensor) -> int:
    """Return where a smoothed curve [8192] is largest, in the middle of equal places."""
    window = 2 * _SMOOTH + 1
    (mean_f1,) = avg_pool1d(f1[None], window, 1, _SMOOTH, count_include_pad=False)
    best = torch.nonzero(mean_f1 >= mean_f1.max() - 1e-6).flatten()
    return int(best[len(best) // 2])


def _area(false_rates: Tensor, hit_rates: Tensor, limit: float) -> Tensor:
    """Return the area under a curve over the false positive rate up to `limit`, divided by it."""
    x = torch.cat([false_rates.new_zeros(1), false_rates])
    y = torch.cat([hit_rates.new_zeros(1), hit_rates])
    widths = x.diff().clamp(max=(limit - x[:-1]).clamp(min=0))
    slopes = y.diff() / x.diff().clamp(min=torch.finfo(x.dtype).tiny)
    return ((y[:-1] + slopes * widths / 2) * widths).sum().div(limit).float()
