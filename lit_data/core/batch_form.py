"""Count and slice the samples of a batch of any form.

Frameworks keep samples in two ways. *Fields*: tensors whose first dimension is the sample, in
mappings, tuples or dataclasses, as torch's `default_collate` makes them. *Apart*: a list or tuple
with one entry for each sample, as torchvision's detectors take them. A list of four images
[4, 8, 8] can be read both ways, so the known properties of the loader decide, and ambiguous batches
are refused instead of guessed.
"""

import copy
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np

from lit_data.core.errors import ConfigError
from lit_data.core.types import COUNT_SUFFIX

HINT = "give the LightningModule or its datamodule a method slice_batch(batch, start, stop)"
_OWNER = "batch_idx"  # Ultralytics: the image that each object belongs to
_OBJECTS = ("cls", "bboxes", "keypoints", "segments", "obb")  # its fields for each object
_IMAGES = ("img", "image", "images")
_MOST_FIELDS = 16  # more entries than that are samples
_MOST_CHANNELS = 4
_PLAIN = (str, bytes, int, float, complex, PurePath, Enum, np.generic, type(None), type)


def count_samples(batch: Any, sizes: Collection[int] = (), *, stacked: bool = False) -> int:  # noqa: ANN401
    """Count the samples in a batch of any form.

    Args:
        batch: Tensors, arrays and plain values in mappings, sequences, dataclasses and objects with
            a length.
        sizes: Sizes that batches of the loader can have, if known; they decide between several
            readings.
        stacked: True if the loader stacks samples, so that no list has one entry for each sample.

    Returns:
        The number of samples; 0 if the parts of the batch contradict each other and `sizes` does
        not decide.
    """
    readings = _lengths(batch, stacked)
    if len(readings) == 1 and (not sizes or not readings.isdisjoint(sizes)):
        return next(iter(readings))
    lenient_readings = readings | _lengths(batch, stacked, strict=False)
    possible = lenient_readings.intersection(sizes)
    for numbers in (possible, readings):
        if len(numbers) == 1:
            return next(iter(numbers))
    return 0


def count_plain(batch: Any) -> int:  # noqa: ANN401
    """Count the samples of tensors of one length in a dict, or in a list of tensors of several ranks.

    Return 0 for anything else. Most batches have this form and only one reading, and take a few
    microseconds here, compared with tens of microseconds in `count_samples`.
    """
    parts: Iterable[tuple[Any, Any]] = ()
    if type(batch) is dict:
        parts = batch.items()
    elif type(batch) in (list, tuple) and len({_rank(part) for part in batch}) > 1:
        parts = enumerate(batch)
    length = 0
    for key, value in parts:
        is_tensor = getattr(value, "ndim", 0) > 0
        if not is_tensor or key == _OWNER or length not in (0, value.shape[0]):
            return 0
        length = int(value.shape[0])
    return length


def slice_batch(batch: Any, start: int, stop: int, samples: int, *, stacked: bool = False) -> Any:  # noqa: ANN401
    """Return samples `start` to `stop` of a batch, as views of its tensors and parts of its lists.

    Values without a first dimension (numbers, text, 0-dim tensors) go into every piece. The items
    of a ragged field ``boxes`` are concatenated, and ``boxes_count`` has their number for each
    sample; or ``batch_idx`` has the image of each item, as in batches of Ultralytics, and counts
    from 0 in each piece.

    Args:
        batch: As in `count_samples`.
        start: First sample.
        stop: End of the samples, excluded.
        samples: Number of samples of the whole batch.
        stacked: As in `count_samples`.

    Raises:
        ConfigError: A part has another length, or has two readings.
    """
    if (start, stop) == (0, samples):
        return batch
    return _Cut(start, stop, samples, stacked).part(batch)


def batch_tensors(batch: Any) -> list[Any]:  # noqa: ANN401 - any nesting of tensors
    """Return the tensors of a batch with a batch dimension; dicts in the order of their keys."""
    return list(walk_tensors(batch))


