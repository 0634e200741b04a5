"""Arguments of torch's DataLoader, with their meaning there."""

import multiprocessing.context
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypedDict

import torch

from lit_data.core.errors import ConfigError
from lit_data.loading.options import LoaderOptions

_NO_LIMIT_S = 1e6
"""Value of `timeout_s` for no limit: twelve days."""

_OPTIONS = {
    "batch_size": "batch_size",
    "num_workers": "num_workers",
    "pin_memory": "pin_memory",
    "drop_last": "drop_last",
    "timeout": "timeout_s",
    "prefetch_factor": "prefetch_batches",
    "multiprocessing_context": "start_method",
    "generator": "seed",
}
"""Arguments of torch, and the options that they set."""
_REFUSED: Mapping[str, tuple[object, str]] = {
    "batch_sampler": (None, "give sampler= and batch_size="),
    "pin_memory_device": ("", "batches are pinned for the device of the run: remove it"),
    "in_order": (True, "batches always come in order: remove it"),
}
"""Arguments that are not supported except for one value, and the advice to give."""


class TorchOptions(TypedDict, total=False):
    """Arguments of torch's DataLoader that set options of `LoaderOptions`.

    Attributes:
        batch_size: `LoaderOptions.batch_size`, 32 by default.
        num_workers: `LoaderOptions.num_workers`.
        pin_memory: `LoaderOptions.pin_memory`.
        drop_last: `LoaderOptions.drop_last`.
        timeout: Longest wait for one micro-batch, s; 0 for no limit.
        prefetch_factor: Batches to prefetch for each of `num_workers`.
        multiprocessing_context: `LoaderOptions.start_method`, or a context with a start method.
        generator: Generator from which the seed is drawn once, the same on all ranks.
        persistent_workers: Keep the workers between passes; the default for a random order.
        batch_sampler: Not supported.
        pin_memory_device: Not supported.
        in_order: Always True.
    """

    batch_size: int
    num_workers: int | Literal["auto"]
    pin_memory: bool | Literal["auto"]
    drop_last: bool
    timeout: float
    prefetch_factor: int | None
    multiprocessing_context: str | multiprocessing.context.BaseContext | None
    generator: torch.Generator | None
    persistent_workers: bool
    batch_sampler: None
    pin_memory_device: str
    in_order: bool


def merge_options(options: LoaderOptions | None, arguments: TorchOptions) -> LoaderOptions:
    """Return the options with the arguments of torch's DataLoader applied.

    Raises:
        ConfigError: An argument is given twice, is not supported, or is out of its range.
        TypeError: An argument is neither one of torch's DataLoader nor an option of lit_data.
    """
    if options is not None and not isinstance(options, LoaderOptions):
        raise ConfigError(
            f"options={options!r} are not LoaderOptions: name each argument of torch's "
            "DataLoader, as in MicroBatchLoader(dataset, batch_size=8)"
        )
    for name, value in arguments.items():
        _check_known(name, value)
    base, usual = options or LoaderOptions(), LoaderOptions()
    for name in arguments.keys() & _OPTIONS.keys():
        if getattr(base, _OPTIONS[name]) != getattr(usual, _OPTIONS[name]):
            raise ConfigError(_describe_double(name, base))
    if "batch_size" in arguments and base.global_batch_size is not None:
        raise ConfigError(
            "batch_size and options.global_batch_size exclude each other: give one of them"
        )
    return _translate(base, arguments)


def keeps_workers(options: LoaderOptions, arguments: TorchOptions, *, shuffled: bool) -> bool:
    """Return True if workers stay between passes.

    Raises:
        ConfigError: `persistent_workers` is set, and there are no workers.
    """
    if arguments.get("persistent_workers") and options.num_workers == 0:
        raise ConfigError("persistent_workers=True, but num_workers=0: remove one of them")
    return arguments.get("persistent_workers", shuffled)


def choose_kind(
    options: LoaderOptions, worker_init_fn: Callable[[int], None] | None
) -> LoaderOptions:
    """Return options with worker processes if there are workers and a `worker_init_fn`.

    Raises:
        ConfigError: The workers are threads, which do not run `worker_init_fn`.
    """
    if worker_init_fn is None or options.num_workers == 0:
        return options
    if options.worker_kind == "thread":
        raise ConfigError("worker_init_fn runs in worker processes: set worker_kind=process")
    return replace(options, worker_kind="process") if options.worker_kind == "auto" else options


def _check_known(name: str, value: object) -> None:
    if name in _REFUSED:
        allowed, cure = _REFUSED[name]
        if value != allowed:
            raise ConfigError(
                f"{name}={value!r} is not possible: {cure}, or use torch's DataLoader"
            )
    elif name in LoaderOptions.__dataclass_fields__ and name not in _OPTIONS:
        raise ConfigError(
            f"{name} is an option of lit_data: give MicroBatchLoader(dataset, "
            f"LoaderOptions({name}={value!r}))"
        )
    elif name not in TorchOptions.__annotations__:
        raise TypeError(f"MicroBatchLoader has no argument {name!r}")


def _describe_double(name: str, options: LoaderOptions) -> str:
    option = _OPTIONS[name]
    value = getattr(options, option)
    return f"{name} is given twice, by its name and in options ({option}={value!r}): give it once"


def _translate(base: LoaderOptions, arguments: TorchOptions) -> LoaderOptions:
    changes: dict[str, Any] = {}
    for name, value in arguments.items():
        if _OPTIONS.get(name) == name:
            changes[name] = value
    if "timeout" in arguments:
        changes["timeout_s"] = arguments["timeout"] or _NO_LIMIT_S
    context = arguments.get("multiprocessing_context")
    if context is not None:
        changes["start_method"] = context if isinstance(context, str) else _method(context)
    generator = arguments.get("generator")
    if generator is not None:
        drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
        changes["seed"] = int(drawn.item())
    options = replace(base, **changes)
    factor = arguments.get("prefetch_factor")
    return options if factor is None else _prefetch(options, factor)


def _method(context: Any) -> str | None:  # noqa: ANN401 - a context of any start method
    method: Callable[[], str | None] = context.get_start_method
    return method()


def _prefetch(options: LoaderOptions, factor: int) -> LoaderOptions:
    workers = options.num_workers
    if workers == "auto" or not workers:
        raise ConfigError(
            f"prefetch_factor={factor} counts batches of each worker, and num_workers={workers}: "
            "set num_workers to at least 1, or LoaderOptions(prefetch_batches=...)"
        )
    return replace(options, prefetch_batches=factor * workers)
