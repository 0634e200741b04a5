"""Small suites of `python -m benchmarks`: each runs at toy size and writes its table."""

import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from benchmarks import exported, seeds
from benchmarks.__main__ import run as measure
from benchmarks.gpu import answer_part, format_table
from benchmarks.gpu_parts import PARTS, DeviceScene
from tests.benchmarks.suites import GPU_TOY, read_table
from tests.lit_inspect.boards import write_board

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


def test_each_callback_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["callbacks=safe", "suite.steps=3", "suite.repeats=1", "trainer.accelerator=cpu"]
    assert measure(["callbacks", "+experiment=stripe", *words, f"hydra.run.dir={tmp_path}"]) == 0
    rows = read_table(tmp_path)
    names = {"data_wait", "memory", "adaptive", "amp", "digest", "interrupt", "empty_cache", "all"}
    assert {row["callback"] for row in rows} == names
    assert rows[-1]["callback"] == "all"
    assert "us; on top of that:" in capsys.readouterr().out
    assert logging.getLogger("lightning.pytorch").level == logging.INFO


def test_the_first_workloads_are_measured_by_a_plain_way_and_ours(tmp_path: Path) -> None:
    sizes = ["images=8", "batch_size=4", "volume_side=48", "window=16", "pages=2", "repeats=1"]
    words = [f"suite.{size}" for size in (*sizes, "seconds=1")]
    places = [f"hydra.run.dir={tmp_path}/run", f"paths.cache={tmp_path}/cache"]
    assert measure(["seeds", *words, "data.samples.count=40", *places]) == 0
    rows = read_table(tmp_path / "run")
    counts = Counter(row["workload"] for row in rows)
    assert counts == {"stripes": 3, "mosaics": 3, "windows": 3, "pages": 2, "GAN": 1}
    assert all(tuple(row) == seeds.COLUMNS and float(row["ours"]) > 0 for row in rows)
    assert float(rows[-1]["ratio"]) > 1.5  # parts of a batch need less memory
    plain, ours = float(rows[0]["plain"]), float(rows[0]["ours"])
    assert float(rows[0]["ratio"]) == pytest.approx(ours / plain, rel=1e-3)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_differences_are_judged_at_the_threshold(dtype: str) -> None:
    pixels = np.full((3, 40, 30), 100, np.uint8)
    pixels[1:] = [[[60]], [[120]]]
    pixels[0, 5:7, 9] = 160  # 70 from the mean of both
    white = {"uint8": 1, "uint16": 257, "float32": 1 / 255}[dtype]
    pixels = (pixels * np.float64(white)).astype(dtype)
    assert exported.judge_difference(pixels, 0.27, least_px=2)
    assert not exported.judge_difference(pixels, 0.28, least_px=2)
    assert not exported.judge_difference(pixels, 0.27, least_px=3)
    assert exported.judge_difference(pixels[:2], 0.39, least_px=2)  # 100 from the one reference


def test_files_are_measured_beside_the_difference_of_images(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(6):
        cv2.imwrite(str(folder / f"{number // 2}_{'ab'[number % 2]}.png"), np.zeros((20, 30)))
    (folder / "2_b.png").unlink()
    layout = {"channels": None, "files": ["*_a.png", "*_b.png"]}
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
    mean = onnx.helper.make_node("ReduceMean", ["images", "axes"], ["probability"])
    axes = onnx.helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [1])
    path = write_board(
        tmp_path / "a.inspect", layout=layout, channels=2, nodes=[mean], weights=[axes]
    )
    words = [f"suite.file={path}", f"suite.root={folder}", "suite.repeats=2"]
    assert measure(["exported", *words, f"hydra.run.dir={tmp_path}/run"]) == 0
    rows = read_table(tmp_path / "run")
    assert [row["way"] for row in rows] == ["a.inspect", "difference"]
    for row in rows:
        assert tuple(row) == exported.COLUMNS
        assert (row["images"], row["calls"], row["pixels_per_image"]) == ("2", "4", "600")
        assert min(float(row[name]) for name in exported.COLUMNS[1:]) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # other loaders, and torch.compile, warn
def test_a_machine_without_a_gpu_answers_what_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels of C++ would take a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    words = [*GPU_TOY, "suite.device=cpu", f"hydra.run.dir={tmp_path}"]
    assert measure(["gpu", *words]) == 0
    rows = read_table(tmp_path)
    # what is not installed, or compiles without a compiler, is said in its row
    optional = {"bf16, MONAI's ThreadDataLoader of decoded images", "bf16, compiled"}
    without = {row["part"] for row in rows if row["what"] in {"left out", "failed"}}
    assert without - optional == {"copies", "out of memory", "GAN"}
    assert list(dict.fromkeys(row["part"] for row in rows)) == list(PARTS)


def test_parts_that_would_start_too_late_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(scene: DeviceScene) -> Iterator[tuple[str, float, str]]:
        clock.append(clock[-1] + 61)
        yield "first", 1.5, "ms"

    clock = [0.0]
    monkeypatch.setattr("benchmarks.gpu.time.monotonic", lambda: clock[-1])
    monkeypatch.setattr("benchmarks.gpu.PARTS", {"one": ask, "other": ask})
    words = ["suite.device=cpu", "suite.seconds=60", f"hydra.run.dir={tmp_path}"]
    assert measure(["gpu", *words]) == 0
    first, second = read_table(tmp_path)
    assert (first["part"], first["value"]) == ("one", "1.5")
    assert (second["part"], second["what"]) == ("other", "left out")


def test_an_answer_of_nan_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    class Predictor:
        answers = iter([[1.0, 2.0], [1.5, float("nan")], [1.0, 2.0], [1.0, 2.25]])

        def __init__(self, *_: Any, **__: Any) -> None:
            self.values = next(self.answers)

        def predict(self, _: Any) -> Iterator[tuple[int, torch.Tensor]]:
            return enumerate(map(torch.tensor, self.values))

    monkeypatch.setattr("benchmarks.gpu_parts.TiledPredictor", Predictor)
    options: Any = SimpleNamespace(tile_px=8)
    scene = DeviceScene(OmegaConf.create(), options, torch.device("cpu"))
    results = [next(iter(PARTS["agreement"](scene))) for _ in range(2)]
    assert [str(value) for _, value, _ in results] == ["nan", "0.25"]
    assert {remark for *_, remark in results} == {"(too much)"}


def test_a_device_that_is_not_there_is_named_by_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(["gpu", *GPU_TOY, "suite.device=nowhere", f"hydra.run.dir={tmp_path}"]) == 2
    assert "lit_data: suite.device='nowhere' cannot be used" in capsys.readouterr().err


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
