"""Reports of what used the memory when it ran out, as text files in the run folder."""

import gc
import itertools
import logging
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, Trainer
from torch import Tensor

from lit_data.callbacks.device_memory import MemoryReading, read_rss_bytes
from lit_data.callbacks.loader_facts import count_batch
from lit_data.callbacks.memory.record import format_bytes, read_tree
from lit_data.core.batch_form import walk_tensors
from lit_data.core.errors import causes_of
from lit_data.core.machine import available_memory_bytes
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

ROWS = 25
"""Number of tensors that a report lists."""

_CURES = {
    "AMP": "AMP",
    "GradientCheckpointing": "GradientCheckpointing",
    "AdaptiveBatchSize": "AdaptiveBatchSize, which splits it",
}
"""Callbacks that need less memory, with what is said of them."""
_MOST_REPORTS = 5
_MOST_SHAPES = 8
_NOTE = "MemoryMonitor: out of memory"
_Storage = tuple[torch.device, int]
"""Device and address of memory."""


class HeldTensor(NamedTuple):
    """Memory that a tensor holds, without a reference to the tensor.

    Attributes:
        nbytes: Bytes of its storage, which views share.
        shape: Shape of the owner's tensor, else of the largest view.
        dtype: Data type of the tensor.
        device: Device of the tensor.
        kind: ``parameters``, ``gradients``, ``optimizer state``, ``buffers`` or ``activations
            and other``.
        owner: The kind with the name of the parameter or buffer.
    """

    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    kind: str
    owner: str


class _Owned(NamedTuple):
    value: object  # a tensor, or something else
    kind: str
    owner: str


def find_tensors(module: torch.nn.Module, optimizers: Sequence[Any]) -> list[HeldTensor]:
    """Return the tensors that Python sees in this process, largest first.

    Tensors that only autograd keeps for backward are not included.

    Args:
        module: Module whose parameters and buffers are named.
        optimizers: Optimizers of its parameters.

    Returns:
        One entry for each storage.
    """
    # isinstance would read the class of proxies, which can run any code
    visible = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    others = (_Owned(tensor, "activations and other", "activation or other") for tensor in visible)
    held: dict[_Storage, HeldTensor] = {}
    # in this order, so that tensors with an owner keep its name
    _add_storages(held, _name_owned(module, optimizers))
    _add_storages(held, others)
    return sorted(held.values(), key=lambda tensor: -tensor.nbytes)


def _name_owned(module: torch.nn.Module, optimizers: Sequence[Any]) -> Iterator[_Owned]:
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        yield _Owned(parameter, "parameters", f"parameter {name}")
        yield _Owned(parameter.grad, "gradients", f"gradient of {name}")
    for name, buffer in module.named_buffers():
        yield _Owned(buffer, "buffers", f"buffer {name}")
    for optimizer in optimizers:
        for parameter, state in getattr(optimizer, "state", {}).items():
            owner = names.get(id(parameter), "a parameter")
            for key, value in state.items():
                yield _Owned(value, "optimizer state", f"optimizer state {key} of {owner}")


def _add_storages(held: dict[_Storage, HeldTensor], owned: Iterable[_Owned]) -> None:
    """Add the storages that are not held yet, each with the shape of its largest tensor."""
    tensors: dict[_Storage, HeldTensor] = {}
    for tensor, kind, owner in owned:
        if not isinstance(tensor, Tensor):
            continue
        with suppress(Exception):  # sparse, fake and wrapped tensors have no storage of their own
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta" or not storage.nbytes():
                continue
            key = (tensor.device, storage.data_ptr())
            if key not in tensors or tensor.numel() > tensors[key].shape.numel():
                form = (tensor.shape, tensor.dtype, tensor.device)
                tensors[key] = HeldTensor(storage.nbytes(), *form, kind, owner)
    for key, largest in tensors.items():
        held.setdefault(key, largest)


