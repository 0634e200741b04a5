"""`python -m benchmarks synthesis`: the ways to draw agree; a table is written."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from omegaconf import DictConfig

from benchmarks.__main__ import run as measure
from benchmarks.spots import draw_everywhere, draw_in_windows
from benchmarks.synthesis import COLUMNS, WAYS, make_panel
from benchmarks.synthesis_variants import (
    draw_in_turn,
    open_scene,
    place_alone,
    take_alone,
    to_unit,
    widen,
)
from lit_data.commands.benchmarks.table import draw_bars
from lit_data.errors import ConfigError
from lit_data.synthesis import FAMILIES, DefectPlan, DefectSpec, render, sample_plan
from tests.benchmarks.suites import compose_suite, read_summary, read_table, run_suite
from tests.simulated.log import LOG
from tests.synthesis.placing import GREY, scene

TOY = [
    *("+experiment=stripe", "data.samples={count: 6, height_px: 128, width_px: 112}"),
    *("data.patch_px=64", "data.stride_px=64"),
    *("suite.batch_size=6", "suite.repeats=1", "suite.device=cpu"),
]
CPU = torch.device("cpu")

Run = Callable[..., tuple[dict[str, Any], list[dict[str, str]]]]

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


def _compose(folder: Path, *words: str) -> DictConfig:
    return compose_suite(
        "synthesis", *TOY, *words, f"paths.run={folder}", f"paths.cache={folder}/cache"
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the command; gives the metrics of summary.json, and the lines of the table."""

    def call(*words: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
        places = [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
        assert measure(["synthesis", *TOY, *words, *places]) == 0
        metrics, folder = read_summary(tmp_path / "runs")
        assert cv2.imread(str(folder / "benchmark.png")).shape[1] > 500
        return metrics, read_table(folder)

    return call


# the ways agree


def _middle_plan(
    name: str, batch: int, shape: tuple[int, int, int]
) -> tuple[DefectPlan, DefectPlan]:
    """One defect in the middle of each image, in its own window and in one that is the image."""
    spec = DefectSpec(probability=1, count=(1, 1), true_count=(0, 1), families={name: {}})
    plan = sample_plan(spec, 3, 0, np.arange(batch), shape)
    wide = widen(plan, shape[1:])
    return replace(plan, y=wide.y, x=wide.x), wide


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_images_own_windows_and_batches_give_the_same_pixels(name: str) -> None:
    shape = (3, 71, 48)
    plan, wide = _middle_plan(name, 6, shape)
    pixels = scene(6, shape).astype(np.float32)
    images, masks = render(torch.from_numpy(pixels.copy()), plan, GREY)
    assert not np.array_equal(images.numpy(), pixels)
    assert masks.any()
    for way in (plan, wide):
        drawn, marked = torch.from_numpy(pixels.copy()), torch.zeros_like(masks)
        draw_in_turn(drawn, marked, take_alone(way, range(len(way))), GREY)
        assert torch.equal(drawn.to(torch.uint8), images.to(torch.uint8))
        assert torch.equal(marked, masks)


def test_the_whole_image_way_computes_every_pixel_of_the_image_and_no_other() -> None:
    for name in FAMILIES:
        _, wide = _middle_plan(name, 4, (3, 64, 80))
        assert {(group.height_px, group.width_px) for group in wide.groups} == {(64, 80)}
        assert_array_equal(np.floor(wide.y + 0.5) - (64 - 1) // 2, 0)
        assert_array_equal(np.floor(wide.x + 0.5) - (80 - 1) // 2, 0)


@pytest.mark.parametrize("way", [draw_everywhere, draw_in_windows])
def test_numpy_draws_the_same_spots(way: Callable[..., np.ndarray]) -> None:
    spec = DefectSpec(probability=1, count=(2, 2), families={"spot": {}})
    plan = sample_plan(spec, 3, 0, [0, 1], (3, 40, 56))
    pixels = torch.full((2, 3, 40, 56), 100.0)
    numbers = [number for number in range(len(plan)) if plan.row[number] == 1]
    image = to_unit(pixels[1], GREY)
    mask = way(image, place_alone(pixels, plan, numbers, GREY))
    images, masks = render(pixels, plan, GREY)
    assert_allclose(image, images[1].numpy() / 255, atol=1 / 255)
    assert_array_equal(mask, masks[1].numpy())


# the command


@pytest.mark.slow
def test_every_family_is_measured_beside_the_usual_ways(run: Run) -> None:
    metrics, lines = run("data.synthesis.probability=1")
    assert tuple(lines[0]) == COLUMNS
    assert [line["family"] for line in lines] == [*FAMILIES, "all"]
    for line in lines:
        family = line["family"]
        ways = [way for way in WAYS if line[f"{way}_us"]]
        numpy = ["original_numpy", "local_numpy"] if family == "spot" else []
        assert sorted(ways) == sorted(["original", "local", "batched", *numpy])
        assert int(line["defects"]) >= 18
        assert line["repeats"] == "1"
        for column in (*(f"{way}_us" for way in ways), "ratio_to_original", "ratio_to_local"):
            assert float(line[column]) == pytest.approx(metrics[f"{family}_{column}"], rel=1e-5)
        for way in ("original", "local"):
            names = [name for name in (way, f"{way}_numpy") if name in ways]
            best_us = min(metrics[f"{family}_{name}_us"] for name in names)
            ratio = best_us / metrics[f"{family}_batched_us"]
            assert metrics[f"{family}_ratio_to_{way}"] == pytest.approx(ratio)
    assert metrics["ratio_to_original"] == metrics["all_ratio_to_original"]
    assert metrics["ratio_to_local"] == metrics["all_ratio_to_local"]
    assert metrics["batch_size"] == 6
    assert metrics["finish_ms"] > 0
    assert not [key for key in metrics if key.startswith("finish_compiled") or "device_us" in key]


def test_another_synthesis_and_images_on_the_device_can_be_measured(run: Run) -> None:
    metrics, lines = run("synthesis=gaussian", "data.cache=device", "data.augment=null")
    assert [line["family"] for line in lines] == ["spot", "all"]
    assert metrics["all_original_numpy_us"] > 0
    assert metrics["finish_ms"] > 0


def test_a_single_texture_is_told_apart_before_defects_are_drawn(run: Run, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(6):
        grey = np.random.default_rng(number).integers(60, 180, (128, 112), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / "images" / f"{number}.png"), grey)
    _, lines = run("synthesis=gaussian", f"data.root={tmp_path}/images", "data.layout=single")
    assert [line["family"] for line in lines] == ["spot", "all"]


def test_compiled_augmentation_is_measured_where_it_can_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(function: object, **options: object) -> object:
        raise RuntimeError("no compiler\nis here")

    cfg = _compose(tmp_path, "synthesis=gaussian", "suite.compile=true")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    metrics = run_suite(cfg)
    assert metrics["benchmark/finish_compiled_ms"] > 0
    assert "benchmark/finish_compiled_note" not in metrics
    monkeypatch.setattr(torch, "compile", fail)
    metrics = run_suite(cfg)
    assert metrics["benchmark/finish_compiled_note"] == "no compiler is here"
    assert "benchmark/finish_compiled_ms" not in metrics
    assert metrics["benchmark/finish_ms"] > 0


def test_a_chart_has_a_bar_for_the_device_where_there_is_one(tmp_path: Path) -> None:
    line = {f"{way}_us": 10.0 for way in WAYS} | {"family": "spot"}
    for name, device_us in (("with", 1.0), ("without", math.nan)):
        path, panel = tmp_path / f"{name}.png", make_panel([line | {"device_us": device_us}])
        draw_bars([panel], path, "title", "us")
        green = (cv2.imread(str(path)) == (0x59, 0xC7, 0x34)).all(2)
        assert green.any() == (name == "with")


# what cannot be measured


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["synthesis=none"], r"draws data\.synthesis into stripes: set synthesis=library$"),
        (["data.synthesis.probability=0"], r"draws no defects in 100 batches of 6: raise its "),
        (
            ["data.splits={train: 0, val: 0.5, test: 0.5}", "data.mask_splits=[]"],
            r"^the train split holds no images to draw into: check data\.splits$",
        ),
        (["+suite.compiled=true"], r"unknown key .* Did you mean 'suite\.compile'\?$"),
    ],
)
def test_what_draws_nothing_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    cfg = _compose(tmp_path, *words)
    with pytest.raises(ConfigError, match=message):
        run_suite(cfg)


# on a device


@pytest.mark.gpu
def test_a_batch_of_all_families_is_finished_in_three_milliseconds(tmp_path: Path) -> None:
    if LOG.installed:
        pytest.skip("times mean nothing on a simulated device")
    sizes = ["data.samples={count: 6, height_px: 256, width_px: 256}", "data.patch_px=128"]
    sizes.append("data.stride_px=112")
    opened = open_scene(_compose(tmp_path, *sizes), 384)
    batch = {key: value.to("cuda") for key, value in opened.batch.items()}
    assert opened.patches.shape == (384, 3, 128, 128)
    assert {*opened.transformation.augment} == {"train"}
    times_ms = []
    for _ in range(30):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        opened.transformation.finish(batch, "train")
        ended.record()
        torch.cuda.synchronize()
        times_ms.append(began.elapsed_time(ended))
    assert median(times_ms[10:]) < 3
