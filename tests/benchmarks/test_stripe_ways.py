"""The ways in which people make stripe samples give the samples of `PatchDataset`."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.stripe_ways import make_stripe_ways
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
            synthesis=DENSE,
            **options,
        )
        return opened(datamodule)

    return build


def _read(way: Any, epoch: int) -> Batch:
    way.set_epoch(epoch)
    return next(iter(DataLoader(way, batch_size=len(way))))


def _read_ours(datamodule: StripeDataModule, epoch: int, *, finished: bool = True) -> Batch:
    dataset = datamodule.dataset("train")
    options = LoaderOptions(batch_size=len(dataset), worker_kind="inline")
    loader = MicroBatchLoader(dataset, options, shuffle=True)
    loader.set_epoch(epoch)
    batch = next(iter(loader))
    batch = datamodule.transform(batch, "train") if finished else batch
    order = batch["index"].argsort()
    return {key: value[order] for key, value in batch.items()}


@pytest.mark.parametrize(
    "options", LAYOUTS, ids=lambda options: "-".join([options["layout"], *list(options)[1:]])
)
def test_both_give_the_samples_of_the_stripe_dataset(options: dict[str, Any], make: Make) -> None:
    datamodule = make(**options)
    ours = _read_ours(datamodule, epoch=3)
    assert ours["mask"].any()
    for way in make_stripe_ways(datamodule, "train"):
        theirs = _read(pickle.loads(pickle.dumps(way)), epoch=3)  # as a worker has it
        assert theirs.keys() == ours.keys()
        for key in ("index", "image_index", "position", "epoch", "mask"):
            assert torch.equal(theirs[key], ours[key]), key
        assert theirs["image"].dtype == torch.float32
        # Each of several overlapping defects adds whole grey levels in ours.
        assert (theirs["image"] - ours["image"]).abs().max() <= 2 / 255


def test_stripes_of_one_image_have_no_such_ways(make: Make) -> None:
    datamodule = make(layout="single")
    with pytest.raises(ConfigError, match="stripes with plain spots alone"):
        make_stripe_ways(datamodule, "train")
    assert len(make_stripe_ways(datamodule, "train", finished=False)) == 2
