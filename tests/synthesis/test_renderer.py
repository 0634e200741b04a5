import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor
from torch.testing import assert_close

from lit_data.core.value_range import ValueRange
from lit_data.synthesis import DefectPlan, DefectSpec, SpotShape, render, sample_plan
from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.renderer import annotate, draw, split_windows
from lit_data.synthesis.windows import Surroundings
from lit_data.synthesis.writer import draw_spots
from tests.synthesis.placing import (
    BATCHES,
    GREY,
    NAMES,
    RANGES,
    as_dtype,
    drawn,
    many,
    move,
    only,
    plan_of,
    scene,
    see_slowly,
    turn_around,
)

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

SPOTS = (
    SpotShape(height_px=3, width_px=3, sigma_y_px=1.0, sigma_x_px=1.0),
    SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
    SpotShape(height_px=4, width_px=2, sigma_y_px=2.0, sigma_x_px=0.7),
)
ONE = DefectSpec(families={"spot": {"shapes": SPOTS}})

# Drawn by the release that knew spots alone.
GOLDEN_PIXELS = "e5433744e4a55c588d33cffd568b69f0ec3e7844303cd3dac2211bf512ccf9ad"


def _one(
    y: float, x: float, spot: int = 0, channels: tuple[bool, ...] = (True, False, False)
) -> DefectPlan:
    some = sample_plan(replace(ONE, probability=1.0), 0, 0, [0], (3, 64, 64))
    return replace(
        some.select(np.arange(len(some)) == 0),
        y=np.array([y], np.float32),
        x=np.array([x], np.float32),
        amplitude=np.array([0.25], np.float32),
        channels=np.array([channels]),
        is_true=np.array([channels == (True, False, False)]),
        values=np.full((1, 8), spot, np.float32),
    )


def _windows(plan: DefectPlan, batch: int, shape: tuple[int, int, int]) -> np.ndarray:
    """[B, C, H, W], whether a pixel lies in the window of a defect that its channel carries."""
    covered = np.zeros((batch, *shape), bool)
    for group in plan.groups:
        for n in range(group.start, group.stop):
            top = int(np.floor(plan.y[n] + 0.5)) - (group.height_px - 1) // 2
            left = int(np.floor(plan.x[n] + 0.5)) - (group.width_px - 1) // 2
            bottom, right = max(top + group.height_px, 0), max(left + group.width_px, 0)
            box = slice(max(top, 0), bottom), slice(max(left, 0), right)
            covered[plan.row[n], plan.channels[n], *box] = True
    return covered


def _draw(images: Tensor, plan: DefectPlan, kind: str) -> tuple[Tensor, Tensor]:
    images = images.clone()
    masks = torch.zeros(len(images), 1, *images.shape[2:], dtype=torch.uint8)
    draw(images, masks, plan, RANGES[kind][1])
    return images, masks


