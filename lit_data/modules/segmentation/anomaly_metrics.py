"""Scores by which methods of anomaly detection are compared, and the score of an image.

An image scores as the mean of its highest pixels, of which patches or slabs each hold some.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool1d
from torchmetrics.functional.classification import binary_auroc, binary_average_precision
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_data.devices import widest_float
from lit_data.modules.scored import (
    BINS,
    Confusion,
    PixelScores,
    bin_edge,
    find_bins,
    is_marked,
)
from lit_data.types import IGNORED

MOST_PX: Final = 1024
SCORE_FRACTION: Final = 0.0005
_EPS: Final = 1e-9  # logits go up to 20.7
_NOWHERE: Final = -1
_SIDE_PX: Final = 2**31  # no image is wider
_LIMITS: Final = {"aupro_30": 0.3, "aupro_5": 0.05}
ANOMALY_METRICS: Final = (
    *("image_auroc", "image_average_precision", "pixel_auroc"),
    *_LIMITS,
    *("f1_max", "f1_max_threshold", "image_f1_max", "image_f1_max_threshold"),
)
_SMOOTH: Final = 50  # bins to each side, of 42 / 8192 logits
_TOP_PIXELS: Final = ("top_images", "top_pixels", "top_scores")
MERGE_AFTER: Final = 2**20  # pixels of the states, before each image keeps its highest ones only

Ints = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


def count_top_px(pixels: int, fraction: float) -> int:
    """Number of the highest pixels whose mean is the score of an image.

    Args:
        pixels: Of the image.
        fraction: Of them, 0..1; 0 takes the highest one.

    Returns:
        ``fraction * pixels``, rounded, from 1 to 1024.
    """
    return min(max(int(fraction * pixels + 0.5), 1), MOST_PX)


def mean_highest(parts: Iterable[Floats], count: int) -> float:
    """Mean of the highest values of an image, of which no more than one part is held in memory.

    Args:
        parts: Of the image, of any shapes.
        count: How many values; all of them where there are fewer.
    """
    highest: Floats = np.zeros(0, np.float32)
    for part in parts:
        values = np.concatenate((highest, part.ravel()))
        surplus = len(values) - count
        highest = values if surplus <= 0 else np.partition(values, surplus)[surplus:]
    return float(highest.mean(dtype=np.float64))


class TopPixels(NamedTuple):
    """Some of the highest pixels of images.

    Attributes:
        image: [n] int64 number of the image.
        pixel: [n] int64 number of the pixel in it; -1 where it is not known.
        score: [n] float32 in 0..1.
    """

    image: Tensor
    pixel: Tensor
    score: Tensor


def take_highest(
    scores: Tensor,
    masks: Tensor,
    images: Tensor,
    positions: Tensor | None,
    sizes_px: Tensor | None,
    count: int,
) -> TopPixels:
    """Highest pixels of patches, without those that are ignored or were reflect-padded.

    Args:
        scores: [B, 1, H, W] float in 0..1.
        masks: The same shape; 255 where pixels are ignored.
        images: [B] int64, the number of each patch's image.
        positions: [B, 2] int64 (y, x) of the patch in its image, px; None leaves the pixels without
            numbers.
        sizes_px: [images, 2] int64 (height, width); None takes all pixels as those of the image.
        count: How many of each patch.
    """
    height, width = scores.shape[-2:]
    counts = masks != IGNORED
    if positions is not None and sizes_px is not None:
        # Rows and columns from the corner to the edges.
        rest = sizes_px.to(scores.device)[images] - positions
        rows, columns = (torch.arange(length, device=scores.device) for length in (height, width))
        counts &= (rows < rest[:, :1])[:, None, :, None] & (columns < rest[:, 1:])[:, None, None, :]
    counted = scores.detach().float().masked_fill(~counts, -1).flatten(1)
    highest = counted.topk(min(count, height * width))
    pixel = torch.full_like(highest.indices, _NOWHERE)
    if positions is not None:
        y = highest.indices // width + positions[:, :1]
        x = highest.indices % width + positions[:, 1:]
        pixel = y * _SIDE_PX + x
    is_counted = highest.values >= 0
    of_image = images[:, None].expand_as(pixel)
    return TopPixels(of_image[is_counted], pixel[is_counted], highest.values[is_counted])


def keep_highest(top: TopPixels, limits: int | Ints) -> TopPixels:
    """Highest pixels of each image, each pixel once.

    Where several patches show it, the highest score counts.

    Args:
        top: Of any patches, on any device.
        limits: How many of an image are kept; or [images] for each number of an image.

    Returns:
        Those on the host, by image and falling score.
    """
    image, pixel, score = (part.cpu().numpy() for part in top)
    order = np.lexsort((-score, pixel, image))
    image = image[order]
    pixel = pixel[order]
    score = score[order]
    is_same = (image[1:] == image[:-1]) & (pixel[1:] == pixel[:-1]) & (pixel[1:] != _NOWHERE)
    is_first = np.append(True, ~is_same)[: len(image)]
    image = image[is_first]
    pixel = pixel[is_first]
    score = score[is_first]
    order = np.lexsort((-score, image))
    image = image[order]
    pixel = pixel[order]
    score = score[order]
    rank = np.arange(len(image)) - np.searchsorted(image, image)
    is_kept = rank < (limits if isinstance(limits, int) else limits[image])
    return TopPixels(*(torch.from_numpy(part[is_kept]) for part in (image, pixel, score)))


def mean_by_image(top: TopPixels, count: int) -> Tensor:
    """Mean of the pixels of each image.

    Args:
        top: As `keep_highest` gives them.
        count: Images.

    Returns:
        [count] float64 on the host, so that it is the same on every device; 0 where an image has no
        pixels.
    """
    pixels = torch.bincount(top.image, minlength=count)
    return torch.bincount(top.image, top.score.double(), count) / pixels.clamp(min=1)


def choose_threshold(scores: Tensor, defective: Tensor) -> tuple[float, float]:
    """F1 of images at best, and the score from which an image counts as defective.

    It lies halfway, in logits, between the lowest score that counts as defective where the F1 is
    largest and the next lower one. Middles of wider ranges (thresholds of which F1 is within 1, 2,
    5 % of the best) were no better on other images of the same sets.

    Args:
        scores: [images] float in 0..1.
        defective: [images] int64 in {0, 1}, of both kinds.
    """
    ranked, order = scores.double().sort(descending=True)
    hits = defective[order].cumsum(0)
    f1 = 2 * hits / (torch.arange(1, len(ranked) + 1) + hits[-1])
    # Of images of equal scores.
    is_last = torch.cat((ranked[1:] < ranked[:-1], torch.ones(1, dtype=torch.bool)))
    levels = ranked[is_last]
    f1 = f1[is_last]
    best = int(f1.argmax())
    neighbours = levels[[best, min(best + 1, len(levels) - 1)]]
    middle = torch.logit(neighbours, eps=_EPS).mean().sigmoid()
    return float(f1[best]), float(torch.minimum(middle, levels[best]))


class AnomalyMetrics(PixelScores):
    """`PixelScores`, and what the field states beside them, from patches of images.

    - ``image_auroc``, ``image_average_precision``: of images, whose score is the mean of the
      highest `score_fraction` of their pixels; exact, and left out where all images have a defect
      or none has;
    - ``image_f1_max`` of the images, and the threshold of their scores that `choose_threshold`
      gives for it; left out there too;
    - ``image_auroc_KIND``: that of the defective images of a kind among the good ones, where there
      are several `kinds`;
    - ``pixel_auroc``: area under the ROC curve of the pixels;
    - ``aupro_30``, ``aupro_5``: area under the curve of per-region overlap over the false positive
      rate, up to 0.3 and 0.05, as a fraction of the limit (Bergmann et al., "The MVTec anomaly
      detection dataset", IJCV 2021). A region is a connected part (8 neighbours) of the mask of a
      patch, so one that patches divide counts in each;
    - ``f1_max`` of the pixels, and ``f1_max_threshold``, where the mean F1 of the thresholds within
      a quarter of a logit is largest: the single best threshold moves with few pixels.

    The curves have 8192 thresholds. A region weighs 1 in a histogram of its pixels' scores, so the
    state of the pixels is of fixed size; that of the images is three numbers for each patch, and
    for each image up to 1024 pixels.

    The patches of an image may come in any batches and on any ranks. A pixel that several of them
    show counts once, by its highest score, and what was reflect-padded does not count, if
    `sizes_px` and the places of the patches are known; without them all pixels of all patches
    count.

    Args:
        kinds: Kind of the defects of each image, by its number; empty where none is known.
        score_fraction: See `count_top_px`.

    Attributes:
        sizes_px: [images, 2] int64 (height, width) of each image, by its number; None where they
            are not known.
        image_threshold: Score from which an image counts as defective in `confusion`; None: the
            one of the largest F1.
        confusion: Good and defective images (rows) by what the threshold says (columns), as of the
            last `compute`; None where all images have a defect or none has.
    """

    regions: Tensor
    region_count: Tensor
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
        self.image_threshold: float | None = None
        self.confusion: Confusion | None = None
        self.add_state("regions", torch.zeros(BINS, dtype=widest_float()), dist_reduce_fx="sum")
        self.add_state("region_count", torch.tensor(0), dist_reduce_fx="sum")
        for name in ("images", "areas_px", "defective", *_TOP_PIXELS):
            self.add_state(name, [], dist_reduce_fx="cat")

    @override
    def update(
        self,
        scores: Tensor,
        masks: Tensor,
        images: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Count pixels, regions and images.

        Args:
            scores: [B, 1, H, W] float in 0..1.
            masks: The same shape, in {0, 1}; 255 where pixels are ignored.
            images: [B] int64, the number of each patch's image; without it images are not scored.
            positions: [B, 2] int64 (y, x) of each patch in its image, px; without it patches share
                no pixel.
        """
        super().update(scores, masks)
        marked = is_marked(masks)
        defective = marked.flatten(1).any(1)
        for row in torch.nonzero(defective).flatten().tolist():
            self._count_regions(scores[row, 0].detach(), marked[row, 0].cpu().numpy())
        if images is not None:
            self.images.append(images)
            self.areas_px.append(torch.full_like(images, scores[0].numel()))
            self.defective.append(defective)
            most = self._count_most()
            self._add(take_highest(scores, masks, images, positions, self.sizes_px, most))

    def _add(self, top: TopPixels) -> None:
        """Add pixels to the states; where these grow large, each image keeps its highest ones only."""
        for name, part in zip(_TOP_PIXELS, top, strict=True):
            getattr(self, name).append(part)
        merged_px = len(self.top_images[0])  # all that the last merge left is in the first part
        if sum(map(len, self.top_images)) > max(MERGE_AFTER, 2 * merged_px):
            merged = keep_highest(self._collect(), self._count_most())
            for name, part in zip(_TOP_PIXELS, merged, strict=True):
                setattr(self, name, [part.to(top.score.device)])

    def _collect(self) -> TopPixels:
        return TopPixels(*(dim_zero_cat(getattr(self, name)) for name in _TOP_PIXELS))

    def _count_most(self) -> int:
        """Pixels that the score of any image is made of, at most."""
        if self.score_fraction == 0:
            return 1
        if self.sizes_px is None:
            return MOST_PX
        return count_top_px(int(self.sizes_px.prod(1).max()), self.score_fraction)

    def _count_regions(self, scores: Tensor, mask: NDArray[np.bool_]) -> None:
        import cv2

        count, labels = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
        of_pixel = labels[mask]
        weights = 1 / np.bincount(of_pixel, minlength=count)[of_pixel]
        # On the CPU: CUDA adds weights in any order, so that two runs would differ.
        bins = find_bins(scores[torch.from_numpy(mask).to(scores.device)]).cpu().numpy()
        counts = torch.from_numpy(np.bincount(bins, weights, BINS)).to(self.regions.dtype)
        self.regions += counts.to(self.regions.device)
        self.region_count += count - 1

    @override
    def compute(self) -> dict[str, Tensor]:
        """The scores; those of pixels are 0 where there are no defects."""
        false, true = (counts / counts[-1].clamp(min=1) for counts in self.count_above())
        above = self.regions.cpu().flip(0).cumsum(0)  # CUDA adds up floats in any order
        overlap = above.to(self.regions.device) / self.region_count.clamp(min=1)
        dice = self.dice_curve()
        values = super().compute() | self._rank_images()
        values["pixel_auroc"] = _area(false, true, 1.0)
        values |= {name: _area(false, overlap, limit) for name, limit in _LIMITS.items()}
        threshold = bin_edge(BINS - 1 - _find_best(dice))
        values |= {"f1_max": dice.max().float(), "f1_max_threshold": threshold.to(dice.device)}
        return values

    def score_images(self) -> tuple[Tensor, Tensor, Tensor]:
        """Score of each image that was seen, in this process alone where there are several.

        Returns:
            [images] int64 numbers of the images, which rise, their scores as float32, and whether
            any of their patches shows a defect as int64 in {0, 1}, on the host.
        """
        numbers, image_of = torch.unique(dim_zero_cat(self.images).cpu(), return_inverse=True)
        if self.sizes_px is None:
            areas_px = torch.bincount(image_of, dim_zero_cat(self.areas_px).cpu().double())
        else:
            areas_px = self.sizes_px.prod(1)[numbers]
        limits = [count_top_px(int(area), self.score_fraction) for area in areas_px.tolist()]
        top = self._collect()
        renumbered = TopPixels(torch.searchsorted(numbers, top.image.cpu()), top.pixel, top.score)
        scores = mean_by_image(keep_highest(renumbered, np.array(limits)), len(numbers)).float()
        defective = torch.zeros(len(numbers), dtype=torch.int64)
        defective[image_of[dim_zero_cat(self.defective).cpu()]] = 1
        return numbers, scores, defective

    def _rank_images(self) -> dict[str, Tensor]:
        self.confusion = None
        if not len(self.images):
            return {}
        numbers, scores, defective = self.score_images()
        if defective.all() or not defective.any():
            return {}
        best_f1, threshold = choose_threshold(scores, defective)
        least = threshold if self.image_threshold is None else self.image_threshold
        self.confusion = count_confusion(scores >= least, defective.bool())
        values = {
            "image_auroc": binary_auroc(scores, defective),
            "image_average_precision": binary_average_precision(scores, defective),
            "image_f1_max": torch.tensor(best_f1),
            "image_f1_max_threshold": torch.tensor(threshold),
        }
        for kind, rows in self._find_by_kind(numbers, defective).items():
            values[f"image_auroc_{kind}"] = binary_auroc(scores[rows], defective[rows])
        return {name: score.to(self.device) for name, score in values.items()}

    def _find_by_kind(self, numbers: Tensor, defective: Tensor) -> dict[str, Tensor]:
        """Mark the images that are good or of a kind, bool, for each of several kinds."""
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


def count_confusion(is_alarm: Tensor, is_defective: Tensor) -> Confusion:
    """Count good and defective images by what a model says of them; both [images] bool."""
    counts = []
    for is_row in (~is_defective, is_defective):
        alarms = int((is_row & is_alarm).sum())
        counts.append([int(is_row.sum()) - alarms, alarms])
    return Confusion(("good", "defect"), counts)


def _find_best(f1: Tensor) -> int:
    """Find where a smoothed curve [8192] is largest; of equal places the middle."""
    window = 2 * _SMOOTH + 1
    (mean_f1,) = avg_pool1d(f1[None], window, 1, _SMOOTH, count_include_pad=False)
    best = torch.nonzero(mean_f1 >= mean_f1.max() - 1e-6).flatten()
    return int(best[len(best) // 2])


def _area(false_rates: Tensor, hit_rates: Tensor, limit: float) -> Tensor:
    """Area under a curve over the false positive rate up to `limit`, as a fraction of it."""
    x = torch.cat([false_rates.new_zeros(1), false_rates])
    y = torch.cat([hit_rates.new_zeros(1), hit_rates])
    widths = x.diff().clamp(max=(limit - x[:-1]).clamp(min=0))
    slopes = y.diff() / x.diff().clamp(min=torch.finfo(x.dtype).tiny)
    return ((y[:-1] + slopes * widths / 2) * widths).sum().div(limit).float()
