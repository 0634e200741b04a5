from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from lit_data.core.types import Array
from lit_data.wings.watermarks import WatermarkPlan, WatermarkSpec, sample_watermarks
from lit_data.wings.watermarks.blend import Look, blend, compress, degrade
from lit_data.wings.watermarks.cover import PROBES, keep_visible, mix, probe_under
from lit_data.wings.watermarks.plan import MODES
from lit_data.wings.watermarks.sample_set import draw_photo

ONE = WatermarkSpec(probability=1, jpeg=0, opacity=(0.4, 0.4), least_change=0.1, least_contrast=0)


def _formula(mode: str, ground: Array, colour: Array) -> Array:
    """B(cb, cs) of W3C "Compositing and Blending Level 1", section 10.1."""
    if mode == "normal":
        return colour + 0 * ground
    if mode == "multiply":
        return ground * colour
    if mode == "screen":
        return 1 - (1 - ground) * (1 - colour)
    return np.where(ground <= 0.5, 2 * ground * colour, 1 - 2 * (1 - ground) * (1 - colour))


def _plan(samples: int = 1, spec: WatermarkSpec = ONE, **changed: Any) -> WatermarkPlan:
    return replace(sample_watermarks(spec, 0, 0, np.arange(samples), (8, 8)), **changed)


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_those_of_the_standard(mode: str) -> None:
    rng = np.random.default_rng(0)
    colours = rng.random((5, 3)).astype(np.float32)
    plan = _plan(5, colour=colours, mode=np.full(5, MODES.index(mode)))
    ground = rng.integers(0, 256, (5, 3, 16, 16), dtype=np.uint8)
    cover = rng.integers(0, 256, (5, 1, 16, 16), dtype=np.uint8)
    found = blend(torch.from_numpy(ground), torch.from_numpy(cover), Look.of(plan)).numpy() * 255
    exact = ground / 255.0
    alpha = 0.4 * cover / 255.0
    expected = 255 * (
        exact
        + alpha * (_formula(mode, exact, colours[:, :, None, None].astype(np.float64)) - exact)
    )
    assert np.abs(found - expected).max() <= 0.501
    assert_allclose(found, np.rint(found), atol=1e-4)


def test_only_covered_pixels_change_and_a_white_mark_on_black_is_its_own_alpha() -> None:
    cover = np.zeros((1, 1, 8, 8), np.uint8)
    cover[0, 0, 2:5, 3:6] = 200
    plan = _plan(colour=np.ones((1, 3), np.float32), mode=np.zeros(1, np.int64))
    for level in (0, 30, 255):
        ground = torch.full((1, 3, 8, 8), level, dtype=torch.uint8)
        changed = blend(ground, torch.from_numpy(cover), Look.of(plan)) - torch.div(ground, 255.0)
        assert torch.equal(
            changed != 0, torch.from_numpy(cover).expand(1, 3, 8, 8) * (level < 255) > 0
        )
        if not level:
            assert_allclose(changed[0, :1].numpy(), 0.4 * cover[0] / 255.0, atol=0.5 / 255)


def test_samples_are_blended_and_compressed_as_if_they_were_alone() -> None:
    spec = WatermarkSpec(jpeg=0.5)
    rng = np.random.default_rng(1)
    plan = sample_watermarks(spec, 0, 0, np.arange(7), (40, 33))
    assert 0 < np.count_nonzero(plan.quality) < 7
    ground, cover = (
        torch.from_numpy(rng.integers(0, 256, (7, c, 40, 33), dtype=np.uint8)) for c in (3, 1)
    )
    whole = degrade(blend(ground, cover, Look.of(plan)), Look.of(plan))
    for row in range(7):
        own = Look.of(sample_watermarks(spec, 0, 0, np.array([row]), (40, 33)))
        part = slice(row, row + 1)
        assert torch.equal(degrade(blend(ground[part], cover[part], own), own)[0], whole[row])
    same = torch.from_numpy(plan.quality == 0)
    assert torch.equal(whole[same], blend(ground, cover, Look.of(plan))[same])