class SeenBatch(NamedTuple):
    """A batch of which only the shapes are kept.

    Attributes:
        stage: Lightning's name of the stage, such as ``train`` or ``validate``.
        number: Number of the batch in the epoch.
        samples: Number of samples in the batch; 0 if it is not known.
        shapes: Shape and type of its first tensors.
    """

    stage: str
    number: int
    samples: int
    shapes: Sequence[tuple[torch.Size, torch.dtype]]

    def __str__(self) -> str:
        shapes = ", ".join(f"{list(shape)} {_name(dtype)}" for shape, dtype in self.shapes)
        # 0 if the samples cannot be counted in this form of batch
        samples = counted(self.samples, "sample") if self.samples else "unknown samples"
        return f"{self.stage} batch {self.number}: {samples}: {shapes or 'no tensors'}"


class PostMortems:
    """Writes ``oom-<n>.txt``, at most 5 in a run, without overwriting any.

    If torch records allocations, ``oom-<n>.pickle`` beside it is its snapshot of the allocator.
    """

    def __init__(self) -> None:
        self._reports_left = _MOST_REPORTS

    def write(
        self,
        folder: Path,
        trainer: Trainer,
        error: BaseException | None,
        reading: MemoryReading,
        batches: Sequence[SeenBatch],
        *,
        with_snapshot: bool = False,
    ) -> Path | None:
        """Write the next report; a problem is logged and not raised.

        Args:
            folder: Folder for the file; it is created if it does not exist.
            trainer: Trainer whose module and optimizers own tensors.
            error: Error that is still being handled, so that the tensors of the failed step still
                exist.
            reading: Memory of the device.
            batches: The last batches.
            with_snapshot: Write torch's snapshot too.

        Returns:
            The text file if it was written.
        """
        if not self._reports_left:
            return None
        self._reports_left -= 1  # even if it fails, because it would fail again
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = _find_free_path(folder)
            path.write_text(describe_failure(trainer, error, reading, batches), encoding="utf-8")
        except Exception as problem:
            log.warning("no post-mortem could be written: %s: %s", type(problem).__name__, problem)
            return None
        log.warning("out of memory: %s lists what held it; %s", path, advise(trainer))
        if with_snapshot:
            _write_snapshot(path.with_suffix(".pickle"))
        return path


def _write_snapshot(path: Path) -> None:
    try:
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
    except Exception as problem:
        log.warning("no snapshot could be written: %s: %s", type(problem).__name__, problem)


def _find_free_path(folder: Path) -> Path:
    for number in itertools.count(1):
        path = folder / f"oom-{number}.txt"
        if not path.exists():
            break
    return path


def see_batch(
    trainer: Trainer,
    batch: Any,  # noqa: ANN401 - any form
    index: int,
    dataloader_idx: int = 0,
) -> SeenBatch:
    """Return the samples of a batch and the shapes of its first 8 tensors, without 0-dim ones."""
    tensors = (tensor for tensor in walk_tensors(batch) if isinstance(tensor, Tensor))
    first_tensors = itertools.islice(tensors, _MOST_SHAPES)  # a batch may hold thousands
    shapes = [(tensor.shape, tensor.dtype) for tensor in first_tensors]
    samples = count_batch(trainer, batch, dataloader_idx)
    return SeenBatch(_name_stage(trainer), index, samples, shapes)


def describe_failure(
    trainer: Trainer,
    error: BaseException | None,
    reading: MemoryReading,
    batches: Sequence[SeenBatch],
) -> str:
    """Return the text of a report.

    This allocates nothing on the device. If a part fails, the text says so.

    Args:
        trainer: Trainer whose module and optimizers own tensors.
        error: Error that is still being handled, so that the tensors of the failed step still
            exist.
        reading: Memory of the device.
        batches: The last batches.
    """
    device = trainer.strategy.root_device
    # functions, so that a part that fails does not affect the others
    parts: dict[str, Callable[[], str]] = {
        "error": lambda: _describe_error(error),
        "last batches": lambda: "\n".join(map(str, batches)) or "none yet",
        "memory": lambda: _tabulate_memory(trainer, device, reading),
    }
    if device.type == "cuda":  # other allocators have no summary
        parts["allocator"] = lambda: torch.cuda.memory_summary(device)
    where = f"step {trainer.global_step}, epoch {trainer.current_epoch}, {_name_stage(trainer)}"
    paragraphs = [f"out of memory: {where}\n{advise(trainer)}"]
    for name, describe in parts.items():
        paragraphs.append(f"## {name}\n{_try(describe)}")
    return "\n\n".join(paragraphs) + "\n"


