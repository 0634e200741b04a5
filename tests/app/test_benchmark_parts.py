"""What the table of `benchmark` is made of."""

import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_data.app.benchmarks.compare import recommend
from lit_data.app.benchmarks.measure import Candidate, Limits, measure, measure_rows
from lit_data.app.benchmarks.options import BenchmarkOptions
from lit_data.app.benchmarks.table import (
    COLUMNS,
    HEADINGS,
    Lap,
    Result,
    Row,
    collect_metrics,
    find_best,
    show_lines,
    tabulate,
    write_lines,
)
from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.targets import read_options
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Batch
from lit_data.loading import LoaderOptions

CPU = torch.device("cpu")


def _lap(samples_per_s: float) -> Lap:
    values = {field.name: 1.0 for field in fields(Lap)}
    return Lap(**(values | {"samples": 8, "samples_per_s": samples_per_s}))


def _result(
    method: str, *speeds: float, workers: int = 2, batch_size: int = 16, micro: int = 8
) -> Result:
    return Result(Row(method, batch_size, workers, micro), [_lap(speed) for speed in speeds])


# rows


# options


def _options(**changes: Any) -> BenchmarkOptions:
    cfg = compose("benchmark", ["paths.run=x"])
    for key, value in changes.items():
        cfg.benchmark[key] = value
    return read_options(BenchmarkOptions, cfg.benchmark, "benchmark")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "fast"}, r"^benchmark\.mode='fast' is unknown: choose one of loaders, headroom"),
        ({"methods": ["inline", "dali"]}, r"\['inline', 'dali'\] must name some of copy, dataload"),
        ({"methods": []}, r"^benchmark\.methods=\[\] must name some of copy, dataloader,"),
        ({"workers": [-1]}, r"^benchmark\.workers=-1 is not usable: .* of at least 0$"),
        ({"batch_sizes": [4, 0]}, r"^benchmark\.batch_sizes=0 is not usable: .* of at least 1$"),
        ({"batch_sizes": None}, r"^'benchmark\.batch_sizes' is None: give a list, each a whole"),
        (
            {"micro_batch_sizes": []},
            r"^benchmark\.micro_batch_sizes=\[\] is empty: give at least one",
        ),
        ({"repeats": 1.5}, r"^benchmark\.repeats=1\.5 is not usable: "),
        ({"samples_per_row": 0}, r"^benchmark\.samples_per_row=0 is not usable: "),
        ({"seconds_per_row": 0}, r"^benchmark\.seconds_per_row=0 must be greater than 0$"),
    ],
)
def test_a_wrong_option_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _options(**changes)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    cfg = compose("benchmark", ["paths.run=x", "+benchmark.repeat=2"])
    text = r"^unknown key 'benchmark\.repeat'.* Did you mean 'benchmark\.repeats'\?$"
    with pytest.raises(ConfigError, match=text):
        read_options(BenchmarkOptions, cfg.benchmark, "benchmark")


# feeds


