"""`AnomalyScores`: the scores by which methods of anomaly detection are compared."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lit_data.devices import widest_float
from lit_data.modules.scored import BINS, PixelScores, bin_edge, find_bins, is_marked
from lit_data.types import IGNORED

_LIMITS: Final = {"aupro_30": 0.3, "aupro_5": 0.05}
ANOMALY_SCORES: Final = (
    *("image_auroc", "image_average_precision", "pixel_auroc"),
    *_LIMITS,
    *("f1_max", "f1_max_threshold"),
)


class AnomalyScores(PixelScores):
    """`PixelScores`, and what the field states beside them, from patches of images.

    - ``image_auroc``, ``image_average_precision``: of images, whose score is the highest of their pixels; exact, and
      left out where all images have a defect or none has;
    - ``image_auroc_KIND``: that of the defective images of a kind among the good ones, where there are several `kinds`;
    - ``pixel_auroc``: area under the ROC curve of the pixels;
    - ``aupro_30``, ``aupro_5``: area under the curve of per-region overlap over the false positive rate, up to 0.3 and
      0.05, as a share of the limit (Bergmann et al., "The MVTec anomaly detection dataset", IJCV 2021). A region is a
      connected part (8 neighbours) of the mask of a patch, so one that patches divide counts in each;
    - ``f1_max`` of the pixels, and the threshold where it is reached.

    The curves have 8192 thresholds. A region weighs 1 in a histogram of its pixels' scores, so the state of the pixels
    is of fixed size; that of the images is three numbers for each patch.

    Args:
        kinds: Kind of the defects of each image, by its number; empty where none is known.
    """

    regions: Tensor
    region_count: Tensor
    images: list[Tensor]
    highest: list[Tensor]
    defective: list[Tensor]

    def __init__(self, kinds: Sequence[str] = ()) -> None:
        super().__init__(threshold=0.5)
        self.kinds = kinds
        self.add_state("regions", torch.zeros(BINS, dtype=widest_float()), dist_reduce_fx="sum")
        self.add_state("region_count", torch.tensor(0), dist_reduce_fx="sum")
        for name in ("images", "highest", "defective"):
            self.add_state(name, [], dist_reduce_fx="cat")

    @override
    def update(self, scores: Tensor, masks: Tensor, images: Tensor | None = None) -> None:
        """Count pixels, regions and images.

        Args:
            scores: [B, 1, H, W] float in 0..1.
            masks: The same shape, in {0, 1}; 255 where pixels are ignored.
            images: [B] int64, the number of each patch's image; without it images are not scored.
        """
        super().update(scores, masks)
        marked = is_marked(masks)
        defective = marked.flatten(1).any(1)
        for row in torch.nonzero(defective).flatten().tolist():
            self._count_regions(scores[row, 0].detach(), marked[row, 0].cpu().numpy())
        if images is not None:
            self.images.append(images)
            self.highest.append(scores.detach().float().masked_fill(masks == IGNORED, 0).flatten(1).amax(1))
            self.defective.append(defective)

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
        found = super().compute() | self._score_images()
        found["pixel_auroc"] = _area(false, true, 1.0)
        found |= {name: _area(false, overlap, limit) for name, limit in _LIMITS.items()}
        best = int(dice.argmax())
        found |= {"f1_max": dice[best].float(), "f1_max_threshold": bin_edge(BINS - 1 - best).to(dice.device)}
        return found

    def _score_images(self) -> dict[str, Tensor]:
        if not len(self.images):
            return {}
        numbers, place = torch.unique(dim_zero_cat(self.images), return_inverse=True)
        highest = torch.zeros(len(numbers), device=place.device)
        highest.scatter_reduce_(0, place, dim_zero_cat(self.highest), "amax")
        defective = torch.zeros(len(numbers), dtype=torch.int64, device=place.device)
        defective[place[dim_zero_cat(self.defective)]] = 1
        if defective.all() or not defective.any():
            return {}
        by_kind = self._find_by_kind(numbers, defective) if self.kinds else {}
        return {
            "image_auroc": binary_auroc(highest, defective),
            "image_average_precision": binary_average_precision(highest, defective),
        } | {f"image_auroc_{kind}": binary_auroc(highest[rows], defective[rows]) for kind, rows in by_kind.items()}

    def _find_by_kind(self, numbers: Tensor, defective: Tensor) -> dict[str, Tensor]:
        """Which images are good or of a kind, bool, for each of several kinds."""
        kinds = [
            self.kinds[number] if bad else "" for number, bad in zip(numbers.tolist(), defective.tolist(), strict=True)
        ]
        told = sorted(set(kinds) - {""})
        if len(told) < 2:
            return {}
        return {kind: torch.tensor([one in ("", kind) for one in kinds], device=numbers.device) for kind in told}


def _area(false_rates: Tensor, hit_rates: Tensor, limit: float) -> Tensor:
    """Area under a curve over the false positive rate up to `limit`, as a share of it."""
    x = torch.cat([false_rates.new_zeros(1), false_rates])
    y = torch.cat([hit_rates.new_zeros(1), hit_rates])
    widths = x.diff().clamp(max=(limit - x[:-1]).clamp(min=0))
    slopes = y.diff() / x.diff().clamp(min=torch.finfo(x.dtype).tiny)
    return ((y[:-1] + slopes * widths / 2) * widths).sum().div(limit).float()
