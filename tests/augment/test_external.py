import random
from typing import Any, Literal

import kornia.augmentation as ka
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lit_data.augment import ExternalTransform, Layers
from lit_data.augment.external import seeded
from lit_data.core.errors import ConfigError

SEEDS = ["batch", "sample"]


class Noise(nn.Module):
    """Draws from every global generator."""

    def forward(self, images: Tensor) -> Tensor:
        scale = random.random() + np.random.rand()  # noqa: NPY002
        return (images + scale * torch.rand_like(images)).clamp(0, 1)


class Mirror(nn.Module):
    """Moves masks too."""

    def forward(self, images: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return images.flip(3), None if masks is None else masks.flip(3)


class Tracked(nn.Module):
    """Holds a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, images: Tensor) -> Tensor:
        return images * self.gain


def _layers(batch: int = 4, channels: int = 3, height: int = 12, width: int = 16) -> Layers:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, channels, height, width, generator=generator)
    return Layers(images, torch.randint(0, 8, (batch, 1, height, width), generator=generator))


def _run(
    foreign: ExternalTransform, layers: Layers, index: Any = None, *, seed: int = 0, epoch: int = 0
) -> Layers:
    index = np.arange(len(layers.images)) if index is None else index
    return foreign(layers, foreign.draw(seed, epoch, index, layers.images.shape[1]))


@pytest.mark.parametrize("seed_per", SEEDS)
@pytest.mark.parametrize(
    "module",
    [
        Noise(),
        ka.RandomAffine(30.0, p=0.7),
        [ka.RandomHorizontalFlip(), ka.RandomGaussianNoise(p=1.0)],
    ],
)
def test_results_depend_on_the_sample_alone(
    module: Any, seed_per: Literal["batch", "sample"]
) -> None:
    layers = Layers(_layers().images)
    foreign = ExternalTransform(module, seed_per=seed_per)
    first = _run(foreign, layers)
    torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    assert torch.equal(_run(foreign, layers).images, first.images)
    others = [
        _run(foreign, layers, seed=1),
        _run(foreign, layers, epoch=1),
        _run(foreign, layers, np.arange(4) + 1),
    ]
    assert all(not torch.equal(other.images, first.images) for other in others)


def test_seeds_of_samples_do_not_see_the_batch_and_those_of_batches_do() -> None:
    layers = Layers(_layers().images)
    part = Layers(layers.images[[2, 0]])
    for seed_per in SEEDS:
        foreign = ExternalTransform(Noise(), seed_per=seed_per)
        whole, some = _run(foreign, layers).images, _run(foreign, part, [2, 0]).images
        assert torch.equal(some, whole[[2, 0]]) == (seed_per == "sample")
        draws = foreign.draw(0, 0, np.arange(5), 3)["augment_external"]
        assert draws.dtype == torch.int64
        assert len(draws.unique()) == (5 if seed_per == "sample" else 1)


@pytest.mark.parametrize(
    "module",
    [ka.RandomAffine(30.0, p=1.0), ka.AugmentationSequential(ka.RandomHorizontalFlip(p=1.0), data_keys=["input"]),
     ka.ImageSequential(ka.RandomPerspective(p=1.0)),
     ka.AugmentationSequential(ka.RandomVerticalFlip(p=1.0), data_keys=None),
     nn.Sequential(ka.RandomHorizontalFlip(p=1.0), nn.Identity()),
     [ka.RandomCrop((8, 8)), ka.RandomVerticalFlip(p=0.5)]],
)  # fmt: skip
@pytest.mark.parametrize("seed_per", SEEDS)
def test_kornia_moves_masks_with_images(module: Any, seed_per: Literal["batch", "sample"]) -> None:
    blocks = torch.randint(0, 8, (4, 1, 3, 4), generator=torch.Generator().manual_seed(0))
    masks = blocks.repeat_interleave(8, 2).repeat_interleave(8, 3)
    moved = _run(ExternalTransform(module, seed_per=seed_per), Layers(masks.float() / 7, masks))
    assert moved.masks is not None
    assert moved.masks.dtype == torch.int64
    assert set(moved.masks.unique().tolist()) <= set(range(8))
    assert not torch.equal(moved.masks, masks)
    assert ((moved.images - moved.masks / 7).abs() < 1e-3).float().mean() > 0.6


@pytest.mark.parametrize("seed_per", SEEDS)
@pytest.mark.parametrize(
    "module", [ka.RandomHorizontalFlip(p=0.5), ka.RandomCrop((20, 24)), ka.RandomRotation90((1, 3))]
)
def test_kornia_moves_boxes(module: nn.Module, seed_per: Literal["batch", "sample"]) -> None:
    images, boxes = torch.zeros(6, 1, 24, 24), []
    for row in (0, 1, 1, 3, 4, 5):
        left, top = 3 + 2 * row, 5 + row
        images[row, 0, top : top + 4, left : left + 6] = 1
        boxes.append([row, row, (left + 3) / 24, (top + 2) / 24, 6 / 24, 4 / 24])
    moved = _run(
        ExternalTransform(module, seed_per=seed_per, min_box_px=1),
        Layers(images, None, torch.tensor(boxes)),
    )
    assert moved.boxes is not None
    assert moved.boxes[:, 0].tolist() == [0, 1, 1, 3, 4, 5]
    size = torch.tensor(moved.size_px[::-1])
    for row, label, *shares in moved.boxes.tolist():
        assert label == row
        centre, sides = torch.tensor(shares).view(2, 2) * size
        places = torch.nonzero(moved.images[int(row), 0] > 0.5).flip(1)
        assert_close(centre - sides / 2, places.amin(dim=0).float(), atol=0.01, rtol=0)
        assert_close(centre + sides / 2, places.amax(dim=0) + 1.0, atol=0.01, rtol=0)


def test_a_module_of_two_arguments_gets_the_masks() -> None:
    layers = _layers()
    moved = _run(ExternalTransform(Mirror()), layers)
    assert layers.masks is not None
    assert moved.masks is not None
    assert torch.equal(moved.masks, layers.masks.flip(3))
    assert _run(ExternalTransform(Mirror()), Layers(layers.images)).masks is None


def test_masks_stay_where_a_module_changes_values_alone() -> None:
    layers = _layers()
    foreign = ExternalTransform(Tracked(), seed_per="sample", moves_pixels=False)
    result = _run(foreign, layers)
    assert result.masks is not None
    assert layers.masks is not None
    assert torch.equal(result.masks, layers.masks)
    assert torch.equal(result.images, layers.images * 0.5)
    assert not result.images.requires_grad


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"module": "flip"}, "'flip' is not an augmentation: give a torch module or a list"),
        ({"module": []}, "not an augmentation"),
        ({"module": [3]}, "not an augmentation"),
        ({"module": Noise(), "seed_per": "epoch"}, "unknown: choose one of batch, sample"),
    ],
)
def test_bad_options(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ExternalTransform(**arguments)


def test_what_cannot_be_done_is_refused() -> None:
    sizes = ExternalTransform(RandomCut(), seed_per="sample")
    with pytest.raises(ConfigError, match="samples came out in different sizes"):
        _run(sizes, Layers(_layers(8).images))


class RandomCut(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images[..., : random.randint(4, 12)]


CPU = torch.device("cpu")


def _draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()  # noqa: NPY002


def test_states_are_put_back_after_an_error_too() -> None:
    with seeded(5, CPU):
        expected = _draw()
    with seeded(5, CPU):
        with pytest.raises(ZeroDivisionError), seeded(6, CPU):
            _draw()[0] / 0
        assert _draw() == expected


@pytest.mark.gpu
def test_the_generator_of_the_device_is_seeded_and_put_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state, found = torch.cuda.get_rng_state(device), []
    for _ in range(2):
        with seeded(7, device):
            found.append(torch.rand(3, device=device))
        assert torch.equal(torch.cuda.get_rng_state(device), state)
    assert torch.equal(*found)
