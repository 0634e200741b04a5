"""What held the memory when it ran out: the largest tensors and whose they are, for a text file in the run folder."""

import gc
import itertools
import logging
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lit_data.callbacks.device_memory import MemoryReading
from lit_data.callbacks.loader_facts import count_batch
from lit_data.callbacks.memory.host_memory import format_bytes, read_rss_bytes, read_tree
from lit_data.loading.machine import available_memory_bytes

log = logging.getLogger(__name__)


MOST_NODES: Final = 100_000
_Storage = tuple[torch.device, int]
_Named = tuple[Any, str, str]
"""A tensor, or nothing; the kind and the name of its owner."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """Memory that a tensor holds; it has no reference to the tensor.

    Attributes:
        nbytes: Of its storage, which views share.
        shape: Of the owner's tensor, else of the largest view.
        dtype: Its data type.
        device: Where it is.
        kind: ``parameters``, ``gradients``, ``optimizer state``, ``buffers`` or ``activations and
            other``.
        owner: The kind with the name of the parameter or buffer, or what keeps an activation.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str
    owner: str


def find_tensors(module: torch.nn.Module, optimizers: Sequence[Any]) -> list[HeldTensor]:
    """All tensors of this process, largest first: those that Python sees, and those that autograd
    saved for backward.

    Args:
        module: Whose parameters and buffers have names.
        optimizers: Whose state belongs to its parameters.

    Returns:
        One for each storage.
    """
    visible = [
        item for item in gc.get_objects() if issubclass(type(item), Tensor)
    ]  # isinstance could run a proxy
    held: dict[_Storage, HeldTensor] = {}
    for named in (_name_owned(module, optimizers), _name_saved(visible), _name_others(visible)):
        found = [pair for pair in itertools.starmap(_hold, named) if pair]
        for storage, tensor in sorted(
            found, key=lambda pair: -torch.Size(pair[1].shape).numel()
        ):  # whole before views
            held.setdefault(storage, tensor)
    return sorted(held.values(), key=lambda tensor: -tensor.nbytes)


def _name_owned(module: torch.nn.Module, optimizers: Sequence[Any]) -> Iterator[_Named]:
    names = dict[int, str]()
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        yield parameter, "parameters", f"parameter {name}"
        yield parameter.grad, "gradients", f"gradient of {name}"
    for name, buffer in module.named_buffers():
        yield buffer, "buffers", f"buffer {name}"
    for optimizer in optimizers:
        for parameter, state in getattr(optimizer, "state", {}).items():
            owner = names.get(id(parameter), "a parameter")
            for key, value in state.items():
                yield value, "optimizer state", f"optimizer state {key} of {owner}"


def _name_others(tensors: Sequence[Tensor]) -> Iterator[_Named]:
    return ((tensor, "activations and other", "activation or other") for tensor in tensors)


def _name_saved(roots: Sequence[Tensor]) -> Iterator[_Named]:
    """What the graphs of some tensors keep for backward, as it is: hooks that would compute it again do not run."""
    nodes: list[Any] = []
    for tensor in roots:
        with suppress(Exception):
            nodes.append(tensor.grad_fn)
    seen: set[Any] = set()
    while nodes and len(seen) < MOST_NODES:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
            with suppress(Exception):  # freed by backward
                saved = getattr(node, name)
                for packed in saved if isinstance(saved, list | tuple) else (saved,):
                    yield packed.data, "activations and other", f"activation saved by {node.name()}"


