"""`python -m benchmarks shards`: a slow server gives the samples; a table is written."""

import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.__main__ import run as measure
from benchmarks.shards import COLUMNS, ShardsSuite, serve
from tests.benchmarks.suites import read_table

TOY = ["suite.images=10", "suite.side_px=256", "suite.shard_bytes=100000"]
TOY += ["suite.cache_share=0.6", "suite.repeats=1"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("small_runs_are_fast")
def test_shards_are_read_beside_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "x")  # what the suite sets does not outlast the test
    folder = tmp_path / "run"
    folder.mkdir()
    assert measure(["shards", *TOY, f"paths.cache={tmp_path}", f"paths.run={folder}"]) == 0
    rows = {row["way"]: row for row in read_table(folder)}
    assert list(rows) == ["shards", "mirror", "litdata"]
    assert tuple(rows["shards"]) == COLUMNS
    assert float(rows["shards"]["fetched_share"]) > 0
    assert float(rows["shards"]["kept_share"]) <= 0.61
    assert float(rows["mirror"]["fetched_share"]) == 0
    assert float(rows["mirror"]["kept_share"]) > 1.9


def test_the_server_is_as_slow_as_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(200_000))
    with serve(tmp_path, ShardsSuite(latency_ms=50, megabytes_per_s=0.4)) as url:
        began_s = time.perf_counter()
        for _ in range(2):
            assert len(urllib.request.urlopen(f"{url}/bench/a").read()) == 200_000
        assert time.perf_counter() - began_s > 0.5  # the second waits for the first
        part = urllib.request.Request(f"{url}/bench/a", headers={"Range": "bytes=10-19"})
        assert len(urllib.request.urlopen(part).read()) == 10
        assert urllib.request.urlopen(f"{url}/count").read() == b"400010"
