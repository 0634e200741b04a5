"""``doctor``: this machine, what commonly hurts there, and what to do about it."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
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
    """Look at the machine, as this configuration uses it: from versions to the environment.

    Prints a table, the worst first, and writes it to ``doctor.json``. Nothing is changed, and no
    images are read.

    Returns:
        Numbers of faults, warnings and notes.
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
    folders = {f"paths.{key}": str(cfg.paths[key]) for key in ("cache", "runs")}
    accelerator = str(cfg.trainer.get("accelerator"))
    return [
        *check_packages(),
        *check_machine(),
        *check_disks(folders),
        *check_devices(count_cores(), pins=loader.pins_memory, accelerator=accelerator),
        _check_precision(cfg),
        *check_environment(os.environ),
        *check_last_run(Path(cfg.paths.runs) / "fit" / str(cfg.name)),
    ]


def _check_precision(cfg: DictConfig) -> Finding:
    """Compare the configured precision with the one that the device is fast in."""
    device_type = "cpu" if cfg.trainer.get("accelerator") == "cpu" else _choose_device().type
    amp = (cfg.get("callbacks") or {}).get("amp") or {}
    used = cfg.trainer.get("precision")
    if used is None:
        used = amp.get("precision", "fp32")
    return judge_precision(device_type, has_bf16=has_fast_bf16(device_type), used=str(used))


def check_last_run(folder: Path) -> Iterator[Finding]:
    """Look at what limited the newest run of an experiment: data, the disk, or something else.

    Args:
        folder: Of its runs; it need not exist.
    """
    summaries = folder.glob("**/summary.json")
    newest = max(summaries, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return
    try:
        summary = read_summary(newest.parent)
    except DataError:
        return
    waited_fraction = summary.get("data_wait_fraction")
    limit = str(summary.get("train/limited_by", ""))
    if not limit or not isinstance(waited_fraction, int | float):
        return
    cause, _, remedy = limit.partition(": try ")  # the sentence of `DataWaitMonitor`
    state = f"{newest.parent.name}: {cause}; {waited_fraction:.0%} of it went by waiting for data"
    remedy = f"try {remedy or 'docs/choosing.md'}"
    yield judge("last run", state, bad=waited_fraction >= _LEAST_WAIT, remedy=remedy)


def _choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _make_table(findings: Sequence[Finding]) -> Table:
    table = Table("", "what", "found", "what to do", pad_edge=False)
    for finding in findings:
        level = f"[{_STYLES[finding.level]}]{finding.level}[/]"
        words = (finding.what, finding.found, finding.remedy)
        table.add_row(level, *(escape(word) for word in words))
    return table
