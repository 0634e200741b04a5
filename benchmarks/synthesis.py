"""Mode ``synthesis``: how fast defects are drawn, beside the ways in which people draw them."""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

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
from lit_data.datamodules.stripe_transform import StripeTransform
from lit_data.loading.device_timer import Call, one_thread, time_in_turn
from lit_data.synthesis import DefectPlan, render

log = logging.getLogger(__name__)


WAYS: Final = ("original", "original_numpy", "local", "local_numpy", "batched", "device")
COLUMNS: Final = (
    "family", "defects", *(f"{way}_us" for way in WAYS), "ratio_to_original", "ratio_to_local", "repeats",
)  # fmt: skip
_ALONE: Final = 24
"""Defects of a batch, evenly spaced in its plan, that stand for all where each is drawn by itself."""
_LABELS: Final = {
    "original": "whole image, one at a time",
    "local": "own window, one at a time",
    "batched": "lit_data, a batch",
    "device": "lit_data, a batch on the device",
}
_MEASURED: Final = (
    "family",
    *(name for name in COLUMNS if name.endswith("_us") or name.startswith("ratio")),
)
_HEADINGS: Final = {
    "family": "family",
    "defects": "defects",
    **{f"{way}_us": way.replace("_numpy", " NumPy") for way in WAYS},
    "ratio_to_original": "x original",
    "ratio_to_local": "x local",
}
_COLOURS: Final = {
    "original": "#c8cbd0",
    "local": "#8f949c",
    "batched": "#007aff",
    "device": "#34c759",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisSuite(Suite):
    """How fast defects are drawn, beside the ways in which people draw them, on one core as workers
    draw.

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
            lines, finish = _compare_ways(scene, self, device), _time_finish(scene, self, device)
        folder, shape = Path(cfg.paths.run), "x".join(map(str, scene.image.shape[1:]))
        title = f"{cfg.name}: us per defect, in batches of {len(scene.patches)} and on images of {shape}"
        report_lines(lines, COLUMNS, folder, title, headings=_HEADINGS)
        draw_bars([make_panel(lines)], folder / "benchmark.png", title, "us per defect")
        for name in (name for name in finish if name.endswith("_ms")):
            log.info(
                "%s %.2f: a batch of %d, drawn and augmented",
                name,
                finish[name],
                len(scene.patches),
            )
        return (
            collect(lines, _MEASURED)
            | {
                f"benchmark/{name}": lines[-1][name]
                for name in _MEASURED
                if name.startswith("ratio")
            }
            | {"benchmark/batch_size": len(scene.patches)}
            | finish
        )


def compile_augmentation(transformation: StripeTransform) -> StripeTransform:
    """The same with compiled augmentation, whose shapes are those of the batch.

    Drawing is left as it is: with each batch come other numbers of defects, and other groups of
    them.

    Args:
        transformation: What happens to batches.
    """
    return replace(
        transformation,
        augment={stage: Compiled(part) for stage, part in transformation.augment.items()},
    )


def make_panel(lines: Sequence[Line]) -> Panel:
    """What a defect of each family takes, a bar for each way that was measured."""
    ways = [way for way in _LABELS if not math.isnan(lines[0][f"{way}_us"])]
    return Panel(
        names=[line["family"] for line in lines],
        bars={_LABELS[way]: [_find_fastest(line, way) for line in lines] for way in ways},
        colours={_LABELS[way]: _COLOURS[way] for way in ways},
    )


def _compare_ways(
    scene: Scene, options: SynthesisSuite, device: torch.device
) -> list[dict[str, Any]]:
    """A line for each family, and one for all together."""
    specs = {member.name: replace(scene.spec, families=(member,)) for member in scene.spec.members}
    there = scene.patches.to(device) if device.type == "cuda" else None
    rows = {
        row: _list_ways(scene, scene.plan(spec), there)
        for row, spec in (specs | {"all": scene.spec}).items()
    }
    works = {f"{row}/{way}": work for row, (ways, _) in rows.items() for way, work in ways.items()}
    times_s = time_in_turn(works, options.repeats, device)
    return [
        _make_line(
            row,
            {way: times_s[f"{row}/{way}"] / counts[way] for way in ways},
            counts,
            options.repeats,
        )
        for row, (ways, counts) in rows.items()
    ]


def _list_ways(
    scene: Scene, plan: DefectPlan, there: Tensor | None
) -> tuple[dict[str, Call], dict[str, int]]:
    """For each way what it does, and how many defects that draws.

    Pixels are drawn on again and again: what it costs does not depend on what they show.
    """
    numbers = sorted({len(plan) * step // _ALONE for step in range(_ALONE)})
    whole = [alone._replace(row=0) for alone in take_alone(widen(plan, scene.size_px), numbers)]
    local, on_host, values = take_alone(plan, numbers), plan.to("cpu"), scene.values
    works: dict[str, Call] = {
        "original": lambda: draw_in_turn(scene.image, scene.image_mask, whole, values),
        "local": lambda: draw_in_turn(scene.patches, scene.masks, local, values),
        "batched": lambda: render(scene.patches, on_host, values),
    }
    if plan.spec.has_plain_spots_only:
        spots = place_alone(scene.patches, plan, numbers, values)
        image, patch = to_unit(scene.image[0], values), to_unit(scene.patches[0], values)
        works["original_numpy"] = lambda: draw_everywhere(image, spots)
        works["local_numpy"] = lambda: draw_in_windows(patch, spots)
    if there is not None:
        plan_there = plan.to(there.device)
        works["device"] = lambda: render(there, plan_there, values)
    return works, {
        way: len(plan) if way in ("batched", "device") else len(numbers) for way in works
    }


def _time_finish(scene: Scene, options: SynthesisSuite, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a planned batch until the model sees it, and why not where that is not known."""
    batch = {key: value.to(device) for key, value in scene.batch.items()}
    works: dict[str, Call] = {"finish": lambda: scene.transformation.finish(batch, "train")}
    found: dict[str, Any] = {}
    try:
        if options.compile:
            compiled = compile_augmentation(scene.transformation)
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # of what the compiler cannot follow, which it leaves as it is
                compiled.finish(batch, "train")
            works["finish_compiled"] = lambda: compiled.finish(batch, "train")
    except Exception as error:  # compilers fail in many ways
        note = " ".join(str(error).split())[:300]
        log.warning("compiled augmentation: not available: %s", note)
        found["benchmark/finish_compiled_note"] = note
    times_s = time_in_turn(works, options.repeats, device)
    return found | {f"benchmark/{name}_ms": 1e3 * seconds for name, seconds in times_s.items()}


def _make_line(
    family: str, each_s: Mapping[str, float], counts: Mapping[str, int], repeats: int
) -> dict[str, Any]:
    times_us = {f"{way}_us": 1e6 * each_s.get(way, math.nan) for way in WAYS}
    ratios = {
        f"ratio_to_{way}": _find_fastest(times_us, way) / times_us["batched_us"]
        for way in ("original", "local")
    }
    return {
        "family": family,
        "defects": counts["batched"],
        **times_us,
        **ratios,
        "repeats": repeats,
    }


def _find_fastest(line: Line, way: str) -> float:
    """Microseconds of a way, as torch or as NumPy does it."""
    in_numpy: float = line.get(f"{way}_numpy_us", math.nan)
    in_torch: float = line[f"{way}_us"]
    return in_torch if math.isnan(in_numpy) else min(in_torch, in_numpy)
