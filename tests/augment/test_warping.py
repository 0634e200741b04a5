import pytest
import torch

from lit_data.augment.geometry import Moves, compose
from lit_data.augment.warping import Padding, WholeMoves, invert, warp

SIZES = [((9, 9), (9, 9)), ((8, 12), (8, 12)), ((13, 8), (6, 7)), ((1, 6), (1, 3))]


def _moves(batch: int, *, bent: float = 0.0) -> Moves:
    generator = torch.Generator().manual_seed(1)
    return Moves(
        mirror=torch.where(torch.rand(batch, 2, generator=generator) < 0.5, -1.0, 1.0),
        quarters=torch.randint(0, 4, (batch,), generator=generator),
        linear=torch.eye(2) + bent * torch.rand(batch, 2, 2, generator=generator),
        tilt=bent * (torch.rand(batch, 2, generator=generator) - 0.5),
        shift=torch.randint(-9, 10, (batch, 2), generator=generator) + bent,
    )


@pytest.mark.parametrize("padding", ["reflect", "zeros", "border"])
@pytest.mark.parametrize(("size", "crop"), SIZES)
def test_indexing_is_the_warp(
    size: tuple[int, int], crop: tuple[int, int], padding: Padding
) -> None:
    planes = torch.rand(60, 3, *size, generator=torch.Generator().manual_seed(0))
    matrix = compose(_moves(60), size, crop)
    taken = WholeMoves.of(invert(matrix), size, crop, padding).take(planes)
    if 1 not in size or padding != "zeros":  # to torch's sampler nothing lies beside a single row
        assert torch.equal(taken, warp(planes, matrix, crop, padding, nearest=True))
    allowed = set(planes.unique().tolist()) | ({0.0} if padding == "zeros" else set())
    assert taken.shape == (60, 3, *crop)
    assert set(taken.unique().tolist()) <= allowed


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64]
)
def test_nearest_keeps_every_dtype_and_value(dtype: torch.dtype) -> None:
    largest = {torch.bool: 2, torch.uint8: 256, torch.float16: 2048}.get(dtype, 2**15)
    if dtype == torch.int64:
        largest = 2**40
    generator = torch.Generator().manual_seed(0)
    planes = torch.randint(0, largest, (4, 1, 16, 16), generator=generator).to(dtype)
    matrix = compose(_moves(4, bent=0.2), (16, 16), (16, 16))
    moved = warp(planes, matrix, (16, 16), "reflect", nearest=True)
    assert moved.dtype == dtype
    assert set(moved.unique().tolist()) <= set(planes.unique().tolist())
    whole = invert(compose(_moves(4), (16, 16), (16, 16)))
    taken = WholeMoves.of(whole, (16, 16), (16, 16), "border").take(planes)
    assert taken.dtype == dtype
    assert set(taken.unique().tolist()) <= set(planes.unique().tolist())
