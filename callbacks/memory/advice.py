"""What costs memory in a run that was set up so, and what to do instead."""

import inspect
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_data.callbacks.memory.host_memory import format_bytes
from lit_data.callbacks.wrapping import wrap
from lit_data.loading.machine import count_cores, count_local_ranks

log = logging.getLogger(__name__)


_ZEROED: Final = re.compile(r"zero_grad\(\s*(set_to_none\s*=\s*)?False")
_SHARED: Final = Path("/dev/shm")
_LAST_ITEMS: Final = 4
_LOOKS: Final = 3


class Adviser:
    """Logs what costs memory in a run, each sentence once.

    Attributes:
        looks: First steps that are still to be looked at.
    """

    def __init__(self) -> None:
        self.looks = 0
        self._told: set[str] = set()
        self._unwatch: Callable[[], None] | None = None

    def start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the run before its first step, then at its first batch and its first steps."""
        self.stop()
        self._tell(find_advice(trainer, pl_module))
        self.looks, free_bytes = _LOOKS, free_shared_bytes()  # before the workers fill it

        def see_first(call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.stop()
            self._tell(advise_shared_memory(count_transport_bytes(trainer, batch), free_bytes))
            return call(batch, *args, **kwargs)

        self._unwatch = wrap(trainer.strategy, "batch_to_device", see_first)

    def look(self, pl_module: L.LightningModule, outputs: Any) -> None:  # noqa: ANN401 - what a step returned
        """One of the first steps ended."""
        self.looks -= 1
        self._tell(find_kept_graphs(pl_module, outputs))

    def stop(self) -> None:
        """Leave the Trainer as it was."""
        if self._unwatch is not None:
            self._unwatch()
        self._unwatch = None

    def _tell(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            if sentence not in self._told:
                log.warning("%s", sentence)
            self._told.add(sentence)


def find_advice(trainer: L.Trainer, pl_module: L.LightningModule) -> list[str]:
    """What can be seen before the first step; each sentence names the remedy.

    Args:
        trainer: Whose loaders are set up.
        pl_module: What it trains.
    """
    loaders = [*_flatten(trainer.train_dataloader), *_flatten(trainer.val_dataloaders)]
    found = [*_check_default_device(), *_check_zero_grad(pl_module)]
    for loader in loaders:
        found += [
            *_check_workers(loader, trainer.world_size),
            *_check_pinning(loader, trainer.strategy.root_device),
        ]
    return list(dict.fromkeys(found))


def find_kept_graphs(pl_module: L.LightningModule, outputs: Any) -> list[str]:  # noqa: ANN401 - what a step returned
    """Tensors of a finished training step that still hold its graph, and so the activations that it
    saved.

    Args:
        pl_module: Whose lists and dicts are looked into.
        outputs: What ``training_step`` returned, as the hooks get it.
    """
    found = []
    if _holds_graph(outputs):
        found.append(
            "training_step returns tensors with their graph beside the loss, which keeps it alive after the step: "
            "return x.detach()"
        )
    for name, value in vars(pl_module).items():
        if isinstance(value, list | dict) and not name.startswith("_") and _holds_graph(value):
            found.append(
                f"{type(pl_module).__name__}.{name} keeps tensors with their graph, so the memory of each step stays: "
                f"put x.detach() or x.item() into it, and empty it at the end of the epoch"
            )
    return found


def count_transport_bytes(trainer: L.Trainer, batch: Any) -> int:  # noqa: ANN401 - any nesting of tensors
    """Shared memory that the worker processes of the training loaders fill with batches that wait.

    Args:
        trainer: Whose `torch.utils.data.DataLoader` passes batches through /dev/shm; other loaders
            count nothing.
        batch: One as it came from the loader.
    """
    waiting = [
        loader.num_workers * (loader.prefetch_factor or 1)
        for loader in _flatten(trainer.train_dataloader)
        if isinstance(loader, DataLoader)
    ]
    return max(waiting, default=0) * _count_bytes(batch)


def free_shared_bytes() -> int | None:
    """What is free in /dev/shm; nothing where there is none."""
    try:
        return shutil.disk_usage(_SHARED).free
    except OSError:
        return None


def advise_shared_memory(needed_bytes: int, free_bytes: int | None) -> list[str]:
    """Say so if batches that wait do not fit into /dev/shm: a worker that meets its end dies of a
    bus error.

    Args:
        needed_bytes: See `count_transport_bytes`.
        free_bytes: See `free_shared_bytes`; before the workers began.
    """
    if free_bytes is None or needed_bytes <= free_bytes:
        return []
    return [
        f"batches that wait for training need up to {format_bytes(needed_bytes)} of {_SHARED} and "
        f"{format_bytes(free_bytes)} were free: workers will die of a bus error. Give it more (docker run "
        "--shm-size), lower num_workers or prefetch_factor, or use lit_data.loading.MicroBatchLoader"
    ]


def _check_default_device() -> Iterator[str]:
    device = torch.empty(0).device
    if device.type != "cpu":
        yield (
            f"the default device is {device}: every tensor that names no device is made there, also in datasets and "
            "transforms. Remove torch.set_default_device or torch.set_default_tensor_type, and name the device where "
            "it is meant"
        )


def _check_workers(loader: Any, world_size: int) -> Iterator[str]:  # noqa: ANN401 - any loader
    workers, cores = getattr(loader, "num_workers", 0), count_cores(count_local_ranks(world_size))
    if isinstance(workers, int) and workers > cores:
        yield (
            f"a {type(loader).__name__} has num_workers={workers} and this process has {cores} cores: each worker "
            f"takes memory and they wait for each other. Set num_workers={cores} or lower"
        )


def _check_pinning(loader: Any, device: torch.device) -> Iterator[str]:  # noqa: ANN401
    if getattr(loader, "pin_memory", False) is True and device.type in ("cpu", "mps"):
        yield (
            f"a {type(loader).__name__} has pin_memory=True and this run is on {device.type}: page-locked memory only "
            "helps copies to CUDA. Set pin_memory=False"
        )


def _check_zero_grad(pl_module: L.LightningModule) -> Iterator[str]:
    for kind in type(pl_module).__mro__:
        if kind.__module__.startswith(("lightning.", "torch.", "builtins")):
            continue
        with suppress(OSError, TypeError):  # made without a source file
            if _ZEROED.search(inspect.getsource(kind)):
                yield (
                    f"{kind.__name__} calls zero_grad(set_to_none=False), which keeps the memory of all gradients "
                    "between steps: call zero_grad() or leave out optimizer_zero_grad"
                )


def _flatten(loaders: Any) -> list[Any]:  # noqa: ANN401 - a loader, or any nesting of loaders
    if isinstance(loaders, Mapping):
        return [loader for part in loaders.values() for loader in _flatten(part)]
    if isinstance(loaders, list | tuple):
        return [loader for part in loaders for loader in _flatten(part)]
    return [] if loaders is None else [loaders]


def _holds_graph(value: Any) -> bool:  # noqa: ANN401 - any nesting
    """Whether a tensor in it has a graph; of long lists the last entries are looked at."""
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if isinstance(value, Mapping):
        return any(map(_holds_graph, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_graph, value[-_LAST_ITEMS:]))


def _count_bytes(batch: Any) -> int:  # noqa: ANN401
    if isinstance(batch, Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(map(_count_bytes, batch.values()))
    return sum(map(_count_bytes, batch)) if isinstance(batch, list | tuple) else 0
