import sys

import numpy as np
import pytest

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.grid import Edges, PatchGrid


@pytest.mark.parametrize(
    ("length", "patch", "stride", "edges", "starts"),
    [
        # exact fit
        (8, 4, 4, "cover", [0, 4]),
        (8, 4, 4, "drop", [0, 4]),
        (8, 4, 4, "pad", [0, 4]),
        (8, 8, 4, "cover", [0]),
        # a tail of 3
        (11, 4, 4, "cover", [0, 4, 7]),
        (11, 4, 4, "drop", [0, 4]),
        (11, 4, 4, "pad", [0, 4, 8]),
        # overlapping patches, and gaps between patches
        (10, 4, 3, "cover", [0, 3, 6]),
        (11, 4, 3, "cover", [0, 3, 6, 7]),
        (11, 2, 5, "cover", [0, 5, 9]),
        # smaller than the patch
        (5, 6, 6, "pad", [0]),
    ],
)
def test_positions_along_an_axis(
    length: int, patch: int, stride: int, edges: Edges, starts: list[int]
) -> None:
    grid = PatchGrid([length], [patch], patch, stride, edges)
    assert [grid[index][1] for index in range(len(grid))] == starts


def test_mixed_sizes_agree_with_plain_loops() -> None:
    heights, widths = [130, 300, 128, 500], [300, 128, 128, 250]
    grid = PatchGrid(heights, widths, 128, (100, 90), "cover")
    expected = []
    for image, (height, width) in enumerate(zip(heights, widths, strict=True)):
        rows = sorted({*range(0, height - 127, 100), height - 128})
        columns = sorted({*range(0, width - 127, 90), width - 128})
        expected += [(image, y, x) for y in rows for x in columns]
    assert [grid[index] for index in range(len(grid))] == expected
    image, y, x = grid.locate(np.arange(len(grid)))
    assert list(zip(image.tolist(), y.tolist(), x.tolist(), strict=True)) == expected
    counts = np.bincount([image for image, _, _ in expected]).tolist()
    assert [len(grid.patches_of(number)) for number in range(4)] == counts
    with pytest.raises(IndexError, match=f"patch {len(grid)} of {len(grid)}"):
        grid[len(grid)]


def test_memory_grows_with_images_only() -> None:
    few = PatchGrid([1000], [1000], 10, 10, "cover")
    many = PatchGrid([10**6], [10**6], 10, 1, "cover")
    assert len(many) > 10**11
    assert _bytes_of(many) == _bytes_of(few)


@pytest.mark.parametrize("edges", ["cover", "drop"])
def test_images_smaller_than_the_patch(edges: Edges) -> None:
    refused = r"b: 15 x 9(.|\n)*1 of 2 images is too small for patches of 16 x 16 px:"
    with pytest.raises(DataError, match=refused):
        PatchGrid([20, 15], [20, 9], 16, 16, edges, name="ab".__getitem__)


def test_padding_reflects_at_most_half_a_patch() -> None:
    assert len(PatchGrid([9], [9], 16, 16, "pad")) == 1
    with pytest.raises(DataError, match="too small"):
        PatchGrid([8], [8], 16, 16, "pad")


@pytest.mark.parametrize("patch", [0, -1, (4, 0), (1, 2, 3), 2.5])
def test_bad_patch_sizes(patch: object) -> None:
    with pytest.raises((ConfigError, TypeError)):
        PatchGrid([8], [8], patch, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="edges='wrap' is unknown: choose one of cover, drop, pa"):
        PatchGrid([8], [8], 4, 4, "wrap")  # type: ignore[arg-type]


def _bytes_of(grid: PatchGrid) -> int:
    return sum(sys.getsizeof(value) for value in vars(grid).values())
