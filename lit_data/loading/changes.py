"""Changes of a dataset between passes, which worker processes with a copy of it would not see."""

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

_MOST_VALUES = 2000
"""Most values to check, those nearest to the dataset first; about 2 ms."""
_MOST_ITEMS = 128
"""Most items to check from each end of a list, tuple, set or dict."""
_MOST_BYTES = 4096
"""Size of the largest array whose values are checked."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_Marks = list[object]


def look_at(*roots: object) -> _Marks:
    """Return marks of the content of objects; they differ if the content has changed.

    Attributes, containers, closures and class attributes are followed. Large arrays and objects
    without attributes are compared by identity and size. No code of the user is called.
    """
    marks: _Marks = []
    queue: deque[object] = deque(roots)
    seen: set[int] = set()
    while queue and len(marks) < _MOST_VALUES:
        value = queue.popleft()
        if isinstance(value, _PLAIN):
            marks.append((type(value), repr(value) if isinstance(value, float) else value))
        elif id(value) not in seen:
            seen.add(id(value))
            parts = _list_parts(value)
            marks.append(_mark(value, is_opaque=parts is None))
            queue.extend(parts or ())
    return marks


def _mark(value: Any, *, is_opaque: bool) -> object:  # noqa: ANN401 - anything
    """Return a mark of a value without its parts."""
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        content = value.tobytes() if is_small else b""
        return _Identity(value), value.shape, value.dtype, content
    if isinstance(value, torch.Tensor):
        version = 0 if value.is_inference() else value._version
        return _Identity(value), value.shape, value.dtype, version
    if is_opaque:
        return _Identity(value)
    size = len(value) if isinstance(value, (*_CONTAINERS, Mapping)) else 0
    return type(value), size


def _list_parts(value: Any) -> list[object] | None:  # noqa: ANN401
    """Return the parts of a value, or None if they are unknown."""
    if isinstance(value, np.ndarray | torch.Tensor | types.ModuleType):
        return None
    if isinstance(value, type):
        return _list_class_values(value)
    if isinstance(value, types.FunctionType):
        return [value.__code__, value.__defaults__, *_list_closure(value)]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    parts = _list_items(value)
    attributes = _list_attributes(value)
    if parts is None and attributes is None:
        return None
    return [type(value), *(parts or ()), *(attributes or ())]


def _list_items(value: object) -> list[object] | None:
    if isinstance(value, dict):
        return [*_take_ends(value.keys()), *_take_ends(value.values())]
    return _take_ends(value) if isinstance(value, _CONTAINERS) else None


def _take_ends(items: Any) -> list[object]:  # noqa: ANN401 - any container
    if len(items) <= 2 * _MOST_ITEMS or not hasattr(items, "__reversed__"):
        return list(islice(items, 2 * _MOST_ITEMS))
    return [*islice(items, _MOST_ITEMS), *islice(reversed(items), _MOST_ITEMS)]


def _list_attributes(value: object) -> list[object] | None:
    """Return the attributes of an object, or None if it cannot have any."""
    slots = list(_read_slots(value))
    named: Mapping[str, object] | None = getattr(value, "__dict__", None)
    if named is None:
        return slots or None
    return [*named.keys(), *named.values(), *slots]


def _read_slots(value: object) -> Iterator[object]:
    for cls in type(value).__mro__:
        names: Iterable[str] | str = vars(cls).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            slot = vars(cls).get(name)
            if isinstance(slot, types.MemberDescriptorType):
                yield _read_slot(slot, value)


def _read_slot(slot: types.MemberDescriptorType, value: object) -> object:
    try:
        return slot.__get__(value)
    except AttributeError:
        return None


def _list_closure(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has no value yet
            yield None


def _list_class_values(cls: type) -> list[object]:
    """Return the values that all objects of a class share."""
    values: list[object] = list(cls.__bases__)
    for name, value in list(vars(cls).items()):
        if not name.startswith("_") and isinstance(
            value, (*_PLAIN, *_CONTAINERS, dict, np.ndarray)
        ):
            values.append(value)
    return values


class _Identity:
    """Identity of an object; a weak reference, because another object may get its address."""

    def __init__(self, value: object) -> None:
        self._address = id(value)
        try:
            self._find: Callable[[], object] = weakref.ref(value)
        except TypeError:
            self._find = int  # no weak reference is possible: the address decides

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or self._address != other._address:
            return False
        return self._find() is other._find()

    __hash__ = None  # type: ignore[assignment]
