"""The record that ``fit`` writes into a checkpoint, checked before anything is built of it.

A checkpoint may be anybody's. With pydantic, which a training does without.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from lit_data.app.checkpoints import KEY, VERSION, is_exported
from lit_data.app.configuration.names import walk
from lit_data.app.exported import read_exported
from lit_data.core.errors import StoreError
from lit_data.core.plain import check_size, read_as
from lit_data.models.weights import read_checkpoint

_LARGEST = 2**64
"""Of whole numbers, such as seeds."""

Count = Annotated[int, Field(strict=True, ge=0, le=2**31)]
Side = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=4096)]


@dataclass(frozen=True)
class _Look:
    """Parts of what `look_at` returns."""

    channels: Side
    size_px: tuple[Side, Side]
    grey: Number
    spread: Number


@dataclass(frozen=True)
class _Record:
    """Parts of a record, as `TrainedRecord` writes them."""

    experiment: Text
    kind: Text
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    scores: Mapping[str, Annotated[float, Field(strict=True)]]
    look: _Look | None
    root: Text | None = None
    epochs: Count = 0


_RECORD = TypeAdapter(_Record)


def read_record(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return what ``fit`` wrote into a checkpoint, which an exported file keeps.

    Returns:
        None where there is nothing, as in a file of another program.

    Raises:
        StoreError: The file is no checkpoint, or holds something else under that name.
    """
    if is_exported(checkpoint):
        return _read_exported(checkpoint)
    if checkpoint.is_dir():  # in pieces, one of each rank
        return None
    content = read_checkpoint(checkpoint, mapped=True, verify=False)
    record = content.get(KEY)
    if record is None or (isinstance(record, Mapping) and record.get("version") != VERSION):
        return None
    epoch = content.get("epoch")
    trained = {"epochs": epoch + 1 if isinstance(epoch, int) else 0}
    return check_record(
        {**record, **trained} if isinstance(record, Mapping) else record, checkpoint
    )


def _read_exported(path: Path) -> Mapping[str, Any] | None:
    record = read_exported(path).manifest.get("trained")
    return None if record is None else check_record(record, path)


def check_record(record: object, path: Path) -> Mapping[str, Any]:
    """Return a record of plain values, whose kinds and ranges are those of `TrainedRecord`.

    Args:
        record: With the number of trained `epochs`.
        path: Of its file, for messages.

    Raises:
        StoreError: It is none.
    """
    try:
        check_size(record)
        read_as(_RECORD, record)
        assert isinstance(record, Mapping)  # as the schema says
        for key, value in walk(record):
            _check_plain(key, value)
    except ValueError as error:
        raise StoreError(
            f"{path} is damaged: the record of its training cannot be read: {error}"
        ) from error
    return record


def _check_plain(key: str, value: object) -> None:
    """Refuse what is no number, no text that refers to nothing, and no dict or list.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, Mapping):
        is_plain = all(isinstance(name, str) for name in value)
    elif isinstance(value, str):
        is_plain = "${" not in value
    elif isinstance(value, int):
        is_plain = abs(value) <= _LARGEST
    else:
        is_plain = value is None or isinstance(value, float | list)
    if not is_plain:
        raise ValueError(f"{key[:80]!a} holds no plain value")