def walk_tensors(batch: Any) -> Iterator[Any]:  # noqa: ANN401 - any nesting of tensors
    """Yield the tensors of `batch_tensors` one by one, for callers that need only the first ones."""
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from walk_tensors(batch[key])
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from walk_tensors(part)
    elif _is_record(batch):
        yield from walk_tensors(_list_fields(batch))
    elif getattr(batch, "ndim", 0) > 0:
        yield batch


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """Cutter of samples `start` to `stop` from the parts of one batch."""

    start: int
    stop: int
    samples: int
    stacked: bool

    def part(self, value: Any, *, apart: bool = False) -> Any:  # noqa: ANN401
        """Cut a part of the batch; `apart` if another part keeps its samples apart."""
        if isinstance(value, Mapping):
            return self._mapping(value)
        if hasattr(value, "slice_samples"):  # a plan of synthesis, which knows its samples
            return value.slice_samples(self.start, self.stop)
        if _is_record(value):
            return self._record(value)
        if isinstance(value, list | tuple):
            return self._sequence(value, apart=apart)
        if not _is_whole(value):
            return self._rows(value)
        if any(hasattr(part, "ndim") for part in getattr(value, "__dict__", {}).values()):
            raise ConfigError(f"a {type(value).__name__} holds tensors and has no length: {HINT}")
        return value

    def _record(self, value: Any) -> Any:  # noqa: ANN401 - a dataclass
        init_fields = {}
        for item in dataclasses.fields(value):
            if item.init:  # __post_init__ makes the other fields again
                init_fields[item.name] = getattr(value, item.name)
        return dataclasses.replace(value, **self._mapping(init_fields))

    def _rows(self, value: Any) -> Any:  # noqa: ANN401 - a tensor, an array, an object with a length
        if _length(value) != self.samples:
            raise ConfigError(
                f"a batch of {self.samples} samples cannot be split: a part has length {_length(value)}: {HINT}"
            )
        try:
            piece = value[self.start : self.stop]
        except (TypeError, KeyError, IndexError, ValueError):
            piece = None
        # A piece of a tensor subclass may be a plain tensor.
        is_of_type = hasattr(value, "ndim") or type(piece) is type(value)
        if not is_of_type or len(piece) != self.stop - self.start:
            raise ConfigError(f"a {type(value).__name__} cannot be split by [start:stop]: {HINT}")
        return piece

    def _mapping(self, batch: Mapping[Any, Any]) -> Mapping[Any, Any]:
        owner = _find_owner(batch)
        if owner is not None:
            return like_mapping(batch, self._objects(batch, owner))
        apart = _has_apart(batch.values(), self.stacked)
        return like_mapping(batch, {key: self._field(batch, key, apart=apart) for key in batch})

    def _field(self, batch: Mapping[Any, Any], key: Any, *, apart: bool) -> Any:  # noqa: ANN401
        value = batch[key]
        counts = batch.get(f"{key}{COUNT_SUFFIX}", 0)
        can_be_ragged = getattr(value, "ndim", 0) > 0 and getattr(counts, "ndim", 0) == 1
        if not can_be_ragged or int(counts.sum()) != len(value):
            return self.part(value, apart=apart)
        before = int(counts[: self.start].sum())
        inside = int(counts[self.start : self.stop].sum())
        return value[before : before + inside]

    def _objects(self, batch: Mapping[Any, Any], owner: Any) -> dict[Any, Any]:  # noqa: ANN401 - a tensor or an array
        """Cut the objects of the wanted images, and renumber these images from 0."""
        is_inside = (owner >= self.start) & (owner < self.stop)
        # With one object for each image in turn, both readings have the same result.
        is_one_each = owner.tolist() == list(range(self.samples))
        pieces = {}
        for key, value in batch.items():
            is_named = key in (_OWNER, *_OBJECTS)
            is_row_each = getattr(value, "ndim", 0) > 0 and len(value) == len(owner)
            if is_named:
                pieces[key] = value[is_inside]
            elif key in _IMAGES or not is_row_each:
                pieces[key] = self.part(value)
            elif len(owner) == self.samples and not is_one_each:
                raise ConfigError(
                    f"{key!r} has one entry for each image or for each object: {HINT}"
                )
            else:
                pieces[key] = value[is_inside]
        return pieces | {_OWNER: owner[is_inside] - self.start}

    def _sequence(self, parts: Sequence[Any], *, apart: bool) -> Any:  # noqa: ANN401
        has_entry_each = len(parts) == self.samples
        if _is_column(parts):
            return parts[self.start : self.stop] if has_entry_each else parts
        if has_entry_each and not self.stacked and _are_alike(parts):
            could_be_fields = self.samples in _inner_lengths(parts, self.stacked)
            if could_be_fields and not (apart or _looks_apart(parts)):
                raise ConfigError(
                    f"a {type(parts).__name__} of {self.samples} could hold samples, or fields of "
                    f"{self.samples} samples each: {HINT}"
                )
            return parts[self.start : self.stop]
        below = _has_apart(parts, self.stacked)
        pieces = [self.part(part, apart=below) for part in parts]
        kind: Any = type(parts)
        is_named_tuple = hasattr(parts, "_fields")
        return kind(*pieces) if is_named_tuple else kind(pieces)