@pytest.mark.parametrize(
    ("ground", "colour", "mode", "expected"),
    [
        (1.0, 1.0, "normal", (0.0, "normal")),  # white on white becomes black
        (1.0, 0.2, "screen", (0.0, "normal")),
        (0.0, 0.7, "multiply", (1.0, "normal")),
        (0.0, 0.7, "overlay", (1.0, "normal")),  # overlay leaves black and white as they are
        (1.0, 0.3, "normal", (0.3, "normal")),  # is seen
        (0.6, 0.1, "overlay", (0.1, "overlay")),
        # half of it black, half white: only grey is seen on both
        ((0.0, 1.0), 0.0, "normal", (0.5, "normal")),
    ],
)
def test_marks_that_could_not_be_seen_are_painted_otherwise(
    ground: Any, colour: float, mode: str, expected: tuple[float, str]
) -> None:
    under = (
        np.resize(np.atleast_1d(ground) * 255, PROBES).astype(np.uint8)[None, :, None].repeat(3, 2)
    )
    plan = _plan(colour=np.full((1, 3), colour, np.float32), mode=np.array([MODES.index(mode)]))
    found = keep_visible(plan, under)
    assert found.colour[0].tolist() == pytest.approx([expected[0]] * 3)
    assert MODES[found.mode[0]] == expected[1]
    exact = under[:, :1] / np.float32(255)
    assert np.abs(mix(exact, found.colour[:, None], found.mode[:, None]) - exact).min() * 0.4 >= 0.1


def test_marks_on_rough_ground_get_more_opacity_within_its_range() -> None:
    spec = WatermarkSpec(probability=1, opacity=(0.1, 0.6), least_change=0, least_contrast=0.5)
    rough = np.resize([40, 160], PROBES).astype(np.uint8)
    under = np.stack([np.full(PROBES, 100, np.uint8), rough, rough])[..., None].repeat(3, 2)
    opacity = np.array([0.1, 0.1, 0.5], np.float32)
    plan = _plan(
        3, spec, opacity=opacity, colour=np.ones((3, 3), np.float32), mode=np.zeros(3, np.int64)
    )
    found = keep_visible(plan, under)
    change = (1 - under / 255).mean((1, 2))
    assert found.opacity[0] == opacity[0]
    assert found.opacity[1] * change[1] == pytest.approx(0.5 * rough.std() / 255, rel=1e-3)
    assert found.opacity[2] == opacity[2]
    absent = keep_visible(replace(plan, present=np.zeros(3, bool), opacity=opacity * 0), under)
    assert not absent.opacity.any()


def test_probes_lie_under_the_mark() -> None:
    images = np.zeros((2, 3, 20, 20), np.uint8)
    cover = np.zeros((2, 20, 20), np.uint8)
    cover[0, 5:9, 2:18], images[0, :, 5:9, 2:18] = 255, np.array([10, 20, 30])[:, None, None]
    found = probe_under(images, cover)
    assert (found[0] == (10, 20, 30)).all()
    assert not found[1].any()


def _photo(height_px: int = 96, width_px: int = 128) -> Array:
    return draw_photo(np.random.default_rng(2), (height_px, width_px))


def _compress(images: Array, quality: list[float]) -> Array:
    found = compress(torch.from_numpy(images).div(255), torch.tensor(quality)).numpy() * 255
    assert_allclose(found, np.rint(found), atol=1e-4)
    return np.rint(found).astype(np.int64)


@pytest.mark.parametrize("quality", [10, 40, 50, 75, 95, 100])
@pytest.mark.parametrize("size_px", [(96, 128), (57, 41)])
def test_it_does_what_a_file_does(quality: int, size_px: tuple[int, int]) -> None:
    photo = _photo(*size_px)
    pixels = np.ascontiguousarray(np.moveaxis(photo, 0, -1)[..., ::-1])
    file = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    expected = np.moveaxis(cv2.imdecode(file, cv2.IMREAD_COLOR)[..., ::-1], -1, 0).astype(np.int64)
    found = _compress(photo[None], [quality])[0]
    off, lost = np.abs(found - expected), np.abs(expected - photo).mean()
    assert off.mean() < 0.3 * lost
    assert np.median(off) <= 1
    assert np.abs(found - photo).mean() == pytest.approx(lost, rel=0.1, abs=0.1)
