import pytest
import torch
import torch.nn.functional as F

from lit_data.modules.segmentation.module import mean_pixel_loss, rare_pixel_loss


def _batch(samples: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    masks = torch.zeros(samples, 1, 16, 16)
    masks[::2, :, 3:6, 4:9] = 1
    return torch.randn(masks.shape, generator=generator) * 3 - 4, masks


def test_it_is_its_formula() -> None:
    logits = torch.tensor([[[[2.0, -1.0, -3.0]]], [[[-2.0, -1.0, -4.0]]]])
    masks = torch.tensor([[[[1.0, 0.0, 0.0]]], [[[0.0, 0.0, 0.0]]]])
    p = logits.sigmoid().flatten(1)
    entropy = F.binary_cross_entropy_with_logits(logits, masks, reduction="sum") / 10 / 2
    dice = 1 - (2 * p[0, 0] + 2) / (p[0].sum() + 1 + 2), 1 - 2 / (p[1].sum() + 2)
    torch.testing.assert_close(rare_pixel_loss(logits, masks), entropy + (dice[0] + dice[1]) / 2)
    torch.testing.assert_close(rare_pixel_loss(logits, masks, dice_weight=0.0), entropy)
    torch.testing.assert_close(mean_pixel_loss(logits, masks), entropy * 10 / 3 + (dice[0] + dice[1]) / 2)


@pytest.mark.parametrize("sizes", [(3, 3), (1, 5), (2, 2, 2)])
def test_a_batch_is_the_mean_of_its_micro_batches(sizes: tuple[int, ...]) -> None:
    logits, masks = (tensor.double() for tensor in _batch())
    logits.requires_grad_()
    (whole,) = torch.autograd.grad(rare_pixel_loss(logits, masks), logits)
    pieces = zip(logits.split(sizes), masks.split(sizes), sizes, strict=True)
    loss = sum(rare_pixel_loss(part, mask) * size / 6 for part, mask, size in pieces)
    (parts,) = torch.autograd.grad(loss, logits)  # type: ignore[arg-type]
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("defects", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_float32_and_pushes_the_right_way(defects: bool, dtype: torch.dtype) -> None:
    logits, masks = _batch()
    masks = masks * defects
    logits = logits.to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = rare_pixel_loss(logits, masks)
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert (logits.grad[masks == 1] < 0).all()
    assert (logits.grad[masks == 0] > 0).all()


def test_a_right_answer_costs_nothing_and_extremes_are_finite() -> None:
    _, masks = _batch()
    right = (masks * 2 - 1) * 200
    assert rare_pixel_loss(right, masks) < 1e-6
    wrong = (-right).requires_grad_()
    loss = rare_pixel_loss(wrong, masks)
    loss.backward()
    assert loss.isfinite()
    assert wrong.grad is not None
    assert wrong.grad.isfinite().all()
