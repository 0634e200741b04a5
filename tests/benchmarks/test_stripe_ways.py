"""The ways in which people make stripe samples cut the patches of `PatchDataset` and draw spots."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.stripe_ways import PlainStripes, make_stripe_ways
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch
from lit_data.datamodules import StripeDataModule
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.synthesis import DefectSpec, SpotShape
from tests.helpers.reading import opened

Make = Callable[..., StripeDataModule]

# Dense, large and strong, so that defects overlap, cross edges and saturate.
SHAPES = (
    SpotShape(height_px=3, width_px=5, sigma_y_px=1.0, sigma_x_px=1.5),
    SpotShape(height_px=14, width_px=9, sigma_y_px=4.0, sigma_x_px=2.5),
)
DENSE = DefectSpec(
    probability=0.9,
    count=(4, 12),
    true_count=(1, 6),
    amplitude=(0.05, 0.9),
    families={"spot": {"shapes": SHAPES}},
)

LAYOUTS = [
    {"layout": "channels"},
    {"layout": "channels", "channels": (2, 0, 1), "edges": "pad"},
    {"layout": "channels", "read_depth": np.uint16, "value_range": (10_000, 50_000)},
    {"layout": "files", "files": {"target": "*_a.png", "ref1": "*_b.png", "ref2": "*_c.png"}},
    {"layout": "pairs", "files": {"target": "*_a.png", "ref1": "*_b.png"}},
]


def _write(folder: Path, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    depth = options.pop("read_depth", np.uint8)
    folder.mkdir(parents=True)
    for number in range(6):
        shape = (60 + 3 * number, 50)
        grey = rng.integers(0, np.iinfo(depth).max, (3, *shape), dtype=depth, endpoint=True)
        if options["layout"] in ("files", "pairs"):
            for letter, pixels in zip("abc", grey, strict=True):
                cv2.imwrite(str(folder / f"{number}_{letter}.png"), pixels)
        else:
            pixels = grey[0] if options["layout"] == "single" else cv2.merge(grey)
            cv2.imwrite(str(folder / f"{number}.png"), pixels)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(**options: Any) -> StripeDataModule:
        _write(tmp_path / "images", options)
        datamodule = StripeDataModule(
            str(tmp_path / "images"),
            cache_dir=str(tmp_path / "cache"),
            loader=LoaderOptions(batch_size=5, num_workers=0, seed=7),
            patch_px=32,
            stride_px=24,
            **({"synthesis": DENSE} | options),
        )
        return opened(datamodule)

    return build


@pytest.mark.parametrize(
    "options", LAYOUTS, ids=lambda options: "-".join([options["layout"], *list(options)[1:]])
)
def test_both_cut_the_patches_of_the_stripe_dataset(options: dict[str, Any], make: Make) -> None:
    datamodule = make(**options, synthesis=DefectSpec(probability=0.0))
    dataset = datamodule.dataset("train")
    loader_options = LoaderOptions(batch_size=len(dataset), worker_kind="inline")
    loader = MicroBatchLoader(dataset, loader_options, shuffle=False)
    batch = next(iter(loader))
    stored = batch["image"][batch["index"].argsort()]
    unit = datamodule.transform(batch, "train")["image"][batch["index"].argsort()]
    for finished, expected in ((False, stored), (True, unit)):
        for way in make_stripe_ways(datamodule, "train", finished=finished):
            image = _read(way)["image"]
            assert image.dtype == expected.dtype
            assert torch.allclose(image.double(), expected.double(), atol=1e-6)


def test_both_draw_spots_of_which_the_mask_shows_those_of_the_target(make: Make) -> None:
    datamodule = make(layout="channels")
    clean, _ = make_stripe_ways(datamodule, "train", finished=False)
    before = _read(clean)["image"].float() / 255
    for way in make_stripe_ways(datamodule, "train"):
        batch = _read(way)
        is_changed = (batch["image"] - before).abs() > 1e-3
        mask = batch["mask"] > 0
        assert 0.5 < mask.flatten(1).any(1).float().mean() <= 1
        # A few marked pixels change little, or had the largest value before.
        assert is_changed[:, :1][mask].float().mean() > 0.8
        assert is_changed[:, 1:].any()
        assert is_changed.float().mean() < 0.6


def _read(way: PlainStripes) -> Batch:
    way.warm_up()
    way = pickle.loads(pickle.dumps(way))  # as a worker has it
    return next(iter(DataLoader(way, batch_size=len(way))))


def test_stripes_of_one_image_have_no_such_ways(make: Make) -> None:
    datamodule = make(layout="single")
    with pytest.raises(ConfigError, match="stripes with plain spots alone"):
        make_stripe_ways(datamodule, "train")
    assert len(make_stripe_ways(datamodule, "train", finished=False)) == 2
