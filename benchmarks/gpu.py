"""Suite ``gpu``: what a GPU does for these workloads, in one table within eight minutes."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from typing_extensions import override

from benchmarks.gpu_parts import PARTS, Ask, DeviceScene, UnavailableError
from benchmarks.suite import Suite
from lit_data.app.benchmarks.options import choose_device
from lit_data.app.benchmarks.table import write_lines
from lit_data.app.machine import describe_machine

log = logging.getLogger(__name__)

COLUMNS = ("part", "what", "value", "unit")
_FAILED = "failed"

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUSuite(Suite):
    """Questions to a device, those that people ask first; each answer is a row of one table.

    Training with the loaders of others and with ours, copies, drawing and augmentation, precisions,
    a batch that does not fit, the cost of releasing memory, a GAN's peaks, prediction. What fails,
    or cannot be had here, is a row too, and the other questions are asked all the same.
    benchmark.csv is written after each part, so an interrupted run keeps its rows. summary.json
    holds ``PART_WHAT`` for each row with a number, and ``failed``, how many parts did. It runs on
    the CPU too, without what needs CUDA.

    Args:
        batch_size: Samples of a batch.
        steps: Of each training.
        plain_steps: Of each training with a loader of others, which may be very slow.
        warmup_batches: Steps before them.
        seconds: No part starts later than this.
        gan_px: Size of the images of the GAN.
        tile_px: Size of the tiles of prediction.
        images: To predict, of twice the size of a tile.
    """

    batch_size: int = 384
    steps: int = 20
    plain_steps: int = 4
    warmup_batches: int = 3
    seconds: int = 420
    gan_px: int = 64
    tile_px: int = 512
    images: int = 64

    @override
    def run(self, cfg: DictConfig) -> dict[str, Any]:
        scene = DeviceScene(cfg, self, choose_device(self.device))
        ends_s = time.monotonic() + self.seconds
        path = Path(cfg.paths.run) / "benchmark.csv"
        lines: list[Line] = []
        for name, ask in PARTS.items():
            log.info("%s ...", name)
            if time.monotonic() < ends_s:
                answers = list(answer_part(ask, scene))
            else:
                answers = [_note("left out", "no time left: set suite.seconds")]
            lines += [{"part": name, **line} for line in answers]
            write_lines(lines, COLUMNS, path)
        print(format_table(lines, describe_machine(scene.device)))
        failed = [line["part"] for line in lines if line["what"] == _FAILED]
        if failed:
            log.error("failed: %s; hydra.verbose=true shows where", ", ".join(failed))
        metrics = {"benchmark/batch_size": self.batch_size, "benchmark/failed": len(failed)}
        for line in lines:
            if not isinstance(line["value"], str):
                key = f"benchmark/{line['part']}_{line['what']}".replace(" ", "_")
                metrics[key] = line["value"]
        return metrics


def format_table(lines: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> str:
    """Format a table of Markdown, as it goes into BENCHMARKS.md."""
    head = ["", f"{time.strftime('%Y-%m-%d')}, {machine['device']}, torch {machine['torch']}.", ""]
    rows = ["| part | what | value |", "|---|---|---|"]
    for line in lines:
        value = line["value"]
        text = value if isinstance(value, str) else f"{value:.4g} {line['unit']}".strip()
        rows.append(f"| {line['part']} | {line['what']} | {text} |")
    return "\n".join([*head, *rows, ""])


def answer_part(ask: Ask, scene: DeviceScene) -> Iterator[Line]:
    """Yield the answers of one part; an error is one too, and the next part is asked then."""
    try:
        for what, value, unit in ask(scene):
            yield {"what": what, "value": value, "unit": unit}
    except UnavailableError as error:
        yield _note("left out", str(error))
    except Exception as error:
        log.debug("the error", exc_info=error)
        yield _note(_FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _note(what: str, text: str) -> Line:
    return {"what": what, "value": text, "unit": ""}
