from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from benchmarks.ct import COLUMNS, Cloud, check_equal
from lit_data.errors import ConfigError, DataError
from tests.benchmarks.suites import build_suite, compose_suite, read_table, run_suite

WAYS = ["argwhere", "nonzero", "memory_map", "sparse_file", "store", "subset", "cached"]


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    words = ["+experiment=ct", "data.samples={count: 3, shape: [16, 16, 16]}", "trainer=cpu"]
    return compose_suite(
        "ct", *words, f"paths.cache={tmp_path_factory.mktemp('cache')}", "paths.run=run"
    )


@pytest.fixture
def cfg(composed: DictConfig, tmp_path: Path) -> DictConfig:
    cfg = composed.copy()
    OmegaConf.update(cfg, "paths.run", str(tmp_path))
    cfg.suite.update({"repeats": 1, "subset_points": 50, "volume_side": 20, "occupied_share": 0.05})
    return cfg


def test_all_ways_find_the_voxels_of_made_volumes(cfg: DictConfig, tmp_path: Path) -> None:
    found = run_suite(cfg)
    assert (found["benchmark/volumes"], found["benchmark/points"]) == (2, 800)
    rows = read_table(tmp_path)
    assert [row["method"] for row in rows] == WAYS
    for row in rows:
        assert tuple(row) == COLUMNS
        assert int(row["points"]) == (100 if row["method"] == "subset" else 800)
        assert int(row["samples"]) == 2
        assert bool(row["prepare_ms"]) == (row["method"] in ("sparse_file", "store"))
        for name in ("first_epoch_ms", "load_ms_mean", "memory_mib", "ratio_to_argwhere"):
            metric = found[f"benchmark/{row['method']}_{name}"]
            assert 0 < metric == pytest.approx(float(row[name]), rel=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.csv"]


def test_the_volumes_of_an_experiment_are_measured(cfg: DictConfig) -> None:
    cfg.suite.volumes, cfg.data.occupied_hu = None, [-200, 100]
    found = run_suite(cfg)
    volumes = [np.load(path) for path in Path(cfg.paths.cache).rglob("ct_000?.npy")]
    assert found["benchmark/volumes"] == len(volumes) == 3
    assert found["benchmark/points"] == sum(int(((v > -200) & (v <= 100)).sum()) for v in volumes)


def test_data_without_volumes_is_refused(cfg: DictConfig) -> None:
    cfg.suite.volumes = None
    cfg.data = {"_target_": "lit_data.datamodules.StripeDataModule"}
    with pytest.raises(ConfigError, match=r"the experiment's volumes: add \+experiment=ct"):
        run_suite(cfg)
    cfg.suite.occupied_share = 1.5
    with pytest.raises(ConfigError, match=r"suite.occupied_share=1.5 is a share"):
        build_suite(cfg)


def test_ways_that_find_other_voxels_are_not_compared() -> None:
    one = Cloud(np.zeros((2, 4), np.int32), np.zeros((2, 1), np.float32))
    expected = [one]
    check_equal("mine", [one], expected)
    other = one._replace(coords=one.coords + 1)
    with pytest.raises(DataError, match="mine finds 2 other voxels than argwhere, which finds 2"):
        check_equal("mine", [other], expected)
