"""Mode ``claims`` of the benchmark: what each figure counts."""

from pathlib import Path

import pytest

from benchmarks.claims import (
    CIRCULATES,
    measure_index,
    measure_reading,
    measure_sample,
    measure_shared,
    trace_bytes,
)
from lit_data.datamodules import StripeDataModule
from lit_data.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from tests.benchmarks.suites import compose_suite, run_suite

IMAGES = 6
TRAIN = 4  # of them


@pytest.fixture(scope="module")
def datamodule(tmp_path_factory: pytest.TempPathFactory) -> StripeDataModule:
    data = StripeDataModule(
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        samples={"count": IMAGES, "height_px": 600, "width_px": 160},
        patch_px=64,
        stride_px=32,
        loader=LoaderOptions(batch_size=4, num_workers=0),
        synthesis=DefectSpec(probability=1.0),
    )
    data.prepare_data()
    data.setup("fit")
    return data


def test_bytes_are_those_held_and_the_most_in_between() -> None:
    held, most = trace_bytes(lambda: bytes(len(bytes(3_000_000))) and bytes(1000))
    assert 1000 <= held < 5000
    assert 3_000_000 <= most < 7_000_000


def test_a_patch_costs_the_list_a_tuple_and_the_grid_nothing(datamodule: StripeDataModule) -> None:
    pair = measure_index(datamodule)
    patches = len(datamodule.dataset("train"))
    assert pair.usual > 80 * patches
    assert pair.ours < 1000 + 40 * TRAIN + 24 * patches / 8


def test_a_sample_from_the_whole_image_takes_more_than_the_image(
    datamodule: StripeDataModule,
) -> None:
    pair = measure_sample(datamodule)
    assert pair.usual > 3 * 600 * 160 * 4  # in float32
    assert pair.ours < pair.usual / 3


@pytest.mark.slow
def test_without_a_cache_each_patch_decodes_its_image(datamodule: StripeDataModule) -> None:
    patches = len(datamodule.dataset("train"))
    in_order = measure_reading(datamodule, 1, shuffled=False)
    assert (in_order["cache_reads"].usual, in_order["cache_reads"].ours) == (patches, TRAIN)
    shuffled = measure_reading(datamodule, 1, shuffled=True)
    assert TRAIN < shuffled["cache_reads"].ours < patches


def test_workers_share_the_pages_of_the_store(datamodule: StripeDataModule) -> None:
    pair = measure_shared(datamodule, workers=2)
    pixels = IMAGES * 3 * 600 * 160
    assert pair.usual > 2 * pixels
    assert pair.ours < pair.usual


def _words(tmp_path: Path) -> list[str]:
    toy = "data.samples={count: 6, height_px: 128, width_px: 128}"
    size = [
        "data.patch_px=64",
        "data.stride_px=32",
        "data.loader.batch_size=4",
        "data.loader.num_workers=0",
    ]
    short = ["suite.repeats=1", "suite.steps=2", "suite.warmup_batches=1"]
    quiet = [
        "trainer.enable_progress_bar=false",
        f"paths.run={tmp_path}",
        f"paths.cache={tmp_path}/cache",
    ]
    return [toy, *size, *short, *quiet]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_every_claim_is_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose_suite("claims", "+experiment=stripe", *_words(tmp_path))
    metrics = run_suite(cfg)
    table = (tmp_path / "benchmark.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table[1:]] == list(CIRCULATES)
    for name in CIRCULATES:
        usual, ours = metrics[f"benchmark/{name}_usual"], metrics[f"benchmark/{name}_ours"]
        assert metrics[f"benchmark/{name}_ratio"] == pytest.approx(usual / ours)
    assert "98.3 % less memory" in capsys.readouterr().out


def test_other_data_have_no_such_claims(tmp_path: Path) -> None:
    words = [
        "data.samples={count: 6, height_px: 128, width_px: 128}",
        "data.patch_px=64",
        "synthesis=library",
    ]
    places = [
        f"paths.run={tmp_path}",
        f"paths.cache={tmp_path}/cache",
    ]
    cfg = compose_suite("claims", *words, *places)
    with pytest.raises(ConfigError, match=r"suite=claims needs stripes with plain spots"):
        run_suite(cfg)
