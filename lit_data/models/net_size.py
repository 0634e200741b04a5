"""Size limits for nets that an untrusted file describes: no larger than the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lit_data.core.errors import StoreError, first_line
from lit_data.core.plain import check_size

_MOST_MODULES = 100_000
_UNSTORED = 2**24
"""Values that a net of ours may have beside those of its file, such as tables that it computes."""
_UNSTORED_OF_OTHERS = 2**30
"""The same of others, which may leave a frozen net out of their checkpoints."""


class _Count:
    """Values and modules of a net so far.

    Args:
        most: Values that it may have.
        source: File that describes it, for messages.
    """

    def __init__(self, most: int, source: Path) -> None:
        self.most = most
        self.source = source
        self.values = 0
        self.modules = 0

    def add_tensor(self, _module: nn.Module, _name: str, tensor: Tensor | None) -> None:
        self.values += 0 if tensor is None else tensor.numel()
        self._check()

    def add_module(self, _module: nn.Module, _name: str, _part: nn.Module | None) -> None:
        self.modules += 1
        self._check()

    def _check(self) -> None:
        if self.values > self.most or self.modules > _MOST_MODULES:
            raise StoreError(
                f"{self.source} describes a net of more values than the file holds: it is damaged, "
                "or not the checkpoint of this model"
            )


@contextmanager
def refusing_larger(source: Path, *, is_ours: bool) -> Iterator[None]:
    """Refuse a net with more parameters and buffers than a file has bytes, while it is built.

    Each tensor is counted before it is allocated.

    Args:
        source: Checkpoint, exported file, or folder of a checkpoint in pieces.
        is_ours: All classes of the net are from this package or from torch.

    Raises:
        StoreError: The net is larger.
    """
    most = _count_bytes(source) + (_UNSTORED if is_ours else _UNSTORED_OF_OTHERS)
    count = _Count(most, source)
    handles = [
        register_module_parameter_registration_hook(count.add_tensor),
        register_module_buffer_registration_hook(count.add_tensor),
        register_module_module_registration_hook(count.add_module),
    ]
    try:
        yield
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise StoreError(
            f"{source} describes a net that cannot be built: {first_line(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def check_numbers(net: object, source: Path) -> None:
    """Refuse options of a net that are larger than its file, because lists are built before layers.

    Args:
        net: Options of the net, as plain data.
        source: The file.

    Raises:
        StoreError: An option is too large.
    """
    most = _count_bytes(source) + _UNSTORED
    try:
        values = check_size(net)
    except ValueError as error:
        raise StoreError(f"{source} describes a net that cannot be built: {error}") from error
    if any(isinstance(value, int) and abs(value) > most for value in values):
        raise StoreError(f"{source} describes a net with sizes that are larger than the file")


def _count_bytes(source: Path) -> int:
    paths = source.rglob("*") if source.is_dir() else [source]
    return sum(path.stat().st_size for path in paths if path.is_file())
