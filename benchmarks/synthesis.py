"""Suite ``synthesis``: the speed of drawing defects, beside the ways in which people draw them."""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from typing_extensions import override

from benchmarks.spots import draw_everywhere, draw_in_windows
from benchmarks.synthesis_variants import (
    Scene,
    draw_in_turn,
    open_scene,
    place_alone,
    take_alone,
    to_unit,
    widen,
)
from lit_data.augment import Compiled
from lit_data.commands.benchmarks.options import Suite, choose_device
from lit_data.commands.benchmarks.table import Line, Panel, collect, draw_bars, report_lines
from lit_data.datamodules.image_transform import ImageTransform
from lit_data.loading.device_timer import Call, one_thread, time_in_turn
from lit_data.synthesis import DefectPlan, render

log = logging.getLogger(__name__)


WAYS = ("original", "original_numpy", "local", "local_numpy", "batched", "device")
COLUMNS = (
    "family", "defects", *(f"{way}_us" for way in WAYS), "ratio_to_original", "ratio_to_local",
    "repeats",
)  # fmt: skip
_ALONE = 24
"""Defects of a batch, evenly spaced in its plan, that stand for all where each is drawn alone."""
_LABELS = {
    "original": "whole image, one at a time",
    "local": "own window, one at a time",
    "batched": "lit_data, a batch",
    "device": "lit_data, a batch on the device",
}
_MEASURED = (
    "family",
    *(name for name in COLUMNS if name.endswith("_us") or name.startswith("ratio")),
)
_HEADINGS = {
    "family": "family",
    "defects": "defects",
    **{f"{way}_us": way.replace("_numpy", " NumPy") for way in WAYS},
    "ratio_to_original": "x original",
    "ratio_to_local": "x local",
}
_COLOURS = {
    "original": "#c8cbd0",
    "local": "#8f949c",
    "batched": "#007aff",
    "device": "#34c759",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisSuite(Suite):
    """Speed of drawing defects on one core, as workers draw, beside the ways of others.

    A row for each family of defects, with medians of: ``original_us``, time of a defect computed
    over every pixel of the whole first image, one after the other; ``local_us``, in its own window,
    one after the other; ``batched_us``, in a batch, as lit_data does it; ``device_us``, the same on
    a CUDA device; ``original_numpy_us`` and ``local_numpy_us``, spots as NumPy draws them;
    ``ratio_to_original`` and ``ratio_to_local``, how often ``batched_us`` goes into those, or into
    NumPy's where that is faster.

    In summary.json also ``finish_ms``, a planned batch with all families until it is drawn and
    augmented, and with `compile` ``finish_compiled_ms``, or ``finish_compiled_note``, why it could
    not be compiled.

    Args:
        batch_size: Patches of a batch.
        compile: Measure the augmentation compiled by torch.compile too, which needs a C++ compiler.
    """

    batch_size: int = 384
    compile: bool = False

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        device = choose_device(self.device)
        scene = open_scene(cfg, self.batch_size)
        with one_thread():
            lines = _compare_ways(scene, self, device)
            metrics = _time_finish(scene, self, device)
        patches = len(scene.patches)
        shape = "x".join(map(str, scene.image.shape[1:]))
        title = f"{cfg.name}: us per defect, in batches of {patches} and on images of {shape}"
        folder = Path(cfg.paths.run)
        report_lines(lines, COLUMNS, folder, title, headings=_HEADINGS)
        draw_bars([make_panel(lines)], folder / "benchmark.png", title, "us per defect")
        for name, value in metrics.items():
            if name.endswith("_ms"):
                short_name = name.removeprefix("benchmark/")
                log.info("%s %.2f: a batch of %d, drawn and augmented", short_name, value, patches)
        metrics |= collect(lines, _MEASURED) | {"benchmark/batch_size": patches}
        for way in ("original", "local"):
            metrics[f"benchmark/ratio_to_{way}"] = lines[-1][f"ratio_to_{way}"]  # of all families
        return metrics


def compile_augmentation(transformation: ImageTransform) -> ImageTransform:
    """Compile the augmentation, whose shapes are those of the batch.

    Drawing is left as it is: with each batch come other numbers of defects, and other groups of
    them.

    Args:
        transformation: The steps from the loader to the model.
    """
    augment = {stage: Compiled(part) for stage, part in transformation.augment.items()}
    return replace(transformation, augment=augment)


def make_panel(lines: Sequence[Line]) -> Panel:
    """Make bars of the time that a defect of each family takes, for each way that was measured."""
    ways = [way for way in _LABELS if not math.isnan(lines[0][f"{way}_us"])]
    bars, colours = {}, {}
    for way in ways:
        bars[_LABELS[way]] = [_find_fastest(line, way) for line in lines]
        colours[_LABELS[way]] = _COLOURS[way]
    return Panel(names=[line["family"] for line in lines], bars=bars, colours=colours)


def _compare_ways(
    scene: Scene, options: SynthesisSuite, device: torch.device
) -> list[dict[str, Any]]:
    """Measure each family, and all together in the last line."""
    specs = {member.name: replace(scene.spec, families=(member,)) for member in scene.spec.members}
    specs["all"] = scene.spec
    patches_on_device = scene.patches.to(device) if device.type == "cuda" else None
    works: dict[str, Call] = {}
    counts: dict[str, dict[str, int]] = {}
    for family, spec in specs.items():
        ways, counts[family] = _list_ways(scene, scene.plan(spec), patches_on_device)
        works |= {f"{family}/{way}": work for way, work in ways.items()}
    times_s = time_in_turn(works, options.repeats, device)
    lines = []
    for family, ways_counts in counts.items():
        each_s = {way: times_s[f"{family}/{way}"] / count for way, count in ways_counts.items()}
        lines.append(_make_line(family, each_s, ways_counts, options.repeats))
    return lines


def _list_ways(
    scene: Scene, plan: DefectPlan, patches_on_device: Tensor | None
) -> tuple[dict[str, Call], dict[str, int]]:
    """List the work of each way, and the number of defects that it draws.

    Pixels are drawn on again and again: the cost does not depend on what they show.
    """
    numbers = sorted({len(plan) * step // _ALONE for step in range(_ALONE)})
    on_image = [alone._replace(row=0) for alone in take_alone(widen(plan, scene.size_px), numbers)]
    on_patches = take_alone(plan, numbers)
    plan_on_host, values = plan.to("cpu"), scene.values
    works: dict[str, Call] = {
        "original": lambda: draw_in_turn(scene.image, scene.image_mask, on_image, values),
        "local": lambda: draw_in_turn(scene.patches, scene.masks, on_patches, values),
        "batched": lambda: render(scene.patches, plan_on_host, values),
    }
    if plan.spec.has_plain_spots_only:
        spots = place_alone(scene.patches, plan, numbers, values)
        image = to_unit(scene.image[0], values)
        patch = to_unit(scene.patches[0], values)
        works["original_numpy"] = lambda: draw_everywhere(image, spots)
        works["local_numpy"] = lambda: draw_in_windows(patch, spots)
    if patches_on_device is not None:
        plan_on_device = plan.to(patches_on_device.device)
        works["device"] = lambda: render(patches_on_device, plan_on_device, values)
    counts = dict.fromkeys(works, len(numbers))
    counts |= {way: len(plan) for way in ("batched", "device") if way in works}
    return works, counts


def _time_finish(scene: Scene, options: SynthesisSuite, device: torch.device) -> dict[str, Any]:
    """Measure a planned batch until the model sees it, in ms; a note where that is not possible."""
    batch = {key: value.to(device) for key, value in scene.batch.items()}
    works: dict[str, Call] = {"finish": lambda: scene.transformation.finish(batch, "train")}
    metrics: dict[str, Any] = {}
    if options.compile:
        try:
            compiled = compile_augmentation(scene.transformation)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what the compiler cannot follow, and leaves
                compiled.finish(batch, "train")
            works["finish_compiled"] = lambda: compiled.finish(batch, "train")
        except Exception as error:  # compilers fail in many ways
            note = " ".join(str(error).split())[:300]
            log.warning("compiled augmentation: not available: %s", note)
            metrics["benchmark/finish_compiled_note"] = note
    for name, seconds in time_in_turn(works, options.repeats, device).items():
        metrics[f"benchmark/{name}_ms"] = 1e3 * seconds
    return metrics


def _make_line(
    family: str, each_s: Mapping[str, float], counts: Mapping[str, int], repeats: int
) -> dict[str, Any]:
    times_us = {f"{way}_us": 1e6 * each_s.get(way, math.nan) for way in WAYS}
    batched_us = times_us["batched_us"]
    return {
        "family": family,
        "defects": counts["batched"],
        **times_us,
        "ratio_to_original": _find_fastest(times_us, "original") / batched_us,
        "ratio_to_local": _find_fastest(times_us, "local") / batched_us,
        "repeats": repeats,
    }


def _find_fastest(line: Line, way: str) -> float:
    """Return the microseconds of a way, by torch or by NumPy, whichever is faster."""
    by_torch: float = line[f"{way}_us"]
    by_numpy: float = line.get(f"{way}_numpy_us", math.nan)
    return by_torch if math.isnan(by_numpy) else min(by_torch, by_numpy)
