"""``doctor``: what this machine is, what commonly hurts, and what to do about it."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_data.commands.configuration.targets import instantiate
from lit_data.commands.diagnosis.device import check_devices, check_disks, judge_precision
from lit_data.commands.diagnosis.finding import LEVELS, Finding, judge
from lit_data.commands.diagnosis.machine import (
    check_environment,
    check_machine,
    check_packages,
    describe_machine,
    print_machine,
)
from lit_data.commands.result import read_summary
from lit_data.devices import has_fast_bf16
from lit_data.errors import DataError
from lit_data.files import write_json
from lit_data.loading import LoaderOptions
from lit_data.loading.machine import count_cores

_LEAST_WAIT: Final = 0.05
_STYLES: Final = {"fault": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def run(cfg: DictConfig) -> dict[str, Any]:
    """Look at versions, cores, memory, limits, disks, devices and the environment, as this
    configuration uses them.

    Prints a table, the worst first, and writes it to ``doctor.json``. Nothing is changed, and no
    images are read.

    Returns:
        How many faults, warnings and notes there are.
    """
    findings = sorted(_look(cfg), key=lambda finding: LEVELS.index(finding.level))
    machine = describe_machine(_choose_device())
    console = Console()
    console.print(print_machine(machine), highlight=False, soft_wrap=True)
    console.print(_make_table(findings))
    report = {"machine": machine, "findings": [asdict(finding) for finding in findings]}
    write_json(Path(cfg.paths.run) / "doctor.json", report)
    counts = Counter(finding.level for finding in findings)
    return {f"doctor/{level}s": counts[level] for level in LEVELS if level != "ok"}


def _look(cfg: DictConfig) -> list[Finding]:
    loader = instantiate(cfg.data.loader) if "loader" in cfg.data else LoaderOptions()
    return [
        *check_packages(),
        *check_machine(),
        *check_disks({f"paths.{key}": str(cfg.paths[key]) for key in ("cache", "runs")}),
        *check_devices(
            count_cores(), pins=loader.pins_memory, accelerator=str(cfg.trainer.get("accelerator"))
        ),
        _check_precision(cfg),
        *check_environment(os.environ),
        *check_last_run(Path(cfg.paths.runs) / "fit" / str(cfg.name)),
    ]


def _check_precision(cfg: DictConfig) -> Finding:
    """Compare the precision that training is configured to have with what its device is fast in."""
    device_type = "cpu" if cfg.trainer.get("accelerator") == "cpu" else _choose_device().type
    callback = (cfg.get("callbacks") or {}).get("amp") or {}
    of_trainer = cfg.trainer.get("precision")
    used = str(of_trainer if of_trainer is not None else callback.get("precision", "fp32"))
    return judge_precision(device_type, has_bf16=has_fast_bf16(device_type), used=used)


def check_last_run(folder: Path) -> Iterator[Finding]:
    """What the newest run of an experiment waited for: data, and there the disk too, or nothing
    worth a word.

    Args:
        folder: Of its runs; it need not exist.
    """
    newest = max(
        folder.glob("**/summary.json"), key=lambda path: path.stat().st_mtime, default=None
    )
    found: dict[str, Any] = {}
    with suppress(DataError):
        found = read_summary(newest.parent) if newest else {}
    waited, limit = found.get("data_wait_fraction"), str(found.get("train/limited_by", ""))
    if newest and limit and isinstance(waited, int | float):
        what, _, remedy = limit.partition(": try ")
        text = f"{newest.parent.name}: {what}; {waited:.0%} of it went by waiting for data"
        yield judge(
            "last run",
            text,
            bad=waited >= _LEAST_WAIT,
            remedy=f"try {remedy or 'docs/choosing.md'}",
        )


def _choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _make_table(findings: Sequence[Finding]) -> Table:
    table = Table("", "what", "found", "what to do", pad_edge=False)
    for finding in findings:
        table.add_row(
            f"[{_STYLES[finding.level]}]{finding.level}[/]",
            *map(escape, (finding.what, finding.found, finding.remedy)),
        )
    return table
