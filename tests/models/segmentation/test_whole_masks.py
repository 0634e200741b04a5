"""Scores of whole images from the patches that evaluation sees, held against those of anomalib."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_data.core.grid import PatchGrid
from lit_data.core.types import Array
from lit_data.models.segmentation import anomaly_metrics, whole_masks
from lit_data.models.segmentation.anomaly_metrics import AnomalyMetrics
from lit_data.models.segmentation.whole_masks import WholeMasks

COUNT = 7
SHAPE = (400, 500)


def make_maps() -> tuple[Tensor, Tensor]:
    """Four good images and three with defects, some of which touch by a corner alone: [7, 400, 500]."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.zeros(COUNT, *SHAPE)
    boxes = ((4, 20, 30, 90, 140), (4, 110, 170, 40, 40), (5, 200, 100, 8, 300), (5, 395, 0, 5, 9))
    for image, y, x, height, width in (*boxes, (6, 0, 480, 400, 20), (6, 60, 60, 3, 3)):
        masks[image, y : y + height, x : x + width] = 1
    strength = torch.linspace(0, 5, COUNT).view(-1, 1, 1)
    logits = torch.randn(masks.shape, generator=generator) * 1.2 - 4 + masks * strength
    return logits.sigmoid(), masks


# anomalib 2.7, of the maps above:
#   from anomalib.metrics.aupro import _AUPRO
#   from anomalib.metrics.pimo.pimo import _AUPIMO
#   for metric in (_AUPRO(), _AUPRO(fpr_limit=0.05), _AUPIMO()):
#       metric.update(scores, masks.int())
#       print(float(metric.compute()))
ANOMALIB = {"aupro_30": 0.970709, "aupro_5": 0.896314, "aupimo": 0.320727}


def _score(
    scores: Tensor,
    masks: Tensor,
    *,
    patch_px: int = 128,
    stride_px: int = 96,
    sizes_px: tuple[int, int] = SHAPE,
) -> AnomalyMetrics:
    """See overlapping patches of whole images in batches of 9."""
    height, width = scores.shape[1:]
    grid = PatchGrid([height] * COUNT, [width] * COUNT, patch_px, stride_px)
    metric = AnomalyMetrics()
    metric.whole_masks = WholeMasks(
        grid,
        torch.tensor([sizes_px] * COUNT),
        lambda image: masks[image, : sizes_px[0], : sizes_px[1]].numpy().astype(np.uint8),
    )
    for patches in np.array_split(np.arange(len(grid)), -(-len(grid) // 9)):
        places = list(zip(*(part.tolist() for part in grid.locate(patches)), strict=True))
        parts = []
        for whole in (scores, masks):
            cut = [whole[image, y : y + patch_px, x : x + patch_px] for image, y, x in places]
            parts.append(torch.stack(cut)[:, None])
        images, *corner = (torch.from_numpy(part) for part in grid.locate(patches))
        cut_scores, cut_masks = parts
        metric.update(cut_scores, cut_masks, images, torch.stack(corner, 1))
    return metric


def test_patches_give_the_scores_that_anomalib_gives_of_whole_images() -> None:
    scores, masks = make_maps()
    found = _score(scores, masks).compute()
    of_whole_images = {name: float(found[name]) for name in ANOMALIB}
    assert of_whole_images == pytest.approx(ANOMALIB, abs=1e-4)
    assert 0.1 < of_whole_images["aupimo"] < 0.9


def test_a_pixel_counts_once_and_a_padded_one_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anomaly_metrics, "MERGE_AFTER", 1000)
    scores, masks = (part[:, :200, :260] for part in make_maps())
    masks[5, :9, :9] = 255
    metric = _score(scores, masks, sizes_px=(190, 255))
    whole = AnomalyMetrics()
    whole.update(scores[:, None, :190, :255], masks[:, None, :190, :255])
    assert torch.equal(metric.histogram, whole.histogram)
    assert torch.allclose(metric.regions, whole.regions, rtol=0, atol=1e-9)
    assert float(metric.region_count) == pytest.approx(float(whole.region_count))
    assert float(metric.good_bins.sum()) == pytest.approx(5)  # what image 5 has lies below
    assert sum(map(len, metric.overlap_keys)) < 5000
    keys, counts = (torch.cat(part) for part in (metric.overlap_keys, metric.overlap_counts))
    marked = (masks[4:, :190, :255] == 1).flatten(1).sum(1)
    assert torch.bincount(keys // 8192, counts)[4:].tolist() == marked.tolist()


def test_defects_that_masks_of_images_lack_are_regions_of_their_patch() -> None:
    scores, masks = make_maps()
    metric = _score(scores, masks)
    before = float(metric.region_count)
    patch = torch.zeros(1, 1, 128, 128)
    patch[..., 40:50, 40:50] = 1
    patch[..., 70:80, 40:50] = 1
    metric.update(patch, patch, torch.tensor([0]), torch.tensor([[0, 0]]))
    assert before == pytest.approx(5)
    assert float(metric.region_count) == pytest.approx(7)


def test_a_copy_of_a_metric_sees_the_same_masks_and_a_file_none() -> None:
    metric = AnomalyMetrics()
    metric.whole_masks = WholeMasks(
        PatchGrid([9], [9], 9, 9), torch.tensor([[9, 9]]), _read_nothing
    )
    assert copy.deepcopy(metric).whole_masks is metric.whole_masks
    loaded = pickle.loads(pickle.dumps(metric))
    assert loaded.whole_masks is None
    assert whole_masks.WholeMasks.of(None) is None


def _read_nothing(image: int) -> Array | None:
    return None
