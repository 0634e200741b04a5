"""Small suites of `python -m benchmarks`: each runs at toy size and writes its table."""

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks import first, patches, shards, start
from benchmarks.__main__ import run as measure
from benchmarks.gpu import answer_part, format_table
from lit_data.grid import PatchGrid
from lit_data.io.images.writing import write_png
from tests.benchmarks.suites import read_table

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


@pytest.mark.slow
def test_every_kind_of_worker_is_measured(tmp_path: Path) -> None:
    toy = ["suite.batches=[1,2]", "suite.batch_size=4", "suite.shape=[3,8,8]", "suite.repeats=1"]
    assert measure(["first", *toy, f"hydra.run.dir={tmp_path}"]) == 0
    rows = {row["way"]: row for row in read_table(tmp_path)}
    assert list(rows) == [
        f"{way}_{n}" for n in (1, 2) for way in ("dataloader", "process", "thread", "inline")
    ]
    assert all(
        tuple(row) == first.COLUMNS and float(row["samples_per_s"]) > 0 for row in rows.values()
    )
    assert float(rows["dataloader_2"]["ratio"]) == float(rows["dataloader_1"]["first_ratio"]) == 1


def test_a_sample_is_a_new_tensor() -> None:
    samples = first.FreshSamples(1000, (3, 4, 4))
    one, other = samples[999], samples[999]
    assert one.equal(other)
    assert one.data_ptr() != other.data_ptr()


def test_every_size_is_measured(tmp_path: Path) -> None:
    words = ["suite.images=[12,40]", "suite.repeats=1", f"hydra.run.dir={tmp_path}"]
    assert measure(["start", *words]) == 0
    rows = read_table(tmp_path)
    assert [row.pop("way") for row in rows] == ["images_12", "images_40"]
    for row in rows:
        assert ("way", *row) == start.COLUMNS
        assert min(map(float, row.values())) > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shards_are_read_beside_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "x")  # what the suite sets does not outlast the test
    folder = tmp_path / "run"
    folder.mkdir()
    toy = ["suite.images=10", "suite.side_px=256", "suite.shard_bytes=100000"]
    toy += ["suite.cache_share=0.6", "suite.repeats=1"]
    places = [f"paths.cache={tmp_path}", f"hydra.run.dir={folder}"]
    assert measure(["shards", *toy, *places]) == 0
    rows = {row["way"]: row for row in read_table(folder)}
    assert list(rows) == ["shards", "mirror", "litdata"]
    assert tuple(rows["shards"]) == shards.COLUMNS
    assert float(rows["shards"]["fetched_share"]) > 0
    assert float(rows["shards"]["kept_share"]) <= 0.61
    assert float(rows["mirror"]["fetched_share"]) == 0
    assert float(rows["mirror"]["kept_share"]) > 1.9


def test_the_server_is_as_slow_as_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(200_000))
    with shards.serve(tmp_path, shards.ShardsSuite(latency_ms=50, megabytes_per_s=0.4)) as url:
        began_s = time.perf_counter()
        for _ in range(2):
            assert len(urllib.request.urlopen(f"{url}/bench/a").read()) == 200_000
        assert time.perf_counter() - began_s > 0.5  # the second waits for the first
        part = urllib.request.Request(f"{url}/bench/a", headers={"Range": "bytes=10-19"})
        assert len(urllib.request.urlopen(part).read()) == 10
        assert urllib.request.urlopen(f"{url}/count").read() == b"400010"


def test_the_store_is_measured_in_bands_and_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, photos = tmp_path / "run", tmp_path / "photos"
    write_png(photos / "0.png", np.add.outer(np.arange(90), np.arange(120)).astype(np.uint8))
    folder.mkdir()
    places = [f"suite.photos={photos}", f"paths.cache={tmp_path}", f"hydra.run.dir={folder}"]
    toy = ["suite.images=2", "suite.side_px=1100", "suite.worker_kind=thread"]
    toy += ["suite.batches=2", "suite.repeats=1"]
    assert measure(["patches", *toy, *places]) == 0
    rows = {row["way"]: row for row in read_table(folder)}
    assert list(rows) == ["bands", "whole", "tiff", "zarr", "hdf5"]
    assert tuple(rows["bands"]) == patches.COLUMNS
    for name in ("bands", "whole"):
        assert float(rows[name]["cold_per_s"]) > 0
        assert float(rows[name]["warm_per_s"]) > 0
    assert float(rows["whole"]["warm_ratio"]) == 1
    assert float(rows["bands"]["stored_share"]) < 1.01
    shown = capsys.readouterr().out
    assert "2 images of 1100 x 1100 x 3, patches of 128 px" in shown
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("patches-")]


def test_regions_of_another_format_are_the_patches_of_the_grid() -> None:
    image = np.arange(3 * 40 * 60, dtype=np.int32).reshape(3, 40, 60)
    grid = PatchGrid([40], [60], 16, 10)
    (batch,) = DataLoader(patches.RegionPatches(lambda: [image], grid), len(grid))
    _, y, x = grid.locate(np.arange(len(grid)))
    wanted = [image[:, top : top + 16, left : left + 16] for top, left in zip(y, x, strict=True)]
    np.testing.assert_array_equal(batch.numpy(), np.stack(wanted))


def test_the_benchmark_of_a_gpu_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.chdir(tmp_path)
    assert measure(["gpu"]) == 2
    assert "suite=gpu needs a CUDA device, and there is none here" in capsys.readouterr().err


def test_what_fails_is_a_row_of_the_table() -> None:
    def ask(scene: Any) -> Iterator[tuple[str, float, str]]:
        yield "first", 1.5, "ms"
        raise ValueError("no\nluck")

    lines = [{"part": "x", **line} for line in answer_part(ask, None)]  # type: ignore[arg-type]
    table = format_table(lines, {"device": "a device", "torch": "2"})
    assert "| x | first | 1.5 ms |" in table
    assert "| x | failed | ValueError: no luck |" in table


def test_an_unknown_suite_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert measure(["mosaics"]) == measure([]) == 2
    suites = sorted(
        path.stem for path in (Path(__file__).parents[2] / "benchmarks/conf/suite").iterdir()
    )
    assert f"suites: {', '.join(suites)}" in capsys.readouterr().err
