"""How a predictor is set up where the options leave that open."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_data.core.types import Array, Batch
from lit_data.images import ImageBank
from lit_data.predict.maps import WholeImages
from lit_data.predict.nets import ProbabilityNet, choose_overlap_px
from lit_data.predict.options import PredictOptions
from lit_data.predict.predict import predict_images
from lit_data.wings.watermarks import WatermarkDataModule
from lit_data.wings.watermarks.predictions import MarkWriter
from tests.predict.running import make_run

CPU = torch.device("cpu")


class Files(ImageBank):
    """Black images, whose files are this one."""

    channels, dtype, skipped = 3, np.dtype("uint8"), ()

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.heights_px, self.widths_px = np.array(sizes).T

    def __len__(self) -> int:
        return len(self.heights_px)

    def __getitem__(self, number: int) -> Array:
        return np.zeros((3, self.heights_px[number], self.widths_px[number]), np.uint8)

    def name(self, number: int) -> str:
        return __file__


class Blur(LightningModule):
    """Sees some px to each side, or everything; notes the sizes of its batches."""

    def __init__(self, reach_px: int | None) -> None:
        super().__init__()
        self.reach_px = reach_px
        self.sizes = []

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        grey = batch["image"].mean(1, keepdim=True)
        self.sizes.append(tuple(batch["image"].shape))
        if self.reach_px is None:
            return {"probability": grey + 0 * grey.mean((2, 3), keepdim=True)}
        side = 2 * self.reach_px + 1
        return {"probability": nn.functional.avg_pool2d(grey, side, 1, self.reach_px)}


def _images(*sizes: tuple[int, int]) -> WholeImages:
    names = [f"{number}.png" for number in range(len(sizes))]
    return WholeImages(bank=Files(*sizes), names=names, channels=(0, 1, 2), value_range=None)


def _choose(reach_px: int | None, size: tuple[int, int], **options: Any) -> int:
    chosen = PredictOptions(tile_px=64, multiple_px=2, **options)
    net = ProbabilityNet(Blur(reach_px), (0, 1, 2))
    return choose_overlap_px(net, _images(size), chosen, CPU)


def test_tiles_overlap_as_far_as_the_net_sees(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lit_data")
    assert _choose(3, (100, 100)) == 6
    assert _choose(16, (100, 100)) == 32
    assert _choose(3, (64, 64)) == 0  # one tile has no seam
    assert _choose(3, (100, 100), overlap_px=10) == 10
    assert "less than the net sees" not in caplog.text
    assert _choose(20, (100, 100)) == _choose(None, (100, 100)) == 16
    assert "tiles of 64 x 64 px overlap by 16 px, less than the net sees" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "options", "tiles"),
    [
        ([(40, 52)], {"multiple_px": 1}, {(1, 3, 40, 52)}),
        # The net is asked with 65 px whether it takes any size.
        ([(40, 52)], {"multiple_px": 16}, {(1, 3, 65, 65), (1, 3, 40, 52)}),
        ([(40, 52)], {"multiple_px": 16, "round_px": 16}, {(1, 3, 48, 64)}),
        ([(40, 48), (40, 49)], {"multiple_px": 1}, {(1, 3, 40, 48), (1, 3, 40, 49)}),
        ([(64, 64)] * 7, {"threads": 2}, {(1, 3, 64, 64)}),
        ([(64, 64)] * 7, {"batch_size": 3}, {(3, 3, 64, 64), (1, 3, 64, 64)}),
        ([(64, 64)] * 7, {"max_batch_size": 2}, {(2, 3, 64, 64), (1, 3, 64, 64)}),
        ([(64, 64)] * 7, {"min_batch_size": 5}, {(5, 3, 64, 64), (2, 3, 64, 64)}),
        ([(64, 64)] * 7, {"limit": 2}, {(2, 3, 64, 64)}),
    ],
)
def test_batches_are_as_large_as_asked_for(
    sizes: list[tuple[int, int]], options: dict[str, Any], tiles: set[Any], tmp_path: Path
) -> None:
    given = dict(options)
    limit = given.pop("limit", 1.0)
    assert _predict(Blur(1), sizes, tmp_path, limit, **given) == tiles


def _predict(
    model: Blur, sizes: list[tuple[int, int]], folder: Path, limit: float = 1.0, **options: Any
) -> set[tuple[int, ...]]:
    """Sizes of the batches that a model is given."""
    run = make_run(folder, limit_predict_batches=limit)
    images, chosen = _images(*sizes), PredictOptions(tile_px=64, **options)
    predict_images(WatermarkDataModule(), model, MarkWriter(images, folder, chosen), run, chosen)
    return set(model.sizes)


def test_a_net_that_refuses_odd_sizes_gets_sides_filled_up_by_their_edge(tmp_path: Path) -> None:
    class Halving(Blur):
        def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
            if batch["image"].shape[2] % 16:
                raise ValueError("my sides must be multiples of 16")
            return super().predict_step(batch, batch_idx)

    assert _predict(Halving(1), [(40, 52)], tmp_path) == {(1, 3, 48, 64)}
