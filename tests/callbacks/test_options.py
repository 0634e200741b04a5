"""Options of callbacks that are out of range."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lit_data.callbacks import (
    AMP,
    AdaptiveBatchSize,
    EmptyCache,
    GradientCheckpointing,
    ImageMetrics,
    MemoryMonitor,
    SampleImages,
)
from tests.helpers.options import assert_refused

RESIZING = partial(AdaptiveBatchSize, "resize")
WRONG: list[tuple[Callable[..., object], dict[str, Any]]] = [
    (AdaptiveBatchSize, {"mode": "cut"}),
    (AdaptiveBatchSize, {"initial_size": 0}),
    (AdaptiveBatchSize, {"min_size": 0}),
    (AdaptiveBatchSize, {"max_size": 1.5}),
    (AdaptiveBatchSize, {"grow_after": 0}),
    (AdaptiveBatchSize, {"min_size": 4, "max_size": 3}),
    (RESIZING, {"learning_rate": "cube"}),
    (RESIZING, {"grow_below": 0}),
    (RESIZING, {"shrink_above": 1.1}),
    (RESIZING, {"min_success": -1}),
    (RESIZING, {"grow_below": 0.9}),
    (RESIZING, {"grow_after": None}),
    (AMP, {"precision": "16-mixed"}),
    (AMP, {"keep_fp32": "critic"}),
    (AMP, {"init_scale": 0.0}),
    (AMP, {"init_scale": math.inf}),
    (AMP, {"growth_interval": 0}),
    (AMP, {"fall_back_after": 0}),
    (AMP, {"fall_back_to": "fp16"}),
    (EmptyCache, {"every_n_steps": 0}),
    (EmptyCache, {"after": "checkpoint"}),
    (EmptyCache, {"after": [3]}),
    (EmptyCache, {"unused_fraction": 1.0}),
    (EmptyCache, {"max_cost_fraction": 0.0}),
    (GradientCheckpointing, {"modules": "features"}),
    (GradientCheckpointing, {"modules": []}),
    (GradientCheckpointing, {"modules": [3]}),
    (ImageMetrics, {"every_n_steps": 0}),
    (ImageMetrics, {"count": 1}),
    (ImageMetrics, {"batch_size": 0}),
    (ImageMetrics, {"extractor": "vgg"}),
    (ImageMetrics, {"seed": -1}),
    (MemoryMonitor, {"every_n_steps": 0}),
    (MemoryMonitor, {"leak_bytes_per_epoch": 0}),
    (MemoryMonitor, {"leak_bytes_per_epoch": math.nan}),
    (MemoryMonitor, {"leak_bytes_per_epoch": "50 MiB"}),
    (SampleImages, {"every_n_steps": 0}),
    (SampleImages, {"count": 0}),
    (SampleImages, {"batch_size": 0}),
    (SampleImages, {"objects": 0}),
    (SampleImages, {"views": "all"}),
    (SampleImages, {"seed": -1}),
]


@pytest.mark.parametrize(("make", "options"), WRONG, ids=str)
def test_an_option_out_of_range_is_refused(
    make: Callable[..., object], options: dict[str, Any]
) -> None:
    assert_refused(make, options)