def _hold(tensor: Any, kind: str, owner: str) -> tuple[_Storage, HeldTensor] | None:  # noqa: ANN401
    """Where a tensor lies, and what is kept of it; sparse, fake and wrapped tensors have no storage of their own."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
        return None
    with suppress(Exception):
        storage = tensor.untyped_storage()
        found = HeldTensor(
            storage.nbytes(), tuple(tensor.shape), tensor.dtype, tensor.device, kind, owner
        )
        return ((tensor.device, storage.data_ptr()), found) if storage.nbytes() else None
    return None


ROWS: Final = 25
_MOST: Final = 5
_MOST_SHAPES: Final = 8
_NOTE: Final = "MemoryMonitor: out of memory"


class SeenBatch(NamedTuple):
    """A batch of which only the shapes are kept.

    Attributes:
        stage: As Lightning calls it, such as ``train`` or ``validate``.
        number: Its number in the epoch.
        samples: How many it has; 0 if that is not known.
        shapes: Shape and type of its first tensors.
    """

    stage: str
    number: int
    samples: int
    shapes: Sequence[tuple[torch.Size, torch.dtype]]

    def __str__(self) -> str:
        shapes = ", ".join(f"{list(shape)} {_name(dtype)}" for shape, dtype in self.shapes)
        return f"{self.stage} batch {self.number}: {self.samples or 'unknown'} samples: {shapes or 'no tensors'}"


class PostMortems:
    """Writes ``oom-<n>.txt``, at most 5 in a run, and never over another."""

    def __init__(self) -> None:
        self._left = _MOST

    def write(
        self,
        folder: Path,
        trainer: L.Trainer,
        error: BaseException | None,
        reading: MemoryReading,
        batches: Sequence[SeenBatch],
    ) -> Path | None:
        """Write the next one; a problem is logged and not raised.

        Args:
            folder: For the file; it is made where it does not exist.
            trainer: Whose module and optimizers own tensors.
            error: While it is being handled, so that the tensors of the failed step are still
                there.
            reading: Memory of the device.
            batches: The last ones.

        Returns:
            The file, if there is one.
        """
        if not self._left:
            return None
        self._left -= 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = next(
                p for n in itertools.count(1) if not (p := folder / f"oom-{n}.txt").exists()
            )
            path.write_text(describe_failure(trainer, error, reading, batches), encoding="utf-8")
        except Exception as problem:
            log.warning("no post-mortem could be written: %s: %s", type(problem).__name__, problem)
            return None
        log.warning("out of memory: %s says what held it", path)
        return path


def see_batch(trainer: L.Trainer, batch: Any, index: int, dataloader_idx: int = 0) -> SeenBatch:  # noqa: ANN401
    """Note the samples and the shapes of the first 8 tensors of a batch; 0-dim tensors are left out."""
    shapes: list[tuple[torch.Size, torch.dtype]] = []
    _list_shapes(batch, shapes)
    return SeenBatch(
        _name_stage(trainer), index, count_batch(trainer, batch, dataloader_idx), shapes
    )


def describe_failure(
    trainer: L.Trainer,
    error: BaseException | None,
    reading: MemoryReading,
    batches: Sequence[SeenBatch],
) -> str:
    """The text of a post-mortem; nothing is allocated on the device, and a part that fails says so.

    Args:
        trainer: Whose module and optimizers own tensors.
        error: While it is being handled, so that the tensors of the failed step are still there.
        reading: Memory of the device.
        batches: The last ones.
    """
    device = trainer.strategy.root_device
    headline = f"out of memory: step {trainer.global_step}, epoch {trainer.current_epoch}, {_name_stage(trainer)}"
    parts: dict[str, Callable[[], str]] = {
        "error": lambda: _describe_error(error),
        "memory": lambda: _describe_memory(device, reading),
        "last batches": lambda: "\n".join(map(str, batches)) or "none yet",
        "tensors": lambda: _describe_tensors(
            find_tensors(trainer.lightning_module, trainer.optimizers)
        ),
    }
    if device.type == "cuda":
        parts["allocator"] = lambda: torch.cuda.memory_summary(device)
    return (
        "\n\n".join(
            [headline, *(f"## {name}\n{_try(describe)}" for name, describe in parts.items())]
        )
        + "\n"
    )


def note_error(error: BaseException, text: str) -> None:
    """Add to an error's text, so that it is known again."""
    error.add_note(f"{_NOTE} {text}")


def is_noted(error: BaseException | None) -> bool:
    """Whether `note_error` was called for an error, or for one that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if any(str(note).startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def _list_shapes(batch: Any, found: list[tuple[torch.Size, torch.dtype]]) -> None:  # noqa: ANN401
    """In the order of `lit_data.batch_form.batch_tensors`, but only the first: a batch may hold thousands."""
    if isinstance(batch, Tensor):
        if batch.ndim and len(found) < _MOST_SHAPES:
            found.append((batch.shape, batch.dtype))
        return
    if isinstance(batch, Mapping):
        batch = [batch[key] for key in sorted(batch, key=str)]
    elif is_dataclass(batch):
        batch = [getattr(batch, item.name) for item in fields(batch)]
    elif not isinstance(batch, list | tuple):
        return
    for part in batch:
        if len(found) == _MOST_SHAPES:
            return
        _list_shapes(part, found)


def _describe_error(error: BaseException | None) -> str:
    if error is None:
        return "not known"
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return "\n".join([f"{type(error).__name__}: {error}", *places])


def _describe_memory(device: torch.device, reading: MemoryReading) -> str:
    allocated, reserved = (
        format_bytes(reading.allocated_bytes),
        format_bytes(reading.reserved_bytes),
    )
    peak, limit = format_bytes(reading.peak_bytes), format_bytes(reading.limit_bytes)
    lines = [
        f"{device}: {allocated} allocated, {reserved} reserved, peak {peak}, limit {limit}",
        f"host: {format_bytes(read_rss_bytes())} in this process, {format_bytes(available_memory_bytes())} available",
    ]
    tree = read_tree()
    if tree is not None:
        shared = format_bytes(tree.shared_bytes)
        lines.append(
            f"host: {format_bytes(tree.pss_bytes)} in {tree.processes} processes, {shared} of it shared memory"
        )
    return "\n".join(lines)


def _describe_tensors(tensors: Sequence[HeldTensor]) -> str:
    kinds, alike = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for found in tensors:
        what = f"{list(found.shape)} {_name(found.dtype)} {found.device}"
        kinds[f"{found.device}  {found.kind}"].append(found.nbytes)
        alike[f"{what:<44}  {found.owner}"].append(found.nbytes)
    rows = _list_largest(alike)
    return "\n".join(
        [
            *_list_largest(kinds),
            "",
            f"the largest of {len(tensors)}, alike ones together:",
            *rows[:ROWS],
        ]
    )


def _list_largest(sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """Lines of total size, count and name."""
    ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    return [
        f"{format_bytes(sum(nbytes)):>10} {len(nbytes):>5} x  {name}" for name, nbytes in ordered
    ]


def _name_stage(trainer: L.Trainer) -> str:
    return trainer.state.stage.value if trainer.state.stage else "no stage"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _try(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception as problem:
        log.debug("a part of the post-mortem failed", exc_info=True)
        return f"could not be read: {type(problem).__name__}: {problem}"
