"""Environment variables that slow a run down or send it the wrong way."""

from collections.abc import Iterator, Mapping
from typing import Final

from lit_data.commands.diagnosis.finding import Finding

_SLOW: Final = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "TORCH_SHOW_CPP_STACKTRACES": "errors are slow, and AdaptiveBatchSize catches them",
    "PYTHONDEVMODE": "Python's debug checks are on",
    "PYTHONMALLOC": "Python's debug allocator may be on",
    "TORCH_DISTRIBUTED_DEBUG": "ranks check each other at each step",
}
_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def check_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What is set and commonly hurts.

    Args:
        environment: `os.environ`.
    """
    yield from _find_slow(environment)
    yield from _find_ranks(environment)
    if not environment.get("PYTORCH_CUDA_ALLOC_CONF") and not environment.get("PYTORCH_ALLOC_CONF"):
        remedy = "with sizes that change: export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield Finding("ok", "allocator", "torch's default", remedy)


def _find_slow(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, why in _SLOW.items():
        value = environment.get(name, "")
        if value not in ("", "0", "OFF", "INFO", "default", "pymalloc"):
            yield Finding("warning", name, value, f"{why}: unset it for long runs")


def _find_ranks(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Leftovers of a launcher, which make Lightning wait for ranks that never come."""
    left = [name for name in _RANKS if name in environment]
    if left and "MASTER_ADDR" not in environment:
        yield Finding("fault", "ranks", f"{', '.join(left)} set without MASTER_ADDR", f"unset {' '.join(left)}")
    tasks = environment.get("SLURM_NTASKS", "1")
    if tasks.isdigit() and int(tasks) > 1 and environment.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        remedy = "in this shell a run is one task: unset SLURM_NTASKS, or start it with srun"
        yield Finding("warning", "ranks", f"an interactive SLURM job of {tasks} tasks", remedy)
