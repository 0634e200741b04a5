"""How many samples a batch of any form holds, and how some of them are cut out of it.

Frameworks keep samples in two ways. *Fields*: tensors whose first dimension is the sample, in
mappings, tuples, dataclasses (what torch's `default_collate` makes). *Apart*: a list or tuple with
one entry for each sample, as torchvision's detectors take them. A list of four images [4, 8, 8] can
be read both ways, so what is known of the loader decides, and what cannot be told apart is refused,
never guessed.
"""

import copy
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any, Final

import numpy as np

from lit_data.errors import ConfigError
from lit_data.types import COUNT_SUFFIX

HINT: Final = "give the LightningModule or its datamodule a method slice_batch(batch, start, stop)"
_OWNER: Final = "batch_idx"  # Ultralytics: the image that each object belongs to
_OBJECTS: Final = ("cls", "bboxes", "keypoints", "segments", "obb")  # what it has for each object
_IMAGES: Final = ("img", "image", "images")
_MOST_FIELDS: Final = 16  # more entries than that are samples
_PLAIN: Final = (str, bytes, int, float, complex, PurePath, Enum, np.generic, type(None), type)


def count_samples(batch: Any, sizes: Collection[int] = (), *, stacked: bool = False) -> int:  # noqa: ANN401
    """Samples in a batch of any form.

    Args:
        batch: Tensors, arrays and plain values in mappings, sequences, dataclasses and objects with
            a length.
        sizes: Sizes that batches of its loader can have, if they are known; they decide between
            several readings.
        stacked: Its loader stacks samples, so that no list has one entry for each sample.

    Returns:
        The number; 0 where the parts of the batch contradict each other and `sizes` does not
        decide.
    """
    lengths = _lengths(batch, stacked)
    if len(lengths) == 1 and (not sizes or not lengths.isdisjoint(sizes)):
        return next(iter(lengths))
    fitting = (lengths | _lengths(batch, stacked, strict=False)).intersection(sizes)
    return (
        next(iter(fitting))
        if len(fitting) == 1
        else next(iter(lengths))
        if len(lengths) == 1
        else 0
    )


def count_plain(batch: Any) -> int:  # noqa: ANN401
    """Samples of tensors of one length in a dict, or in a list of tensors of several ranks; 0 for
    anything else.

    Most batches are such, can be read in one way only, and take a few microseconds here where
    `count_samples` takes some tens.
    """
    entries: Iterable[tuple[Any, Any]] = batch.items() if type(batch) is dict else ()
    if type(batch) in (list, tuple) and len({_rank(part) for part in batch}) > 1:
        entries = enumerate(batch)
    length = 0
    for key, value in entries:
        if not getattr(value, "ndim", 0) or key == _OWNER or length not in (0, value.shape[0]):
            return 0
        length = int(value.shape[0])
    return length


def slice_batch(batch: Any, start: int, stop: int, samples: int, *, stacked: bool = False) -> Any:  # noqa: ANN401
    """Samples `start` to `stop` of a batch: views of its tensors, parts of its lists.

    What has no first dimension (numbers, text, 0-dim tensors) goes into every piece. The items of a
    ragged field ``boxes`` lie behind each other, and ``boxes_count`` says how many each sample has;
    or ``batch_idx`` says which image each belongs to, as in Ultralytics' batches, and counts from 0
    in each piece.

    Args:
        batch: As in `count_samples`.
        start: First sample.
        stop: Behind the last sample.
        samples: Of the whole batch.
        stacked: As in `count_samples`.

    Raises:
        ConfigError: A part has another length, or could be read in two ways.
    """
    return (
        batch if (start, stop) == (0, samples) else _Cut(start, stop, samples, stacked).part(batch)
    )


