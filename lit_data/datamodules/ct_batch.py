"""What happens to a batch of volumes on its device, and how a part of it is taken."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch

from lit_data.datamodules.batch_format import BatchFormat
from lit_data.errors import ConfigError
from lit_data.types import COUNT_SUFFIX, Batch

POINT_KEYS: Final = ("coords", "feats", "label", "coords_count", "occupied_total")
WINDOW_KEYS: Final = ("image", "occupied", "sdf", "mask", "position")
COMMON_KEYS: Final = ("index", "volume_index", "shape", "spacing", "path", "epoch")
"""Keys of a batch, see `CTDataModule`."""

COUNT: Final = "coords" + COUNT_SUFFIX
_RAGGED: Final = ("coords", "feats", "label")


def keep_one_count(batch: Batch) -> Batch:
    """Leave out the counts of features and labels, which are those of the points."""
    counts = {name + COUNT_SUFFIX for name in _RAGGED} - {COUNT}
    return {name: part for name, part in batch.items() if name not in counts}


def widen_labels(batch: Batch) -> Batch:
    """Give labels the dtype that losses want."""
    return batch | {name: batch[name].long() for name in ("label", "mask") if name in batch}


def cut_batch(batch: Any, batch_format: BatchFormat, keys: Sequence[str], start: int, stop: int) -> Any:  # noqa: ANN401
    """Some samples of a batch in a user's format.

    Args:
        batch: A dict or a tuple.
        batch_format: Its format.
        keys: Our keys that the batch has, of which a tuple holds those that its format names.
        start: First sample.
        stop: The one behind the last.

    Raises:
        ConfigError: Nothing in the batch says whose its points are.
    """
    if isinstance(batch, tuple):
        wanted = cast(Sequence[str], batch_format)
        named = list(zip((key for key in wanted if key in keys), batch, strict=True))
        span = _find_points(named, start, stop)
        return tuple(_cut(part, name, start, stop, span) for name, part in named)
    ours = batch_format if isinstance(batch_format, Mapping) else {}
    named = [(ours.get(key, key), part) for key, part in batch.items()]
    span = _find_points(named, start, stop)
    return {key: _cut(part, ours.get(key, key), start, stop, span) for key, part in batch.items()}


def _find_points(named: Sequence[tuple[str, Any]], start: int, stop: int) -> slice:
    """Where the points of some samples lie among those of all."""
    parts = dict(named)
    if COUNT in parts:
        ends = torch.nn.functional.pad(parts[COUNT].cumsum(0), (1, 0))
        stop = min(stop, len(ends) - 1)
        return slice(int(ends[min(start, stop)]), int(ends[stop]))
    if "coords" in parts:
        rows = parts["coords"][:, 0].contiguous()
        first, last = torch.searchsorted(rows, torch.tensor((start, stop), dtype=rows.dtype, device=rows.device))
        return slice(int(first), int(last))
    if parts.keys() & set(_RAGGED):
        raise ConfigError(f"batch_format names {sorted(parts)}: add coords or {COUNT}, or a batch cannot be divided")
    return slice(0)


def _cut(part: Any, name: str, start: int, stop: int, span: slice) -> Any:  # noqa: ANN401 - a tensor, or a list of paths
    if name not in _RAGGED:
        return part[start:stop]
    if name != "coords":
        return part[span]
    return part[span] - torch.tensor((start, 0, 0, 0), dtype=part.dtype, device=part.device)
