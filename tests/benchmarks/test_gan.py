"""`python -m benchmarks gan`: what is measured, and that the ways differ in memory only."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import run as measure
from benchmarks.gan import COLUMNS, Bench, find_largest
from benchmarks.gan_variants import NAMES, list_ways
from lit_data.modules import ConvDiscriminator, ConvGenerator, GANModule
from lit_data.types import Batch
from tests.benchmarks.suites import read_summary, read_table

pytestmark = [
    pytest.mark.usefixtures("small_runs_are_fast"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step` but have no `val_dataloader`.*"
    ),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]

TOY = [
    *("trainer=cpu", "data.image_px=8", "data.samples={count: 6, size_px: [16, 16], tiles: 2}"),
    *("data.loader.batch_size=4", "data.loader.num_workers=0"),
    *("model.generator.width=4", "model.discriminator.width=4"),
    *("suite.batch_size=4", "suite.part_size=1", "suite.repeats=1", "suite.steps=1"),
]


@pytest.mark.slow
def test_the_table_and_the_summary(tmp_path: Path) -> None:
    words = [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
    assert measure(["gan", *TOY, *words]) == 0
    metrics, folder = read_summary(tmp_path / "runs")
    lines = read_table(folder)
    assert [line["way"] for line in lines] == list(NAMES)
    assert tuple(lines[0]) == COLUMNS
    assert (metrics["batch_size"], metrics["part_size"]) == (4, 1)
    assert metrics["original_peak_to_original"] == metrics["original_largest_to_original"] == 1
    for way in NAMES:
        assert metrics[f"{way}_gradient_difference"] < 1e-4
        assert metrics[f"{way}_step_ms"] > 0


def _bench(device: str) -> tuple[Bench, Callable[[int], Batch]]:
    torch.manual_seed(0)
    generator = ConvGenerator(image_px=32, latent_size=6, width=8, max_width=16, style_size=8)
    module = GANModule(
        generator, ConvDiscriminator(image_px=32, width=8, max_width=16), image_px=32, latent_size=6
    )

    def make_batch(count: int) -> Batch:
        images = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        return {"image": images.to(device), "index": torch.arange(count, device=device)}

    return Bench(module, torch.device(device)), make_batch


@pytest.mark.slow
def test_parts_take_less_and_find_the_same_gradients() -> None:
    bench, make_batch = _bench("cpu")
    ways = {way.name: way for way in list_ways(2)}
    peaks = {
        name: bench.measure_peak(ways[name], make_batch(16))
        for name in ("original", "careful", "whole", "parts")
    }
    assert peaks["parts"] < peaks["whole"] < peaks["careful"] < peaks["original"]
    assert peaks["whole"] < 0.65 * peaks["original"]
    assert peaks["parts"] < 0.3 * peaks["original"]
    wanted = bench.find_gradients(ways["original"], make_batch(16))
    for name in ("whole", "parts"):
        found = bench.find_gradients(ways[name], make_batch(16))
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert bench.measure_peak(ways["parts"], make_batch(32)) < peaks["original"]


@pytest.mark.gpu
def test_so_it_is_on_a_gpu() -> None:
    bench, make_batch = _bench("cuda")
    ways = {way.name: way for way in list_ways(8)}
    peaks = {
        name: bench.measure_peak(ways[name], make_batch(128))
        for name in ("original", "whole", "parts")
    }
    assert peaks["parts"] < 0.6 * peaks["original"]
    assert peaks["whole"] < 0.8 * peaks["original"]
    assert bench.measure_peak(ways["parts"], make_batch(256)) < peaks["original"]


@pytest.mark.parametrize(
    ("limit", "largest"), [(0, 0), (7, 7), (8, 8), (9, 9), (17, 17), (63, 63), (1000, 64)]
)
def test_the_largest_batch_that_fits_is_found(limit: int, largest: int) -> None:
    tried = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= limit

    assert find_largest(fits, 8, 8) == largest
    assert len(tried) <= 9
    assert max(tried) <= 64
    assert find_largest(lambda count: count <= 75, 32, 8) == 72  # large ones in eighths