def batch_tensors(batch: Any) -> list[Any]:  # noqa: ANN401 - any nesting of tensors
    """The tensors of a batch of any nesting that have a batch dimension; dicts in the order of their keys."""
    if isinstance(batch, Mapping):
        return [tensor for key in sorted(batch, key=str) for tensor in batch_tensors(batch[key])]
    if isinstance(batch, list | tuple):
        return [tensor for part in batch for tensor in batch_tensors(part)]
    if _is_record(batch):
        return batch_tensors(_fields(batch))
    return [batch] if getattr(batch, "ndim", 0) > 0 else []


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """Cuts samples `start` to `stop` out of the parts of one batch."""

    start: int
    stop: int
    samples: int
    stacked: bool

    def part(self, value: Any, *, apart: bool = False) -> Any:  # noqa: ANN401
        """Those samples of a part of the batch; `apart` if another part keeps its samples apart."""
        if isinstance(value, Mapping):
            return self._mapping(value)
        if hasattr(
            value, "slice_samples"
        ):  # a plan of what is to be drawn, which knows its samples
            return value.slice_samples(self.start, self.stop)
        if _is_record(value):
            fields = {
                item.name: getattr(value, item.name)
                for item in dataclasses.fields(value)
                if item.init
            }
            return dataclasses.replace(value, **self._mapping(fields))
        if isinstance(value, list | tuple):
            return self._sequence(value, apart=apart)
        if _is_whole(value) and any(
            hasattr(part, "ndim") for part in getattr(value, "__dict__", {}).values()
        ):
            raise ConfigError(f"a {type(value).__name__} holds tensors and has no length: {HINT}")
        return value if _is_whole(value) else self._rows(value)

    def _rows(self, value: Any) -> Any:  # noqa: ANN401 - a tensor, an array, an object with a length
        if _length(value) != self.samples:
            raise ConfigError(
                f"a batch of {self.samples} samples cannot be split: a part has length {_length(value)}: {HINT}"
            )
        try:
            piece = value[self.start : self.stop]
        except (TypeError, KeyError, IndexError, ValueError):
            piece = None
        is_array = hasattr(value, "ndim")  # of a subclass of tensors a piece may be a plain one
        if not (is_array or type(piece) is type(value)) or len(piece) != self.stop - self.start:
            raise ConfigError(f"a {type(value).__name__} cannot be split by [start:stop]: {HINT}")
        return piece

    def _mapping(self, batch: Mapping[Any, Any]) -> Mapping[Any, Any]:
        owner = _find_owner(batch)
        if owner is not None:
            return like_mapping(batch, self._owned(batch, owner))
        apart = _has_apart(batch.values(), self.stacked)
        return like_mapping(batch, {key: self._field(batch, key, apart=apart) for key in batch})

    def _field(self, batch: Mapping[Any, Any], key: Any, *, apart: bool) -> Any:  # noqa: ANN401
        value, counts = batch[key], batch.get(f"{key}{COUNT_SUFFIX}", 0)
        if (
            not getattr(value, "ndim", 0)
            or getattr(counts, "ndim", 0) != 1
            or int(counts.sum()) != len(value)
        ):
            return self.part(value, apart=apart)
        before = int(counts[: self.start].sum())
        return value[before : before + int(counts[self.start : self.stop].sum())]

    def _owned(self, batch: Mapping[Any, Any], owner: Any) -> dict[Any, Any]:  # noqa: ANN401 - a tensor or an array
        """Of objects that name their image, those of some images, whose numbers begin with 0 again."""
        kept, values = (owner >= self.start) & (owner < self.stop), {}
        in_order = owner.tolist() == list(range(self.samples))
        for key, value in batch.items():
            named, rows = (
                key in (_OWNER, *_OBJECTS),
                getattr(value, "ndim", 0) and len(value) == len(owner),
            )
            if (
                rows
                and not named
                and key not in _IMAGES
                and len(owner) == self.samples
                and not in_order
            ):
                raise ConfigError(
                    f"{key!r} has one entry for each image or for each object: {HINT}"
                )
            values[key] = (
                value[kept] if named or (rows and key not in _IMAGES) else self.part(value)
            )
        return values | {_OWNER: owner[kept] - self.start}

    def _sequence(self, parts: Sequence[Any], *, apart: bool) -> Any:  # noqa: ANN401
        if _is_column(parts):
            return parts[self.start : self.stop] if len(parts) == self.samples else parts
        outer = not self.stacked and len(parts) == self.samples and _are_alike(parts)
        if (
            outer
            and self.samples in _inner_lengths(parts, self.stacked)
            and not (apart or _looks_apart(parts))
        ):
            raise ConfigError(
                f"a {type(parts).__name__} of {self.samples} could hold samples, or fields of {self.samples} samples "
                f"each: {HINT}"
            )
        if outer:
            return parts[self.start : self.stop]
        below = _has_apart(parts, self.stacked)
        pieces = [self.part(part, apart=below) for part in parts]
        make: Any = type(parts)
        return make(*pieces) if hasattr(parts, "_fields") else make(pieces)


def _lengths(value: Any, stacked: bool, *, strict: bool = True) -> set[int]:  # noqa: ANN401
    """The numbers of samples that a part may be said to have; empty if it says nothing.

    Where entries of a list differ in length, they are taken for samples, unless `strict` is off:
    then for fields too, one of which is not split.
    """
    if _is_record(value):
        value = _fields(value)
    if isinstance(value, Mapping):
        parts = _count_by(value)
        told = _agree(
            _lengths(part, stacked, strict=strict) for part in parts if not _is_column(part)
        )
        columns = {len(part) for part in parts if _is_column(part) and part}
        return (
            told
            if len(told) == 1
            else told & columns or told or (columns if len(columns) == 1 else set())
        )
    if not isinstance(value, list | tuple):
        return set() if _is_whole(value) else {_length(value)}
    if _is_column(value):
        return {len(value)} if value else set()
    outer = {len(value)} if not stacked and _are_alike(value) else set()
    return outer | _inner_lengths(value, stacked, strict=strict and bool(outer))


