"""The shape in which a batch reaches a module that already exists."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lit_data.errors import ConfigError
from lit_data.types import Batch

BatchFormat = str | Mapping[str, str] | Sequence[str]
"""`dict`, a mapping of new key to our key, or a sequence of our keys for a tuple in that order."""


def check_format(batch_format: BatchFormat, keys: Sequence[str], channels: Mapping[str, int]) -> None:
    """Refuse a format that names unknown keys.

    Args:
        batch_format: The format.
        keys: Keys of the batch.
        channels: Names of single channels of ``image``, usable like keys.

    Raises:
        ConfigError: The format is none of the three, or a key is unknown.
    """
    if isinstance(batch_format, str):
        if batch_format != "dict":
            raise ConfigError(f"batch_format={batch_format!r} is unknown: choose dict, a mapping or a sequence of keys")
        return
    wanted = batch_format.values() if isinstance(batch_format, Mapping) else batch_format
    unknown = [key for key in wanted if key not in keys and key not in channels]
    if unknown:
        raise ConfigError(f"batch_format names unknown keys {unknown}: choose from {[*keys, *channels]}")


def format_batch(batch: Batch, batch_format: BatchFormat, channels: Mapping[str, int]) -> Any:  # noqa: ANN401
    """Give a batch the shape that the module wants; no tensor is copied.

    Args:
        batch: Our dict of tensors.
        batch_format: A checked format.
        channels: For each channel name its number in ``image``; such a key gives [B, 1, H, W].

    Returns:
        The batch itself, a dict with renamed keys, or a tuple. A mask that the stage does not have is left out.
    """
    if isinstance(batch_format, str):
        return batch
    if isinstance(batch_format, Mapping):
        return {new: _pick(batch, key, channels) for new, key in batch_format.items() if _has(batch, key, channels)}
    return tuple(_pick(batch, key, channels) for key in batch_format if _has(batch, key, channels))


def _has(batch: Batch, key: str, channels: Mapping[str, int]) -> bool:
    return key in batch or key in channels


def _pick(batch: Batch, key: str, channels: Mapping[str, int]) -> Tensor:
    if key in batch:
        return batch[key]
    number = channels[key]
    return batch["image"][:, number : number + 1]