def _lengths(value: Any, stacked: bool, *, strict: bool = True) -> set[int]:  # noqa: ANN401
    """Return the numbers of samples that a part may have; empty if it does not tell.

    If entries of a list differ in length, they count as samples. Unless `strict` is True, they
    also count as fields, one of which is not split.
    """
    if _is_record(value):
        value = _list_fields(value)
    if isinstance(value, Mapping):
        return _mapping_lengths(value, stacked, strict=strict)
    if _is_column(value):
        return {len(value)} if value else set()
    if not isinstance(value, list | tuple):
        return set() if _is_whole(value) else {_length(value)}
    outer = {len(value)} if not stacked and _are_alike(value) else set()
    return outer | _inner_lengths(value, stacked, strict=strict and bool(outer))


def _mapping_lengths(batch: Mapping[Any, Any], stacked: bool, *, strict: bool) -> set[int]:
    column_lengths = set()
    readings = []
    for part in _parts_that_count(batch):
        if not _is_column(part):
            readings.append(_lengths(part, stacked, strict=strict))
        elif part:
            column_lengths.add(len(part))
    lengths = _agree(readings)
    if len(lengths) == 1 and _may_be_loaders(batch, lengths):
        return set().union(*readings)
    # Lists of plain values decide only if the other parts leave a choice, or do not tell.
    if len(lengths) > 1:
        return lengths & column_lengths or lengths
    if not lengths and len(column_lengths) == 1:
        return column_lengths
    return lengths


def _may_be_loaders(batch: Mapping[Any, Any], lengths: set[int]) -> bool:
    """Return True if each part may have the fields of a separate loader with another batch size.

    ``{"labelled": [x, y], "unlabelled": [x, y]}`` has two entries in each list, which could be two
    samples. Lists of images, with few channels first, are lists of samples.
    """
    inner_lengths = []
    for part in batch.values():
        if not isinstance(part, list | tuple) or {len(part)} != lengths or _is_column(part):
            return False
        if all(_rank(item) == 3 and len(item) <= _MOST_CHANNELS for item in part):
            return False
        inner_lengths.append(_inner_lengths(part, stacked=False, strict=True))
    return len(inner_lengths) > 1 and all(len(inner) == 1 for inner in inner_lengths)


def _inner_lengths(parts: Sequence[Any], stacked: bool, *, strict: bool = True) -> set[int]:
    """Return the numbers of samples if the parts are fields: those on which all agree, if any."""
    if len(parts) > _MOST_FIELDS:
        return set()
    readings = [_lengths(part, stacked) for part in parts if not _is_column(part)]
    return _agree(readings, strict=strict)


def _parts_that_count(batch: Mapping[Any, Any]) -> list[Any]:
    """Return the parts of a mapping that tell its number of samples, without ragged ones."""
    if _find_owner(batch) is not None:
        images = [batch[key] for key in _IMAGES if key in batch]
        if images:
            return images
        return [part for key, part in batch.items() if key != _OWNER and key not in _OBJECTS]
    count_keys = {f"{key}{COUNT_SUFFIX}" for key in batch}
    ragged_keys = [key for key in batch if f"{key}{COUNT_SUFFIX}" in batch]
    ragged_lengths = {_length(batch[key]) for key in ragged_keys}
    parts = []
    for key, part in batch.items():
        # A field as long as a ragged field may belong to its items.
        if key not in ragged_keys and (key in count_keys or _length(part) not in ragged_lengths):
            parts.append(part)
    return parts