def _inner_lengths(parts: Sequence[Any], stacked: bool, *, strict: bool = True) -> set[int]:
    """Numbers of samples if the parts are fields: those on which all agree, if there is one."""
    if len(parts) > _MOST_FIELDS:
        return set()
    return _agree(
        (_lengths(part, stacked) for part in parts if not _is_column(part)), strict=strict
    )


def _count_by(batch: Mapping[Any, Any]) -> list[Any]:
    """The parts of a mapping that say how many samples it has: not ragged ones."""
    if _find_owner(batch) is None:
        ragged = {_length(part) for key, part in batch.items() if f"{key}{COUNT_SUFFIX}" in batch}
        plain = [key for key in batch if f"{key}{COUNT_SUFFIX}" not in batch]
        counts = {f"{key}{COUNT_SUFFIX}" for key in batch}
        return [batch[key] for key in plain if key in counts or _length(batch[key]) not in ragged]
    images = [batch[key] for key in _IMAGES if key in batch]
    return images or [part for key, part in batch.items() if key != _OWNER and key not in _OBJECTS]


def _find_owner(batch: Mapping[Any, Any]) -> Any:  # noqa: ANN401 - a tensor or an array
    """For each object its image, in a batch as Ultralytics has it; others call the numbers of samples so."""
    owner = batch.get(_OWNER)
    return (
        owner if getattr(owner, "ndim", 0) == 1 and any(key in batch for key in _OBJECTS) else None
    )


def _agree(found: Iterable[set[int]], *, strict: bool = False) -> set[int]:
    """The numbers that all have; without one, all of them, or none if `strict`."""
    told = [lengths for lengths in found if lengths]
    every = set[int]().union(*told)
    return every.intersection(*told) or (set() if strict else every)


def _has_apart(parts: Iterable[Any], stacked: bool) -> bool:
    """Whether one of several fields can only be a list with an entry for each sample."""
    return not stacked and any(
        isinstance(part, list | tuple)
        and not _is_column(part)
        and _are_alike(part)
        and len(part) not in _inner_lengths(part, stacked)
        for part in parts
    )


def _looks_apart(parts: Sequence[Any]) -> bool:
    """Whether entries that could be samples or fields are rather samples: no framework puts fields like these so."""
    first = parts[0]
    return isinstance(parts, list) and (
        isinstance(first, Mapping) or _is_record(first) or 2 <= _rank(first) <= 3
    )


def _are_alike(parts: Sequence[Any]) -> bool:
    """Whether the parts could be samples: of one type, with one number of dimensions or the same keys."""
    return len({_kind(part) for part in parts[:_MOST_FIELDS]}) == 1


def _kind(part: Any) -> object:  # noqa: ANN401
    if isinstance(part, Mapping):
        return type(part), frozenset(part)
    if isinstance(part, list | tuple):
        kinds = map(_kind, part[:_MOST_FIELDS])
        return type(part), frozenset(kinds) if isinstance(part, list) else tuple(kinds)
    return type(part), _rank(part), getattr(part, "dtype", None)


def _is_column(value: Any) -> bool:  # noqa: ANN401
    """Whether this is a list of plain things, such as paths or scalars, and not of parts with samples."""
    return (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and all(map(_is_item, value))
    )


def _is_item(value: Any) -> bool:  # noqa: ANN401
    return _is_whole(value) or _is_column(value)


def _is_whole(value: Any) -> bool:  # noqa: ANN401
    """Whether a value has nothing that could be split."""
    if isinstance(value, _PLAIN):
        return True
    if hasattr(value, "ndim"):
        return bool(value.ndim == 0)
    return (
        not isinstance(value, Mapping | list | tuple)
        and not _is_record(value)
        and _length(value) < 0
    )


def _length(value: Any) -> int:  # noqa: ANN401
    """Entries of what can be cut by [start:stop]; -1 for anything else."""
    has_length = (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and getattr(value, "ndim", 1) > 0
    )
    return len(value) if has_length else -1


def _is_record(value: Any) -> bool:  # noqa: ANN401
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(record: Any) -> dict[str, Any]:  # noqa: ANN401
    return {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}


def _rank(value: Any) -> int:  # noqa: ANN401
    return int(getattr(value, "ndim", -1))


def like_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type where that is possible."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    like = copy.copy(batch)
    like.clear()
    like.update(values)
    return like


def cut_evenly(samples: int, size: int) -> list[tuple[int, int]]:
    """The fewest pieces of at most `size` samples, as even as can be: 9 samples at most 8 at once
    are 5 and 4.

    Even pieces need less memory than full ones with a remainder, for as many steps, and batch norm
    never meets a single sample where it could meet more.
    """
    pieces = -(-samples // size)
    least, more = divmod(samples, pieces)
    ends = [
        least * piece + min(piece, more) for piece in range(pieces + 1)
    ]  # larger ones first: errors show at once
    return list(itertools.pairwise(ends))
