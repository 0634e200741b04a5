from typing import Any

import numpy as np
import pytest
import torch
from kornia.geometry.transform import warp_perspective
from torch import Tensor
from torch.testing import assert_close

from lit_data.augment import Geometry, Layers, Photometry, Pipeline
from lit_data.augment.boxes import BoxLimits, box_corners, hull_boxes
from lit_data.augment.geometry import Moves, compose
from lit_data.core.errors import ConfigError

BENT = {"rotate_deg": 20, "scale": (0.8, 1.2), "shear_deg": 8, "perspective": 0.1}


def _images(batch: int, channels: int, height: int, width: int) -> Tensor:
    return torch.rand(batch, channels, height, width, generator=torch.Generator().manual_seed(0))


def _run(geometry: Geometry, layers: Layers, *, epoch: int = 0) -> Layers:
    return geometry(
        layers, geometry.draw(0, epoch, np.arange(len(layers.images)), layers.images.shape[1])
    )


def _cut(image: Tensor, crop: tuple[int, int]) -> Tensor:
    top, left = (image.shape[1] - crop[0]) // 2, (image.shape[2] - crop[1]) // 2
    return image[:, top : top + crop[0], left : left + crop[1]]


@pytest.mark.parametrize(
    ("size", "crop", "turns"),
    [((9, 9), None, 4), ((8, 12), None, 2), ((12, 7), None, 2), ((8, 12), (8, 8), 4), ((13, 8), (5, 8), 4),
     ((13, 8), (6, 7), 4), ((8, 12), (4, 10), 2)],
)  # fmt: skip
def test_turns_equal_torch(size: tuple[int, int], crop: tuple[int, int] | None, turns: int) -> None:
    images = _images(48, 2, *size)
    moved = _run(Geometry(turn=True, crop_px=crop), Layers(images)).images
    seen = set()
    for image, result in zip(images, moved, strict=True):
        # Torch turns against the clock, and y points down: its third turn is our first.
        turned = {n: _cut(torch.rot90(image, -n, (1, 2)), crop or size) for n in range(4)}
        matches = [
            n
            for n, other in turned.items()
            if other.shape == result.shape and torch.equal(other, result)
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == set(range(0, 4, 4 // turns))


@pytest.mark.parametrize(("left_right", "top_bottom"), [(True, False), (False, True)])
def test_flips_are_chosen_one_by_one(left_right: bool, top_bottom: bool) -> None:
    images = _images(16, 1, 5, 7)
    moved = _run(
        Geometry(flip_left_right=left_right, flip_top_bottom=top_bottom), Layers(images)
    ).images
    flipped = images.flip(3 if left_right else 2)
    stayed = [torch.equal(a, b) for a, b in zip(moved, images, strict=True)]
    assert 0 < sum(stayed) < 16
    assert all(
        torch.equal(moved[n], (images if stays else flipped)[n]) for n, stays in enumerate(stayed)
    )


def test_a_geometry_that_is_off_is_a_centre_crop_of_the_same_memory() -> None:
    layers = Layers(_images(3, 3, 10, 13), torch.arange(3 * 130).view(3, 1, 10, 13))
    assert _run(Geometry(), layers) is layers
    cropped = _run(Geometry(crop_px=(6, 5)), layers)
    assert layers.masks is not None
    assert cropped.masks is not None
    assert torch.equal(cropped.images, layers.images[..., 2:8, 4:9])
    assert torch.equal(cropped.masks, layers.masks[..., 2:8, 4:9])
    assert cropped.images.untyped_storage().data_ptr() == layers.images.untyped_storage().data_ptr()


@pytest.mark.parametrize("values", [[0.0, 1.0], [0, 255], list(range(8))])
@pytest.mark.parametrize("options", [{"flip_left_right": True, "turn": True, "shift_px": 3}, BENT])
def test_masks_keep_values_and_follow_images(options: dict[str, Any], values: list[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, len(values), (20, 1, 4, 4), generator=generator).repeat_interleave(
        8, 2
    )
    masks = torch.tensor(values)[chosen.repeat_interleave(8, 3)]
    images = masks.float() / max(values)
    moved = _run(Geometry(**options, crop_px=24), Layers(images.expand(-1, 3, -1, -1), masks))
    assert moved.masks is not None
    assert moved.masks.dtype == masks.dtype
    assert set(moved.masks.unique().tolist()) == set(values)
    assert torch.equal(moved.images[:, 0], moved.images[:, 2])
    # Inside a block both are the same value; bilinear edges between blocks are not.
    same = (moved.images[:, :1] - moved.masks.float() / max(values)).abs() < 1e-4
    assert same.float().mean() > 0.6


@pytest.mark.parametrize("crop", [None, (10, 14)])
def test_bent_images_are_those_of_kornia(crop: tuple[int, int] | None) -> None:
    geometry = Geometry(**BENT, flip_left_right=True, turn=True, shift_px=1.5, subpixel=True, padding="zeros",
                        crop_px=crop)  # fmt: skip
    images = _images(6, 3, 18, 16)
    draws = geometry.draw(3, 1, np.arange(6), 3)
    size = crop or (18, 16)
    matrix = compose(Moves.unpack(draws["augment_geometry"]), (18, 16), size)
    expected = warp_perspective(images, matrix, size, padding_mode="zeros", align_corners=True)
    assert_close(geometry(Layers(images), draws).images, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("crop", [None, 48])
@pytest.mark.parametrize(
    "options",
    [{"flip_left_right": True, "flip_top_bottom": True, "turn": True, "shift_px": 9},
     {"rotate_deg": 25, "scale": (0.7, 1.3)}, {**BENT, "turn": True, "flip_top_bottom": True}, {}],
)  # fmt: skip
def test_boxes_surround_what_they_surrounded(options: dict[str, Any], crop: int | None) -> None:
    generator = np.random.default_rng(0)
    images, boxes = torch.zeros(60, 1, 64, 72), []
    for row in range(60):
        height, width = generator.integers(8, 24, 2)
        top, left = generator.integers(0, 64 - height), generator.integers(0, 72 - width)
        images[row, 0, top : top + height, left : left + width] = 1
        centre = [(left + width / 2) / 72, (top + height / 2) / 64]
        boxes.append([row, row % 3, *centre, width / 72, height / 64])
    geometry = Geometry(**options, crop_px=crop, padding="zeros", min_box_px=1, min_box_visible=0)
    moved = _run(geometry, Layers(images, images, torch.tensor(boxes, dtype=torch.float32)))
    assert moved.boxes is not None
    size = torch.tensor(moved.size_px[::-1])
    compared = 0
    for row, label, *shares in moved.boxes.tolist():
        assert label == row % 3
        centre, sides = torch.tensor(shares).view(2, 2) * size
        low, high = centre - sides / 2, centre + sides / 2
        # The hull of a rotated box that is cut may be larger than what is left of the box.
        if geometry.moves_whole_pixels or ((low > 0) & (high < size)).all():
            places = torch.nonzero(moved.images[int(row), 0] > 0.25).flip(1)
            assert (low - places.amin(dim=0)).abs().max() <= 1
            assert (high - places.amax(dim=0) - 1).abs().max() <= 1
            compared += 1
    assert compared > 15
    gone = sorted(set(range(60)) - set(moved.boxes[:, 0].int().tolist()))
    assert (moved.images[gone] > 0.5).sum(dim=(1, 2, 3)).max() < 30 if gone else True


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scale": (0.0, 1.0)}, r"scale=\[0.0, 1.0\] must be \[low, high\] with 0 < low <= high"),
        ({"scale": (1.2, 1.1)}, "0 < low <= high"),
        ({"scale": (1.0,)}, "0 < low <= high"),
        ({"shift_px": -1}, "need shift_px >= 0"),
        ({"shift_px": 1.5}, "shift_px=1.5 is not whole: set subpixel=true"),
        ({"rotate_deg": 181}, "0 <= rotate_deg <= 180"),
        ({"shear_deg": 41}, "shear_deg=41 must be between 0 and 40"),
        ({"perspective": 0.31}, "perspective=0.31 must be between 0 and 0.3"),
        ({"padding": "mirror"}, "padding='mirror' is unknown: choose one of reflect, zeros"),
        ({"crop_px": 0}, "crop_px=0 is not usable"),
        ({"min_box_visible": 2}, "a fraction 0..1"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Geometry(**options)


def test_a_crop_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"crop_px=\(9, 4\) is larger than the images of 8 x 8"):
        _run(Geometry(crop_px=(9, 4)), Layers(_images(1, 1, 8, 8)))


@pytest.mark.parametrize(
    ("options", "patch", "margin"),
    [
        ({}, (64, 32), (0, 0)),
        ({"flip_left_right": True, "flip_top_bottom": True}, (64, 32), (0, 0)),
        ({"turn": True}, (64, 64), (0, 0)),
        ({"shift_px": 4}, (64, 32), (4, 4)),
        ({"shift_px": 2.5, "subpixel": True}, (64, 32), (3, 3)),
        ({"scale": (0.5, 2.0)}, (65, 33), (32, 16)),
        ({"scale": (1.0, 2.0)}, (65, 33), (0, 0)),
        ({"rotate_deg": 45}, (101, 101), (21, 21)),  # 50 * (sqrt(2) - 1) = 20.7
        ({"rotate_deg": 180}, (101, 101), (21, 21)),
        ({"rotate_deg": 180}, (81, 61), (10, 20)),  # the diagonal: 50
        # large enough to be turned: 4 more than half of 64
        ({"turn": True, "shift_px": 4}, (64, 58), (4, 7)),
        ({"turn": True, "shift_px": 1}, (64, 58), (1, 1)),  # not large enough
    ],
)
def test_margins(options: dict[str, Any], patch: tuple[int, int], margin: tuple[int, int]) -> None:
    geometry = Geometry(**options)
    assert geometry.margin_px(patch) == margin
    assert Pipeline([geometry, Photometry(gain=0.1)]).margin_px(patch) == margin


@pytest.mark.parametrize("patch", [(16, 16), (12, 25), (20, 18)])
@pytest.mark.parametrize(
    "options",
    [
        {"rotate_deg": 10, "scale": (0.8, 1.2)},
        {"turn": True, "rotate_deg": 30, "shift_px": 2},
        {"shear_deg": 15, "rotate_deg": 5},
        {"perspective": 0.2, "shift_px": 1.5, "subpixel": True},
        {"perspective": 0.1, "rotate_deg": 20, "shear_deg": 10, "scale": (0.9, 1.1), "turn": True},
    ],
)
def test_a_margin_hides_what_is_outside(options: dict[str, Any], patch: tuple[int, int]) -> None:
    geometry = Geometry(**options, crop_px=patch, padding="zeros")
    down, across = geometry.margin_px(patch)
    images = torch.ones(400, 1, patch[0] + 2 * down, patch[1] + 2 * across)
    moved = geometry(Layers(images), geometry.draw(0, 0, np.arange(400), 1)).images
    assert moved.min() > 1 - 1e-3
    tight = torch.ones(400, 1, *patch)
    assert geometry(Layers(tight), geometry.draw(0, 0, np.arange(400), 1)).images.min() < 0.9


def test_a_perspective_that_reaches_the_horizon_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"perspective=0\.3 with shift_px=16 reaches the horizon of a patch of 8 x 8",
    ):
        Geometry(perspective=0.3, shift_px=16).margin_px((8, 8))


ANY = BoxLimits(min_px=0, min_visible=0)


def _to_boxes(
    *edges: tuple[float, float, float, float], size: tuple[int, int] = (10, 20)
) -> Tensor:
    """From (left, top, right, bottom) in px between pixels."""
    height, width = size
    rows = [
        (n, 7, (x0 + x1) / 2 / width, (y0 + y1) / 2 / height, (x1 - x0) / width, (y1 - y0) / height)
        for n, (x0, y0, x1, y1) in enumerate(edges)
    ]
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (ANY, [0, 1, 2]),
        (BoxLimits(min_px=2, min_visible=0), [0, 1]),
        (BoxLimits(min_px=0, min_visible=0.5), [0, 2]),
        (BoxLimits(min_px=0, min_visible=0.4), [0, 1, 2]),
    ],
)
def test_small_and_hidden_boxes_are_left_out(limits: BoxLimits, kept: list[int]) -> None:
    boxes = _to_boxes((5, 2, 8, 8), (-6, 2, 4, 8), (9, 2, 10, 8), (21, 2, 25, 8))
    assert hull_boxes(boxes, box_corners(boxes, (10, 20)), (10, 20), limits)[:, 0].tolist() == kept
