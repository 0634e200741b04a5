"""Modules of users beside masks and boxes: moved along, or refused before anything is read."""

from functools import partial
from typing import Any

import kornia.augmentation as ka
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.augment import Compiled, ExternalTransform, Layers, Pipeline, StripeAugment
from lit_data.augment.foreign import Layer
from lit_data.core.errors import ConfigError
from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule, StripeDataModule
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.gan.datamodule import GANDataModule
from lit_data.wings.volumes.datamodule import CTDataModule
from lit_data.wings.watermarks import WatermarkDataModule


class Mirror(nn.Module):
    """Says nothing of what it does."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flip(3)


class MirrorBoth(nn.Module):
    def forward(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        return images.flip(3), masks.flip(3)


def _of_torchvision(name: str, *, old: bool = False) -> nn.Module:
    """Stand in for a transform of torchvision, of which only the name is asked."""
    module = "torchvision.transforms." + ("transforms" if old else "v2._any")
    transform: nn.Module = type(name, (Mirror,), {"__module__": module})()
    return transform


LEFT_BEHIND: list[tuple[Any, tuple[Layer, ...]]] = [
    (Mirror(), ("masks", "boxes")),
    (nn.Sequential(nn.Identity(), Mirror()), ("masks", "boxes")),
    (MirrorBoth(), ("boxes",)),
    ([ka.RandomHorizontalFlip(), Mirror()], ("masks", "boxes")),
    (ka.AugmentationSequential(nn.Sequential(ka.RandomVerticalFlip())), ("masks", "boxes")),
    (ka.RandomElasticTransform(), ("boxes",)),
    (ka.RandomThinPlateSpline(), ("masks", "boxes")),
    (ka.RandomMosaic((8, 8)), ("masks", "boxes")),
    (_of_torchvision("RandomHorizontalFlip", old=True), ("masks", "boxes")),
    (_of_torchvision("Lambda"), ("masks", "boxes")),
    (_of_torchvision("RandAugment"), ("masks", "boxes")),
    ([ka.RandomHorizontalFlip(), _of_torchvision("RandomRotation")], ("masks", "boxes")),
]


@pytest.mark.parametrize(("module", "layers"), LEFT_BEHIND)
def test_what_would_leave_masks_or_boxes_where_they_are_is_refused(
    module: Any, layers: tuple[Layer, ...]
) -> None:
    foreign = ExternalTransform(module)
    for layer in ("masks", "boxes"):
        if layer in layers:
            with pytest.raises(ConfigError, match=f"may move pixels, and would not move {layer}"):
                foreign.check_layers(masks=layer == "masks", boxes=layer == "boxes")
        else:
            foreign.check_layers(masks=layer == "masks", boxes=layer == "boxes")
    foreign.check_layers(masks=False, boxes=False)


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(),
        ka.RandomHorizontalFlip(),
        nn.Sequential(ka.RandomAffine(10.0), nn.Sequential(ka.ColorJiggle(0.1))),
        [ka.RandomHorizontalFlip(), _of_torchvision("ColorJitter")],
        _of_torchvision("GaussianBlur", old=True),
        _of_torchvision("RandomHorizontalFlip"),
    ],
)
def test_what_moves_them_along_or_moves_nothing_is_taken(module: Any) -> None:
    ExternalTransform(module).check_layers(masks=True, boxes=True)


def test_batches_are_checked_too_however_the_module_came_there() -> None:
    images, masks = torch.rand(2, 3, 8, 8), torch.zeros(2, 1, 8, 8)
    for augment in (ExternalTransform(Mirror()), Pipeline([StripeAugment(), Mirror()])):
        draws = augment.draw(0, 0, np.arange(2), 3)
        with pytest.raises(ConfigError, match="Mirror may move pixels"):
            augment(Layers(images, masks), draws)
    with pytest.raises(ConfigError, match="Mirror may move pixels"):
        Compiled(ExternalTransform(Mirror())).check_layers(masks=True, boxes=False)


def test_only_a_module_that_nobody_knows_is_trusted() -> None:
    ExternalTransform(Mirror(), moves_pixels=False).check_layers(masks=True, boxes=True)
    known = ExternalTransform(ka.RandomThinPlateSpline(), moves_pixels=False)
    with pytest.raises(ConfigError, match=r"RandomThinPlateSpline may move .* moves masks$"):
        known.check_layers(masks=True, boxes=False)


def test_nested_sequences_of_kornia_move_masks() -> None:
    masks = torch.randint(0, 2, (3, 1, 8, 8)).float()
    nested = nn.Sequential(nn.Sequential(ka.RandomHorizontalFlip(p=1.0)))
    augment = ExternalTransform(nested)
    moved = augment(Layers(masks, masks), augment.draw(0, 0, np.arange(3), 1))
    assert torch.equal(moved.masks, masks.flip(3))
    assert torch.equal(moved.images, masks.flip(3))


WITH_MASKS = [StripeDataModule, InspectionDataModule, WatermarkDataModule]


@pytest.mark.parametrize(
    ("kind", "layer"), [*((kind, "masks") for kind in WITH_MASKS), (DetectionDataModule, "boxes")]
)
def test_every_kind_with_masks_or_boxes_refuses_it_at_once(kind: Any, layer: Layer) -> None:
    make = partial(kind, "no-such-folder")
    for augment in (Mirror(), ExternalTransform(Mirror()), Pipeline([Mirror()]), {"val": Mirror()}):
        with pytest.raises(
            ConfigError, match=f"Mirror may move pixels, and would not move {layer}"
        ):
            make(augment=augment)
    make(augment=ka.RandomHorizontalFlip())
    make(augment={"predict": Mirror()})  # with images alone


def test_kinds_without_masks_take_any_module() -> None:
    LabelledImageDataModule("no-such-folder", augment=Mirror())
    GANDataModule("no-such-folder", augment=Mirror())


def test_volumes_take_their_own_augmentation_alone() -> None:
    with pytest.raises(ConfigError, match="augment is a Mirror: give a VolumeAugment"):
        CTDataModule("no-such-folder", sample="windows", augment=Mirror())  # type: ignore[arg-type]


@pytest.mark.strangers
def test_new_transforms_of_torchvision_move_masks_and_boxes() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    images = torch.zeros(2, 1, 16, 16)
    images[:, :, 3:9, 2:6] = 1
    boxes = torch.tensor([[row, 0, 4 / 16, 6 / 16, 4 / 16, 6 / 16] for row in (0.0, 1.0)])
    chain = v2.Compose([v2.ColorJitter(0.1), v2.RandomHorizontalFlip(1.0), v2.CenterCrop(12)])
    for module in (chain, nn.Sequential(chain), [chain, nn.Identity()]):
        augment = ExternalTransform(module)
        moved = augment(Layers(images, images.clone(), boxes), augment.draw(0, 0, np.arange(2), 1))
        assert torch.equal(moved.masks, images.flip(3)[:, :, 2:14, 2:14])
        assert type(moved.masks) is Tensor
        expected = [(10 + 14) / 2 / 16, 6 / 16]
        left, top = expected[0] * 16 - 2, expected[1] * 16 - 2
        torch.testing.assert_close(
            moved.boxes[:, 2:], torch.tensor([[left / 12, top / 12, 4 / 12, 6 / 12]] * 2)
        )