def test_spots_are_those_of_earlier_releases() -> None:
    spec = DefectSpec(probability=1.0, amplitude=(0.05, 0.9), families={"spot": {"shapes": SPOTS}})
    plan = sample_plan(spec, 7, 3, np.arange(64), (3, 40, 56))
    pixels = (np.arange(64 * 3 * 40 * 56, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8)
    before = torch.from_numpy(pixels.reshape(64, 3, 40, 56).astype(np.float32))
    after = [part.to(torch.uint8).numpy().tobytes() for part in render(before, plan, GREY)]
    assert hashlib.sha256(b"".join(after)).hexdigest() == GOLDEN_PIXELS


@pytest.mark.parametrize(
    ("level", "amplitude"), [(0.0, -0.25), (1.0, 0.25), (0.1, -0.25), (0.5, -0.25)]
)
def test_a_defect_can_be_seen_on_black_and_on_white(level: float, amplitude: float) -> None:
    plan = replace(_one(5, 5), amplitude=np.array([amplitude], np.float32))
    image, mask = render(torch.full((1, 3, 10, 10), level), plan)
    assert abs(float(image[0, 0, 5, 5]) - level) == pytest.approx(0.25)
    assert ((image[:, :1] != level) == mask.bool()).all()


@pytest.mark.parametrize(
    ("number", "kind"), [(0, "uint8"), (1, "uint16"), (2, "float32"), (3, "uint8")]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_does_not_depend_on_its_batch(name: str, number: int, kind: str) -> None:
    batch, shape = BATCHES[number]
    spec, index = many(name, contrast=(3, 12), count=(1, 3)), np.arange(batch)
    images = as_dtype(scene(batch, shape), kind)
    together = _draw(images, sample_plan(spec, 3, 1, index, shape), kind)
    assert not torch.equal(together[0].float(), images.float())
    for part in (slice(0, 1), slice(1, 3), slice(3, None)):
        if len(images[part]):
            alone = _draw(images[part], sample_plan(spec, 3, 1, index[part], shape), kind)
            assert torch.equal(alone[0], together[0][part])
            assert torch.equal(alone[1], together[1][part])


@pytest.mark.parametrize(
    ("number", "kind"), [(0, "uint16"), (1, "uint8"), (2, "uint8"), (3, "uint16")]
)
@pytest.mark.parametrize("name", NAMES)
def test_stored_pixels_are_drawn_as_floats_are(name: str, number: int, kind: str) -> None:
    batch, shape = BATCHES[number]
    plan = plan_of(many(name, count=(1, 3)), batch, shape)
    images = as_dtype(scene(batch, shape), kind)
    stored, marks = _draw(images, plan, kind)
    floats, masks = render(images.to(torch.float32), plan, RANGES[kind][1])
    assert torch.equal(stored.to(torch.float32), floats)
    assert torch.equal(marks.to(torch.float32), masks)


@pytest.mark.parametrize(("batch", "shape"), BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_changes_outside_of_windows(
    name: str, batch: int, shape: tuple[int, int, int]
) -> None:
    plan = plan_of(many(name, count=(1, 3)), batch, shape)
    changes, masks = drawn(scene(batch, shape), plan)
    windows = _windows(plan, batch, shape)
    assert not changes[~windows].any()
    assert not masks[~_windows(plan.select(plan.is_true), batch, shape)[:, 0]].any()


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("name", NAMES)
def test_the_mask_is_what_changes_visibly(name: str, kind: str) -> None:
    shape, values = (3, 48, 40), RANGES[kind][1]
    images = as_dtype(scene(20, shape), kind)
    plan = plan_of(only(name, amplitude=(0.02, 0.2)), 20, shape)
    after, masks = _draw(images, plan, kind)
    change = (after.to(torch.float32) - images.to(torch.float32)).abs().div(values.scale)
    marked = masks[:, 0].bool()
    # What a spot marks is its window, where other things than its strength are left of it.
    if name == "spot":
        assert (marked >= (change[:, 0] > 0)).all()
    else:
        seen = torch.from_numpy(see_slowly(images, plan, change.numpy(), values))
        assert torch.equal(marked, seen[:, 0])
    assert masks.any()


@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_defects_add_up_in_any_order(name: str) -> None:
    shape, families = (3, 24, 24), NAMES if name == "all" else (name,)
    plan = plan_of(
        many(*families, amplitude=(0.02, 0.04), count=(5, 6), true_count=(2, 4)), 4, shape
    )
    grey = scene(4, shape)
    changes, masks = drawn(grey, plan)
    backwards = drawn(grey, turn_around(plan))
    assert_array_equal(backwards[0], changes)
    assert_array_equal(backwards[1], masks)
    apart = [drawn(grey, plan.select(np.arange(len(plan)) == n)) for n in range(len(plan))]
    total = np.clip(grey + np.sum([change for change, _ in apart], axis=0), 0, 255) - grey
    # Only a defect that is cut by the range alone may add more beside others.
    assert_array_equal(changes[np.abs(total) < 40], total[np.abs(total) < 40])
    assert_array_equal(masks, np.any([mask for _, mask in apart], axis=0))


def test_nothing_random_happens_and_inference_mode_and_threads_draw_the_same() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002 - it is tested
    shape = (3, 40, 40)
    grey, plans = scene(16, shape), [plan_of(many(), 16, shape, seed) for seed in range(4)]
    with torch.inference_mode():
        first = [drawn(grey, plan) for plan in plans]
    expected = [drawn(grey, plan) for plan in plans]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda plan: drawn(grey, plan), plans * 2))
    for found in (first, together[:4], together[4:]):
        for one, other in zip(found, expected, strict=True):
            assert_array_equal(one[0], other[0])
            assert_array_equal(one[1], other[1])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert random.getstate() == before[2]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "line"])