def advise(trainer: Trainer) -> str:
    """Return what would need less memory and is not used yet."""
    attached: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # its callback connector sets it
    unused = dict(_CURES)
    for callback in attached:
        unused.pop(type(callback).__name__, None)
    *cures, last_cure = ["a smaller batch", *unused.values()]
    return f"for less use {' or '.join(filter(None, [', '.join(cures), last_cure]))}"


def note_error(error: BaseException, text: str) -> None:
    """Add a text to an error, which `is_noted` recognizes."""
    error.add_note(f"{_NOTE} {text}")


def is_noted(error: BaseException | None) -> bool:
    """Return True if `note_error` was called for an error or for one that it was raised from."""
    for cause in causes_of(error):
        if any(str(note).startswith(_NOTE) for note in getattr(cause, "__notes__", ())):
            return True
    return False


def _describe_error(error: BaseException | None) -> str:
    if error is None:
        return "unknown"
    lines = [f"{type(error).__name__}: {error}"]
    for frame in traceback.extract_tb(error.__traceback__)[-3:]:
        lines.append(f"  {frame.filename}:{frame.lineno} in {frame.name}")
    return "\n".join(lines)


def _tabulate_memory(trainer: Trainer, device: torch.device, reading: MemoryReading) -> str:
    """Return lines of size, count and name for device, host, kinds of tensors and the largest ones."""
    tensors = find_tensors(trainer.lightning_module, trainer.optimizers)
    totals = {
        f"{device}  allocated": reading.allocated_bytes,
        f"{device}  reserved": reading.reserved_bytes,
        f"{device}  peak": reading.peak_bytes,
        f"{device}  limit": reading.limit_bytes,
        "host  this process": read_rss_bytes(),
        "host  available": available_memory_bytes(),
    }
    tree = read_tree()
    if tree is not None:
        totals[f"host  {counted(tree.processes, 'process', 'processes')}"] = tree.pss_bytes
        totals["host  of it shared memory"] = tree.shared_bytes
    if device.type == "cuda":  # on a CPU the resident set holds far more than tensors
        visible_bytes = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
        saved_bytes = max(reading.allocated_bytes - visible_bytes, 0)
        totals[f"{device}  kept for backward by autograd alone, and other"] = saved_bytes
    kinds, owners = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for tensor in tensors:
        form = f"{list(tensor.shape)} {_name(tensor.dtype)}"
        kinds[f"{tensor.device}  {tensor.kind}"].append(tensor.nbytes)
        owners[f"{tensor.device}  {tensor.owner} {form}"].append(tensor.nbytes)
    lines = ["      size  count  where, what"]
    lines += [f"{format_bytes(value):>10}         {name}" for name, value in totals.items()]
    return "\n".join([*lines, *_list_largest(kinds), *_list_largest(owners)[:ROWS]])


def _list_largest(sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return lines of total size, count and name."""
    lines = []
    for name, nbytes in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{format_bytes(sum(nbytes)):>10}  {len(nbytes):>5}  {name}")
    return lines


def _name_stage(trainer: Trainer) -> str:
    return trainer.state.stage.value if trainer.state.stage else "no stage"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _try(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception as problem:
        log.debug("a part of the post-mortem failed", exc_info=True)
        return f"could not be read: {type(problem).__name__}: {problem}"
