import numpy as np
import pytest
import torch

from lit_data.grid import Edges, PatchGrid
from lit_data.inference import PatchStitcher, find_defects


@pytest.mark.parametrize(("edges", "stride"), [("cover", 5), ("cover", 8), ("pad", 5), ("drop", 6)])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_cut_patches_become_the_image_again(edges: Edges, stride: int, batch: int) -> None:
    rng = np.random.default_rng(0)
    heights, widths = [20, 13, 8], [11, 30, 9]
    images = [rng.random((h, w)).astype(np.float32) for h, w in zip(heights, widths, strict=True)]
    grid = PatchGrid(heights, widths, 8, stride, edges)
    image, y, x = grid.locate(np.arange(len(grid)))
    patches = np.zeros((len(grid), 1, 8, 8), np.float32)
    covered = [np.zeros(image.shape, bool) for image in images]
    for n in range(len(grid)):
        part = images[image[n]][y[n] : y[n] + 8, x[n] : x[n] + 8]
        patches[n, 0, : part.shape[0], : part.shape[1]] = part
        covered[image[n]][y[n] : y[n] + 8, x[n] : x[n] + 8] = True
    stitcher, done = PatchStitcher(grid), []
    for start in range(0, len(grid), batch):
        part = slice(start, start + batch)
        position = torch.from_numpy(np.stack((y[part], x[part]), axis=1))
        done += list(stitcher.add(torch.from_numpy(patches[part]), torch.from_numpy(image[part]), position))
    assert [number for number, _ in done] == [0, 1, 2]
    for number, result in done:
        np.testing.assert_allclose(result, np.where(covered[number], images[number], 0), rtol=0, atol=1e-6)


def test_regions_are_measured_and_sorted() -> None:
    probability = np.zeros((10, 12), np.float32)
    probability[1:3, 1:4] = 0.6
    probability[5, 5] = probability[6, 6] = 0.9
    probability[9, 11] = 0.7
    probability[0, 11] = 0.4
    defects = find_defects(probability, threshold=0.5)
    assert [(d.y, d.x, d.height_px, d.width_px, d.area_px) for d in defects] == [
        (5.5, 5.5, 2, 2, 2),
        (9.0, 11.0, 1, 1, 1),
        (1.5, 2.0, 2, 3, 6),
    ]
    assert [round(d.score, 3) for d in defects] == [0.9, 0.7, 0.6]
    assert len(find_defects(probability, threshold=0.5, min_area_px=2)) == 2
    assert find_defects(np.zeros((4, 4), np.float32)) == []
