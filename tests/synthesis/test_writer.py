import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from lit_data.core.value_range import ValueRange
from lit_data.synthesis import FAMILIES, DefectSpec, render, sample_plan
from lit_data.synthesis.writer import DefectWriter

GREY = ValueRange(0, 255, whole=True)


@pytest.mark.usefixtures("small_runs_are_fast")
@pytest.mark.parametrize(
    ("names", "rows"), [(("spot",), 1), (("scratch", "blur"), 2), (tuple(FAMILIES), 7)]
)
def test_workers_draw_what_the_device_draws(names: tuple[str, ...], rows: int) -> None:
    spec = DefectSpec(probability=1, families={name: {} for name in names})
    images = np.random.default_rng(0).integers(0, 256, (rows, 3, 40, 32)).astype(np.uint8)
    index, masks = np.arange(rows) * 5 + 2, np.full((rows, 1, 40, 32), 9, np.uint8)
    plan = sample_plan(spec, 3, 4, index, (3, 40, 32))
    expected, marks = render(torch.from_numpy(images.astype(np.float32)), plan, GREY)
    DefectWriter(spec, 3, GREY).write_into({"image": images, "mask": masks}, index, epoch=4)
    assert_array_equal(images, expected.numpy())
    assert_array_equal(masks, marks.numpy())
