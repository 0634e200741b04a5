"""Generators and discriminators, what they are asked, and the pictures that come out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lit_data.core.errors import ConfigError
from lit_data.wings.gan import (
    Conditions,
    ConvDiscriminator,
    ConvGenerator,
    GANModule,
    RayGenerator,
    RayPatches,
)
from lit_data.wings.gan.model.conditions import Use, draw_latents, make_grid
from lit_data.wings.gan.model.rays import find_rays, sum_up
from lit_data.wings.gan.sample_set import cast_rays

CPU = torch.device("cpu")
SMALL = {"latent_size": 6, "width": 4, "style_size": 8}


def _conditions(count: int, *, labels: int = 1) -> Conditions:
    poses = torch.rand(count, 2, generator=torch.Generator().manual_seed(1))
    return Conditions(torch.arange(count) % labels, poses)


def _ray_generator(**options: Any) -> RayGenerator:
    torch.manual_seed(0)
    sizes = {**SMALL, "image_px": 8, "plane_px": 8, "features": 4, "hidden": 8, "points": 6}
    return RayGenerator(**(sizes | options))


@pytest.mark.parametrize(("image_px", "scales"), [(4, 1), (16, 3), ((24, 40), 3), (64, 5)])
def test_images_of_many_sizes(image_px: Any, scales: int) -> None:
    height, width = (image_px, image_px) if isinstance(image_px, int) else image_px
    generator = ConvGenerator(image_px=image_px, channels=1, **SMALL)  # type: ignore[arg-type]
    discriminator = ConvDiscriminator(image_px=image_px, channels=1, width=4)
    images = generator(torch.randn(2, 6), _conditions(2))
    assert images.shape == (2, 1, height, width)
    assert discriminator(images, _conditions(2)).shape == (2,)
    assert (len(generator.blocks), len(discriminator.blocks)) == (scales, scales - 1)


@pytest.mark.parametrize(
    ("image_px", "message"),
    [
        (3, "image_px=3: need a height and a width of at least 4 px"),
        (36, r"image_px=36: halving must lead to .* - the nearest size is \[32, 32\]"),
        ((16, 18), r"image_px=\(16, 18\): .* the nearest size is \[16, 16\]"),
        ((8, 8, 8), r"image_px=\(8, 8, 8\) is not usable"),
    ],
)
def test_sizes_that_cannot_be_halved(image_px: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConvGenerator(image_px=image_px)


@pytest.mark.parametrize(
    "options", [{"radius": 4.0}, {"field_of_view_deg": 0.0}, {"points": 0}, {"features": -1}]
)
def test_impossible_cameras_and_fields(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
        _ray_generator(**options)


@pytest.mark.parametrize(
    "net",
    [ConvGenerator(image_px=8, num_labels=3, posed=True, **SMALL), _ray_generator(num_labels=3)],
    ids=["conv", "rays"],
)  # type: ignore[arg-type]
def test_no_picture_sees_another(net: nn.Module) -> None:
    latents, conditions = torch.randn(5, 6), _conditions(5, labels=3)
    with torch.no_grad():
        whole = net(latents, conditions)
        parts = [
            net(some, wanted)
            for some, wanted in zip(latents.split([2, 3]), conditions.split([2, 3]), strict=True)
        ]
    assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"labels": torch.tensor([1, 1])},
        {"poses": torch.ones(2, 2)},
        {"grids": 0.5 * make_grid(8, 8, CPU).expand(2, -1, -1, -1)},
    ],
    ids=["labels", "poses", "places"],
)
def test_every_condition_matters(change: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    conv = ConvGenerator(image_px=8, num_labels=2, posed=True, **SMALL)  # type: ignore[arg-type]
    score = ConvDiscriminator(image_px=8, num_labels=2, posed=True, placed=True, width=4)
    before = Conditions(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2))
    after = before._replace(**change)
    latents, images = torch.randn(2, 6), torch.randn(2, 3, 8, 8)
    for net, given in ((conv, latents), (_ray_generator(num_labels=2), latents), (score, images)):
        assert (net(given, before) - net(given, after)).abs().max() > 1e-4


def test_the_camera_is_that_of_the_drawn_objects() -> None:
    poses, (height, width) = torch.tensor([[0.3, 0.2], [4.0, 1.1]]), (5, 7)
    places = make_grid(height, width, CPU).flatten(0, 1).expand(2, -1, -1)
    origins, directions = find_rays(poses, places, 4.0, math.tan(math.radians(15)), width / height)
    wanted_origins, wanted = (
        torch.from_numpy(part) for part in cast_rays(poses.numpy(), (height, width))
    )
    directions = directions / directions.norm(dim=-1, keepdim=True)
    assert_close(directions, wanted.T.reshape(2, -1, 3))
    assert_close(
        origins[:, None].expand(-1, height * width, -1), wanted_origins.T.reshape(2, -1, 3)
    )


def test_light_is_summed_up_front_to_back() -> None:
    generator = torch.Generator().manual_seed(0)
    thickness, colours, ground = (
        torch.rand(shape, generator=generator) for shape in ((1, 1, 5), (1, 1, 5, 3), (1, 1, 3))
    )
    passing, wanted = 1.0, torch.zeros(3)
    for depth, colour in zip(thickness[0, 0].tolist(), colours[0, 0], strict=True):
        wanted = wanted + passing * (1 - math.exp(-depth)) * colour
        passing *= math.exp(-depth)
    assert_close(sum_up(thickness, colours, ground)[0, 0], wanted + passing * ground[0, 0])


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_whole_images_are_made_of_the_same_rays(chunk: int) -> None:
    whole = _ray_generator(image_px=(8, 12))
    chunked = _ray_generator(image_px=(8, 12), ray_chunk=chunk)
    latents, conditions = torch.randn(2, 6), _conditions(2)
    with torch.no_grad():
        images = chunked(latents, conditions)
    assert images.shape == (2, 3, 8, 12)
    some = conditions._replace(grids=make_grid(8, 12, CPU)[2:5, 3:10].expand(2, -1, -1, -1))
    assert_close(whole(latents, conditions), images, rtol=0, atol=1e-5)
    assert_close(whole(latents, some), images[:, :, 2:5, 3:10], rtol=0, atol=1e-5)


def test_latents_are_normal_and_a_sample_has_its_own() -> None:
    index = torch.arange(4000)
    whole = draw_latents(index, 7, seed=3, epoch=2, use=Use.GENERATOR)
    assert whole.shape == (4000, 7)
    assert abs(float(whole.mean())) < 0.03
    assert float(whole.std()) == pytest.approx(1, abs=0.03)
    assert abs(float((whole[:, 0] * whole[:, 4]).mean())) < 0.06, "of one pair"
    assert torch.equal(draw_latents(index[5:9], 7, seed=3, epoch=2, use=Use.GENERATOR), whole[5:9])
    others = [(3, 2, Use.DISCRIMINATOR), (3, 2, Use.SAMPLES)]
    for seed, epoch, use in [*others, (3, 1, Use.GENERATOR), (4, 2, Use.GENERATOR)]:
        other = draw_latents(index, 7, seed=seed, epoch=epoch, use=use)
        assert abs(float((whole * other).mean())) < 0.03


def test_patches_lie_in_their_images() -> None:
    index = torch.arange(500)
    grids, offsets = RayPatches(4, 0.25).draw(index, seed=0, epoch=1, use=Use.DISCRIMINATOR)
    assert (grids.shape, offsets.shape) == ((500, 4, 4, 2), (500, 4, 4))
    sides = (grids[:, 0, -1, 0] - grids[:, 0, 0, 0]) / 2 * 4 / 3
    assert 0.25 <= float(sides.min()) < 0.3 < 0.95 < float(sides.max()) <= 1
    assert 0.9 < float(grids.abs().max()) <= 1
    assert 0 <= float(offsets.min()) < float(offsets.max()) < 1
    again, _ = RayPatches(4, 0.25).draw(index[7:9], seed=0, epoch=1, use=Use.DISCRIMINATOR)
    assert torch.equal(again, grids[7:9])


@pytest.mark.parametrize(("size", "scale"), [(0, 0.5), (4, 0.0), (4, 1.5)])
def test_impossible_patches(size: int, scale: float) -> None:
    with pytest.raises(ConfigError, match=f"size_px={size}, min_scale={scale}: need 1 or more"):
        RayPatches(size, scale)


def _module() -> GANModule:
    torch.manual_seed(0)
    sizes = {"image_px": 8, "num_labels": 3, "posed": True}
    net = ConvGenerator(**sizes, **SMALL)  # type: ignore[arg-type]
    return GANModule(
        net, ConvDiscriminator(**sizes, width=4), image_px=8, num_labels=3, latent_size=6
    )  # type: ignore[arg-type]


def test_pictures_do_not_depend_on_their_batches() -> None:
    module = _module()
    module.poses = torch.rand(4, 2)
    modes = []
    module.ema_generator.register_forward_hook(
        lambda net, *_: modes.append((net.training, torch.is_inference_mode_enabled()))
    )
    images = module.sample_images(7, seed=2, batch_size=3)
    assert (images.shape, images.dtype, images.device) == ((7, 3, 8, 8), torch.float32, CPU)
    assert modes == [(False, True)] * 3
    assert module.ema_generator.training
    assert not images.is_inference()
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert_close(module.sample_images(5, seed=2), images[:5], rtol=0, atol=1e-5)
    assert not torch.allclose(module.sample_images(7, seed=3), images, atol=1e-3)


def test_views_of_one_object_have_its_latent_and_label() -> None:
    module, poses = _module(), torch.rand(3, 2)
    views = module.sweep_views(2, poses, 4, labels=[2, 0], batch_size=4)
    assert views.shape == (2, 3, 3, 8, 8)
    for number, pose in enumerate(poses):
        alone = module.sample_images(2, seed=4, labels=[2, 0], poses=pose.expand(2, -1))
        assert_close(views[:, number], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"pictures depend on the pose, but no datamodule gives any: give poses, \[count, 2\]"),
        ({"poses": torch.zeros(3, 2)}, r"labels \[4\] and poses \[3, 2\]: need \[4\] and \[4, 2\]"),
        ({"poses": torch.zeros(4, 2), "labels": [0, 1]}, r"labels \[2\] and .*: need \[4\]"),
        ({"poses": torch.zeros(4, 2), "labels": [0, 1, 3, 3]}, r"labels=\[0, 1, 3\]: need 0 to 2"),
    ],
)
def test_pictures_that_cannot_be_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _module().sample_images(4, **options)