def _find_owner(batch: Mapping[Any, Any]) -> Any:  # noqa: ANN401 - a tensor or an array
    """Return the image of each object in a batch of Ultralytics, or None for other batches.

    Other libraries use ``batch_idx`` for the numbers of samples.
    """
    owner = batch.get(_OWNER)
    has_objects = any(key in batch for key in _OBJECTS)
    return owner if has_objects and getattr(owner, "ndim", 0) == 1 else None


def _agree(readings: Iterable[set[int]], *, strict: bool = False) -> set[int]:
    """Return the numbers that all readings share; if there are none, all numbers, or none if `strict`."""
    sets = [lengths for lengths in readings if lengths]
    every = set[int]().union(*sets)
    common = every.intersection(*sets)
    if common or strict:
        return common
    return every


def _has_apart(parts: Iterable[Any], stacked: bool) -> bool:
    """Return True if one of the fields can only be a list with one entry for each sample."""
    return not stacked and any(_is_apart(part, stacked) for part in parts)


def _is_apart(part: Any, stacked: bool) -> bool:  # noqa: ANN401
    if not isinstance(part, list | tuple) or _is_column(part) or not _are_alike(part):
        return False
    return len(part) not in _inner_lengths(part, stacked)


def _looks_apart(parts: Sequence[Any]) -> bool:
    """Return True for entries that are probably samples, since no framework arranges fields so."""
    first = parts[0]
    is_sample = isinstance(first, Mapping) or _is_record(first) or 2 <= _rank(first) <= 3
    return isinstance(parts, list) and is_sample


def _are_alike(parts: Sequence[Any]) -> bool:
    """Return True if the parts could be samples, with the same type and the same rank or keys."""
    return len({_kind(part) for part in parts[:_MOST_FIELDS]}) == 1


def _kind(part: Any) -> object:  # noqa: ANN401
    if isinstance(part, Mapping):
        return type(part), frozenset(part)
    if isinstance(part, list | tuple):
        kinds = map(_kind, part[:_MOST_FIELDS])
        return type(part), frozenset(kinds) if isinstance(part, list) else tuple(kinds)
    return type(part), _rank(part), getattr(part, "dtype", None)


def _is_column(value: Any) -> bool:  # noqa: ANN401
    """Return True for a list of plain values, such as paths or scalars, instead of parts with samples."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields"):
        return False
    return all(_is_whole(item) or _is_column(item) for item in value)


def _is_whole(value: Any) -> bool:  # noqa: ANN401
    """Return True if a value cannot be split."""
    if isinstance(value, _PLAIN):
        return True
    if hasattr(value, "ndim"):
        return bool(value.ndim == 0)
    if isinstance(value, Mapping | list | tuple) or _is_record(value):
        return False
    return _length(value) < 0


def _length(value: Any) -> int:  # noqa: ANN401
    """Return the length of a value that can be sliced by [start:stop], or -1 for other values."""
    can_be_cut = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return len(value) if can_be_cut and getattr(value, "ndim", 1) > 0 else -1


def _is_record(value: Any) -> bool:  # noqa: ANN401
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _list_fields(record: Any) -> dict[str, Any]:  # noqa: ANN401
    return {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}


def _rank(value: Any) -> int:  # noqa: ANN401
    return int(getattr(value, "ndim", -1))


def like_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return values in a mapping of the same type, if possible."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    like = copy.copy(batch)  # a defaultdict keeps its factory
    like.clear()
    like.update(values)
    return like


def cut_evenly(samples: int, size: int) -> list[tuple[int, int]]:
    """Return the fewest pieces of at most `size` samples, as even as possible.

    For example, 9 samples in pieces of at most 8 are split into 5 and 4. Even pieces need less
    memory than full ones with a remainder, for as many steps, and avoid batches of a single sample
    for batch norm.

    Args:
        samples: Number of samples of the batch.
        size: Most samples of a piece.

    Returns:
        First sample and end of each piece.
    """
    pieces = -(-samples // size)
    smaller, larger_pieces = divmod(samples, pieces)
    # Larger pieces come first, so that errors appear at once.
    ends = [smaller * piece + min(piece, larger_pieces) for piece in range(pieces + 1)]
    return list(itertools.pairwise(ends))