@pytest.mark.parametrize(("y", "x"), [(0, 0), (91.25, 95), (-2.5, 40), (40, -3)])
def test_beyond_its_edges_an_image_is_mirrored(name: str, y: float, x: float) -> None:
    """Drawn over an edge is drawn in the middle of the mirrored image, and cut."""
    pad, shape = 80, (3, 92, 96)
    grey = scene(6, shape)
    plan = move(plan_of(only(name), 6, shape), y, x)
    inner = replace(plan, y=plan.y + np.float32(pad), x=plan.x + np.float32(pad))
    if name == "texture":  # its places are counted from the corner of the image
        values = plan.values.copy()
        values[:, 5:7] = (values[:, 5:7] - pad / 256) % 1
        inner = replace(inner, values=values)
    changes, masks = drawn(
        np.pad(grey, ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="reflect"), inner
    )
    inside = (..., slice(pad, pad + shape[1]), slice(pad, pad + shape[2]))
    at_edge = drawn(grey, plan)
    assert_array_equal(at_edge[0], changes[inside])
    # Whether a pixel at the edge stands out is told with fewer neighbours.
    told = (..., slice(1, -1), slice(1, -1)) if plan.spec.members[0].replaces else ...
    assert_array_equal(at_edge[1][told], masks[inside][told])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_the_device_draws_what_the_cpu_draws(name: str, kind: str) -> None:
    shape, values = (3, 64, 64), RANGES[kind][1]
    spec = many(*(NAMES if name == "all" else (name,)))
    plan, images = plan_of(spec, 32, shape), as_dtype(scene(32, shape), kind).to(torch.float32)
    after, masks = render(images.clone(), plan, values)
    on_device, marks = (tensor.cpu() for tensor in render(images.cuda(), plan, values))
    assert_close(on_device, after, rtol=0, atol=values.scale / 255)
    assert (
        marks != masks
    ).float().mean() < 1e-3  # where a change is as large as what a mask wants, to a rounding


SPEC = DefectSpec(
    probability=0.8,
    count=(2, 5),
    amplitude=(0.05, 0.9),
    families={
        "spot": {
            "shapes": (
                SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
                SpotShape(height_px=14, width_px=9, sigma_y_px=4.0, sigma_x_px=2.5),
            )
        }
    },
)


@pytest.mark.parametrize("subpixel", [True, False])
@pytest.mark.parametrize(
    ("number", "dtype", "values"),
    [
        (0, np.uint8, ValueRange(0, 255, whole=True)),
        (1, np.uint16, ValueRange(10_000, 50_000, whole=True)),
        (2, np.int16, ValueRange(-900.5, 1000, whole=True)),
        (3, np.uint8, ValueRange(20.5, 200.25, whole=True)),
    ],
)
def test_spots_are_drawn_as_the_renderer_draws_them(
    number: int, dtype: type, values: ValueRange, subpixel: bool
) -> None:
    (batch, shape), limits, rng = BATCHES[number], np.iinfo(dtype), np.random.default_rng(0)
    images = rng.integers(limits.min, limits.max, (batch, *shape), dtype, endpoint=True)
    plan = sample_plan(replace(SPEC, subpixel=subpixel), 5, 1, np.arange(batch), shape)
    pixels, masks = images.copy(), np.zeros((batch, 1, *shape[1:]), np.uint8)
    draw_spots(pixels, masks, plan, values)
    expected, marks = torch.from_numpy(images.copy()), torch.zeros(masks.shape, dtype=torch.uint8)
    draw(expected, marks, plan, values)
    assert_array_equal(pixels, expected.numpy())
    assert_array_equal(masks, marks.numpy())


