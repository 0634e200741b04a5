from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from lit_data.synthesis import DefectPlan, DefectSpec, sample_plan
from lit_data.synthesis.canvas import Canvas
from lit_data.synthesis.renderer import annotate, draw
from lit_data.synthesis.windows import Surroundings
from tests.synthesis.placing import (
    BATCHES,
    GREY,
    NAMES,
    RANGES,
    as_dtype,
    drawn,
    many,
    only,
    plan_of,
    scene,
    see_slowly,
)

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


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
    np.testing.assert_array_equal(found.labels.numpy(), labels)
    np.testing.assert_allclose(found.change.numpy(), change, atol=1e-6)
    tensors = plan.to("cpu")
    noise = Surroundings(Canvas(images, GREY), tensors.row, tensors.y, tensors.x).noise
    torch.testing.assert_close(found.severity, found.change / noise)
    np.testing.assert_array_equal(images.numpy(), grey)


@pytest.mark.parametrize(("name", "kind"), list(zip(NAMES, cycle(RANGES), strict=False)))
def test_labels_of_single_true_defects_are_the_mask(name: str, kind: str) -> None:
    shape, values = (3, 40, 40), RANGES[kind][1]
    images, plan = as_dtype(scene(20, shape), kind), plan_of(only(name), 20, shape)
    labels = annotate(images, plan, values).labels
    masks = torch.zeros(20, 1, 40, 40, dtype=torch.uint8)
    draw(images, masks, plan, values)
    assert torch.equal(labels[:, :1] > 0, masks.bool())
    assert not labels[:, 1:].any()


def test_nothing_to_annotate() -> None:
    plan = sample_plan(DefectSpec(probability=0), 0, 0, [0], (3, 8, 8))
    found = annotate(torch.zeros(1, 3, 8, 8), plan, RANGES["float32"][1])
    assert not found.labels.any()
    assert len(found.change) == len(found.severity) == 0
