from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.models.segmentation.losses import PixelLoss, choose_loss


def _batch(samples: int = 6) -> tuple[Tensor, Tensor]:
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
    assert_close(PixelLoss()(logits, masks), entropy + (dice[0] + dice[1]) / 2)
    assert_close(PixelLoss(dice_weight=0.0)(logits, masks), entropy)
    # Of the mean loss only the first sample, which shows a defect, has a Dice term.
    assert_close(PixelLoss("mean")(logits, masks), entropy * 10 / 3 + dice[0] / 2)


@pytest.mark.parametrize(("sizes", "unit"), [((1, 5), "rare"), ((2, 2, 2), "mean")])
def test_a_batch_is_the_mean_of_its_micro_batches(
    sizes: tuple[int, ...], unit: Literal["rare", "mean"]
) -> None:
    logits, masks = (tensor.double() for tensor in _batch())
    masks[1] = 0
    logits.requires_grad_()
    (whole,) = torch.autograd.grad(PixelLoss(unit)(logits, masks), logits)
    pieces = zip(logits.split(sizes), masks.split(sizes), sizes, strict=True)
    loss = sum(PixelLoss(unit)(part, mask) * size / 6 for part, mask, size in pieces)
    (parts,) = torch.autograd.grad(loss, logits)  # type: ignore[arg-type]
    assert_close(parts, whole)


@pytest.mark.parametrize(
    ("defects", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.bfloat16)]
)
def test_it_is_float32_and_pushes_the_right_way(defects: bool, dtype: torch.dtype) -> None:
    logits, masks = _batch()
    masks = masks * defects
    logits = logits.to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = PixelLoss()(logits, masks)
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert (logits.grad[masks == 1] < 0).all()
    assert (logits.grad[masks == 0] > 0).all()


def _class_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    masks = torch.zeros(4, 1, 12, 12)
    masks[0, :, 2:5, 2:5], masks[1, :, 6:9, 1:8], masks[2, :, :2] = 1, 2, 1
    return torch.randn((4, 3, 12, 12), generator=generator), masks


def test_classes_are_compared_by_cross_entropy_and_by_the_overlap_of_those_shown() -> None:
    logits, masks = _class_batch()
    entropy = F.cross_entropy(logits, masks[:, 0].long())
    assert_close(PixelLoss("mean", dice_weight=0)(logits, masks), entropy)
    p, losses = logits.softmax(1), []

    def miss(found: Tensor, wanted: Tensor) -> Tensor:
        return 1 - (2 * (found * wanted).sum() + 2) / (found.sum() + wanted.sum() + 2)

    for sample, shown in enumerate((1, 2, 1, None)):
        if shown is None:
            losses.append(torch.zeros(()))
            continue
        marked = (masks[sample, 0] > 0).float()
        losses.append((miss(1 - p[sample, 0], marked) + miss(p[sample, shown], marked)) / 2)
    expected = entropy + torch.stack(losses).mean()
    assert_close(PixelLoss("mean")(logits, masks), expected)


@pytest.mark.parametrize("classes", [1, 3])
def test_ignored_pixels_change_nothing(classes: int) -> None:
    logits, masks = _class_batch() if classes > 1 else _batch(4)
    masks[:, :, 9:] = 255
    loss, changed = PixelLoss("mean"), logits.clone()
    changed[:, :, 9:] += 100
    assert_close(loss(changed, masks), loss(logits, masks))
    cropped = loss(logits[:, :, :9], masks[:, :, :9])
    assert_close(loss(logits, masks), cropped)


def test_focal_and_class_weights_are_their_formulas() -> None:
    logits, masks = _class_batch()
    entropy = F.cross_entropy(logits, masks[:, 0].long(), reduction="none")
    focal = (entropy * (1 - torch.exp(-entropy)) ** 2).mean()
    assert_close(PixelLoss("mean", dice_weight=0, focal_gamma=2.0)(logits, masks), focal)
    weights = torch.tensor([0.1, 2.0, 5.0])
    wanted = (entropy * weights[masks[:, 0].long()]).mean()
    found = PixelLoss("mean", dice_weight=0, class_weights=weights.tolist())(logits, masks)
    assert_close(found, wanted)


def test_tversky_weighs_false_alarms_and_misses() -> None:
    masks = torch.zeros(1, 1, 8, 8)
    masks[..., :4, :] = 1
    less, more = torch.full_like(masks, -9), torch.full_like(masks, -9)
    less[..., :2, :], more[..., :6, :] = 9, 9
    loss = PixelLoss("mean", tversky=(0.3, 0.7))

    def overlap(logits: Tensor) -> float:
        return float(loss(logits, masks) - PixelLoss("mean", dice_weight=0)(logits, masks))

    assert overlap(less) == pytest.approx(1 - (16 + 1) / (16 + 0.7 * 16 + 1), abs=1e-3)
    assert overlap(more) == pytest.approx(1 - (32 + 1) / (32 + 0.3 * 16 + 1), abs=1e-3)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tversky=\[1\].*need two weights"):
        PixelLoss(tversky=[1])
    with pytest.raises(ConfigError, match="nothing below 0"):
        PixelLoss(focal_gamma=-1)


def test_options_that_a_loss_of_your_own_would_ignore_are_refused() -> None:
    loss = torch.nn.CrossEntropyLoss()
    assert choose_loss(loss, class_weights=None, tversky=[0.5, 0.5], dice_weight=1) is loss
    for options in ({"class_weights": [1.0, 2.0]}, {"dice_weight": 0.5}, {"tversky": (0.3, 0.7)}):
        (name,) = options
        with pytest.raises(ConfigError, match=f"{name}=.* your CrossEntropyLoss does not have"):
            choose_loss(loss, **options)
    assert isinstance(choose_loss("mean", dice_weight=0.5), PixelLoss)