class Squares(torch.utils.data.Dataset[Batch]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Batch:
        return {"image": torch.full((2,), index**2), "index": torch.tensor(index)}


# measure


def test_the_time_ends_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(float(number) for number in range(100))
    clock = "lit_data.app.benchmarks.measure.time.perf_counter"
    monkeypatch.setattr(clock, lambda: next(ticks))
    feed, candidate = [{"image": torch.zeros(4, 2)}], Candidate(dataset=None)
    limits = Limits(seconds=5, samples=None, warmup_batches=1)
    lap = measure(feed, candidate, limits=limits, device=CPU)
    # Each batch reads the clock three times: before and after its transfer, and at its end.
    assert (lap.samples, lap.load_ms_mean, lap.load_ms_std) == (8, 3000.0, 0.0)
    assert lap.samples_per_s == pytest.approx(8 / 7)
    assert lap.first_batch_ms == 3000.0
    ticks = iter(float(number) for number in range(100))
    lap = measure(feed, candidate, limits=limits, device=CPU, least_batches=6)
    assert lap.samples == 24


def test_rows_are_measured_in_turn_and_a_failing_one_has_a_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order = []

    class Feed:
        def __init__(self, row: Row) -> None:
            self.row = row

        def __iter__(self) -> Iterator[Batch]:
            order.append(self.row.method)
            if self.row.method == "textbook":
                raise RuntimeError("Caught in worker 0:\n  line 3, in get\nBus error\n")
            yield from [{"image": torch.zeros(4)}] * 2

    make_loader = "lit_data.app.benchmarks.measure.make_torch_loader"
    monkeypatch.setattr(make_loader, lambda row, candidate, seed: Feed(row))
    rows = [Row(method, 4, 0, 4) for method in ("original", "textbook", "dataloader", "improved")]
    candidates = {row.method: Candidate(dataset=None) for row in rows}
    candidates["improved"] = "there is none"
    limits = Limits(seconds=60, samples=4, warmup_batches=1)
    with caplog.at_level("INFO"):
        results = measure_rows(rows, candidates, repeats=2, limits=limits, device=CPU, seed=0)
    assert "3 rows, each measured 2 times: at most 360 s, and the time to start" in caplog.text
    assert [len(result.laps) for result in results] == [2, 0, 2, 0]
    first, broken, second, absent = (result.note for result in results)
    assert (first, second) == ("", "")
    assert (broken, absent) == ("not available: Bus error", "not available: there is none")
    turns = [name for n, name in enumerate(order) if name != order[n - 1]]
    assert turns == ["original", "textbook", "dataloader", "original", "dataloader"]


def test_it_is_an_error_when_no_row_can_be_measured() -> None:
    limits = Limits(seconds=1, samples=1, warmup_batches=1)
    rows = [Row("inline", 16, 0, 16)]
    candidates = {"inline": Candidate(dataset=Squares(), options=LoaderOptions(drop_last=True))}
    text = r"^the loader gave no batch: is data\.loader\.drop_last set, and the batch larger than"
    with pytest.raises(DataError, match=text):
        measure_rows(rows, candidates, repeats=1, limits=limits, device=CPU, seed=0)


# table


def test_the_table_holds_medians_and_their_ratios() -> None:
    results = [
        _result("dataloader", 100, 1, 110, workers=2),
        _result("dataloader", 50, 50, 50, workers=0),
        _result("thread", 500, 900, 550, workers=2),
        _result("inline", 300, 200, 250, workers=1),
        _result("thread", 7, workers=2, batch_size=8),
        Result(Row("device", 16, 0, 16), [], "not available: too large"),
    ]
    lines = tabulate(results, "device")
    assert [tuple(sorted(line)) for line in lines] == [tuple(sorted(COLUMNS))] * 6
    assert [line["samples_per_s"] for line in lines[:5]] == [100, 50, 550, 250, 7]
    # the same number of workers; none of that number: the fastest; no DataLoader of that batch
    # size: no ratio
    assert [line["ratio_to_dataloader"] for line in lines[:4]] == [1, 1, 5.5, 2.5]
    assert math.isnan(lines[4]["ratio_to_dataloader"])
    assert math.isnan(lines[5]["samples_per_s"])
    assert find_best(lines, ["thread", "device"], 16) is lines[2]
    assert find_best(lines, ["device"], 16) is None
    metrics = collect_metrics(lines, 16)
    assert metrics["benchmark/ratio_to_dataloader"] == 5.5
    assert metrics["benchmark/best_method"] == "thread"
    assert metrics["benchmark/best_samples_per_s"] == 550
    assert metrics["benchmark/inline_pss_mib"] == 1
    assert "benchmark/device_samples_per_s" not in metrics


def test_what_was_not_measured_is_an_empty_cell_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Result(Row("dataloader", 4, 0, 4), [], "not available: [no] memory")
    lines = tabulate([_result("thread", 123456.789), absent], "host")
    write_lines(lines, COLUMNS, tmp_path / "benchmark.csv")
    header, first, second = (tmp_path / "benchmark.csv").read_text().splitlines()
    assert header == ",".join(COLUMNS)
    assert first == "thread,host,16,2,8,123457,,1,1,1,1,1,1,1,8,1,"
    assert second == "dataloader,host,4,0,4,,,,,,,,,,0,0,not available: [no] memory"
    show_lines(lines, "title", headings=HEADINGS)
    out = capsys.readouterr().out
    assert "123 457" in out
    assert out.rstrip().endswith("dataloader: not available: [no] memory")


# recommend


def test_the_simplest_setting_near_the_fastest_is_recommended() -> None:
    lines = tabulate(
        [
            _result("dataloader", 10),
            _result("inline", 90, workers=0),
            _result("thread", 96, micro=4),
            _result("thread", 97, micro=8),
            _result("process", 100),
            _result("process", 500, batch_size=32),
        ],
        "device",
    )
    found = recommend(lines, 16)
    assert found is not None
    loader = {"worker_kind": "thread", "num_workers": 2, "micro_batch_size": 8}
    assert found.settings == {"loader": loader}
    assert found.sentence == (
        "Recommended for batches of 16: worker_kind=thread, num_workers=2, micro_batch_size=8: "
        "97 samples/s; 9.7 times torch's DataLoader; inline gave 90; process gave 100; "
        "the simplest within 5 % of the fastest."
    )
    assert found.metrics()["benchmark/recommended_num_workers"] == 2


# the rest