def _annotate_slowly(grey: np.ndarray, plan: DefectPlan) -> tuple[np.ndarray, np.ndarray]:
    """What each defect changes when it is drawn alone: labels [B, C, H, W] and mean change [N]."""
    labels, change = np.zeros(grey.shape, np.int32), np.zeros(len(plan), np.float32)
    rows = np.arange(len(grey))[:, None, None, None]
    for n in range(len(plan)):
        alone = plan.select(np.arange(len(plan)) == n)
        changes = np.abs(drawn(grey, alone)[0])
        if plan.spec.members[plan.family[n]].marks_all:
            # As a true defect of the target alone it marks itself; spots mark pixels that do not
            # change, too.
            true, all_channels = np.ones(1, bool), np.ones_like(alone.channels)
            seen = drawn(grey, replace(alone, is_true=true, channels=all_channels))[1][:, None]
        else:
            images = torch.from_numpy(grey.copy())
            seen = see_slowly(images, alone, (changes / 255).astype(np.float32), GREY)
        shows = seen & (rows == plan.row[n]) & plan.channels[n][:, None, None]
        labels[shows] = n + 1
        change[n] = changes[shows].mean() / 255 if shows.any() else 0
    return labels, change


@pytest.mark.parametrize(
    ("name", "number"), [*((name, 1) for name in NAMES), *(("all", number) for number in range(3))]
)
def test_annotations_are_what_each_defect_changes_alone(name: str, number: int) -> None:
    batch, shape = BATCHES[number]
    spec = many(*(NAMES if name == "all" else (name,)), count=(4, 6), amplitude=(0.01, 0.3))
    plan, grey = plan_of(spec, batch, shape), scene(batch, shape)
    images = torch.from_numpy(grey.copy())
    found = annotate(images, plan, GREY)
    labels, change = _annotate_slowly(grey, plan)
    assert_array_equal(found.labels.numpy(), labels)
    assert_allclose(found.change.numpy(), change, atol=1e-6)
    tensors = plan.to("cpu")
    noise = Surroundings(Canvas(images, GREY), tensors.row, tensors.y, tensors.x).noise
    assert_close(found.severity, found.change / noise)
    assert_array_equal(images.numpy(), grey)


def test_nothing_to_annotate() -> None:
    plan = sample_plan(DefectSpec(probability=0), 0, 0, [0], (3, 8, 8))
    found = annotate(torch.zeros(1, 3, 8, 8), plan, RANGES["float32"][1])
    assert not found.labels.any()
    assert len(found.change) == len(found.severity) == 0


@pytest.mark.parametrize("most_px", [1, 5000, 10**9])
def test_many_pixels_are_drawn_part_by_part(monkeypatch: pytest.MonkeyPatch, most_px: int) -> None:
    plan, grey = plan_of(many(), 20, (3, 64, 48)), scene(20, (3, 64, 48))
    expected = drawn(grey, plan)
    monkeypatch.setattr("lit_data.synthesis.renderer.CACHED_PX", most_px)
    parts = list(split_windows(plan.groups))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts)][:-1]
    several = [p for p in parts if p.stop - p.start > 1]
    assert all((p.stop - p.start) * p.height_px * p.width_px <= most_px for p in several)
    for one, other in zip(drawn(grey, plan), expected, strict=True):
        assert_array_equal(one, other)


def _peaks(plan: DefectPlan, sigma: float) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, sigma, (len(plan), 1, 64, 64))
    changes, _ = drawn(np.clip(np.rint(110 + noise), 0, 255).astype(np.uint8), plan)
    return np.asarray(np.abs(changes).max((1, 2, 3)))


@pytest.mark.parametrize("name", ["spot", "scratch", "stain", "extra_stripe", "relief"])
def test_contrast_is_counted_in_standard_deviations_of_the_noise(name: str) -> None:
    spec = replace(only(name), contrast=(5.0, 5.0), subpixel=False)
    plan = plan_of(spec, 60, (1, 64, 64))
    plan = move(plan, 32, 32)
    for sigma in (2.0, 6.0, 12.0):
        assert 0.8 < np.median(_peaks(plan, sigma)) / (5 * sigma) < 1.15
    assert np.median(_peaks(plan, 0)) in (2, 3)  # 2.55: 5 times the least noise
