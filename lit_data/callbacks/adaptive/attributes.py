"""Copies of the attributes of modules, to restore them if a step has to be undone."""

import io
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

_MOST_ENTRIES = 2_000
"""Most entries of a container; a longer list is cut to its old length, longer others are not kept."""
_MOST_VALUES = 5_000
"""Most values of all kinds that are visited, which takes about 0.3 us each."""
_MOST_BYTES = 2**25
"""Largest tensor or array that is copied, because each step may have to copy it."""
_OWN = frozenset(vars(nn.Module())) | frozenset(vars(LightningModule()))
"""Attributes of torch and Lightning, which are restored without what is inside their values."""
_ENGINES = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "omegaconf", "hydra"}
_HOLDERS = {"types", "argparse", "collections", "typing", "abc"}
"""Modules of Python whose classes hold values of user code."""

_PLAIN = {int, float, bool, str, bytes, complex, type(None), type, torch.device, torch.dtype}


class _Way(NamedTuple):
    """Functions that keep and restore values of a type.

    Attributes:
        copy: Function that returns a value's current content.
        put: Function that restores that content.
        inner: Function that returns the values inside the content.
        is_counted: True if the value has a number of entries.
    """

    copy: Callable[[Any], Any]
    put: Callable[[Any, Any], object]
    inner: Callable[[Any], Iterable[Any]] = lambda content: ()
    is_counted: bool = True


def _put_dict(value: dict[Any, Any], content: dict[Any, Any]) -> None:
    # Past methods of a subclass: that of Counter adds.
    kind = OrderedDict if isinstance(value, OrderedDict) else dict
    kind.clear(value)
    for key, entry in content.items():
        kind.__setitem__(value, key, entry)


def _put_list(value: list[Any], content: list[Any]) -> None:
    list.__setitem__(value, slice(None), content)


def _put_set(value: set[Any], content: set[Any]) -> None:
    set.clear(value)
    set.update(value, content)


def _put_deque(value: deque[Any], content: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, content)


def _put_bytes(value: Any, content: Any) -> None:  # noqa: ANN401 - a bytearray or an array
    value[:] = content


def _put_bits(value: np.random.Generator, content: Any) -> None:  # noqa: ANN401 - of any bit generator
    value.bit_generator.state = content


_WAYS: dict[type, _Way] = {
    dict: _Way(dict, _put_dict, dict.values),
    list: _Way(list, _put_list, lambda content: content),
    set: _Way(set, _put_set),
    deque: _Way(list, _put_deque, lambda content: content),
    bytearray: _Way(bytearray, _put_bytes, is_counted=False),
    array: _Way(lambda value: value[:], _put_bytes, is_counted=False),
    np.ndarray: _Way(np.copy, np.copyto, is_counted=False),
    random.Random: _Way(
        random.Random.getstate, lambda value, content: value.setstate(content), is_counted=False
    ),
    np.random.Generator: _Way(lambda value: value.bit_generator.state, _put_bits, is_counted=False),
    np.random.RandomState: _Way(
        np.random.RandomState.get_state,
        lambda value, content: value.set_state(content),
        is_counted=False,
    ),
    torch.Generator: _Way(
        torch.Generator.get_state, lambda value, content: value.set_state(content), is_counted=False
    ),
}


def _read_slots(value: object) -> dict[str, Any]:
    content = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                content[name] = getattr(value, name)
    return content


def _put_slots(value: object, content: dict[str, Any]) -> None:
    for name in _read_slots(value).keys() - content.keys():
        object.__delattr__(value, name)
    for name, entry in content.items():
        object.__setattr__(value, name, entry)


_SLOTS = _Way(_read_slots, _put_slots, dict.values)


def _is_plain(value: object) -> bool:
    """Return True for an immutable value, such as the sizes of a layer."""
    if isinstance(value, tuple):
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


class _Attributes:
    """Attributes of one object.

    Attributes:
        values: The dict of attributes itself.
        content: Copy of that dict.
        inner: Name and value of the attributes that are not plain values.
    """

    __slots__ = ("content", "inner", "is_layer", "values")

    def __init__(self, owner: object) -> None:
        self.values = vars(owner)
        # A model has hundreds of torch layers, so only their new attributes are checked here:
        # `AttributeCopy` copies the others without a call for each.
        self.is_layer = type(owner).__module__.startswith("torch.nn.")
        self.content: dict[str, Any] = {}
        self.inner: list[tuple[str, Any]] = []

    def take(self) -> None:
        """Take the attributes as they are now."""
        values, content = self.values, self.content
        are_as_many = len(values) == len(content)
        if are_as_many and all(map(is_, values.values(), content.values())):
            return
        self.content = dict(values)
        self.inner = []
        for name, value in values.items():
            is_own = name in _OWN or (self.is_layer and name.startswith("_"))
            if not is_own and not _is_plain(value):
                self.inner.append((name, value))

    def put(self) -> None:
        """Restore the attributes and delete new ones."""
        for name in self.values.keys() - self.content.keys():
            del self.values[name]
        self.values.update(self.content)


class _KeptTensor(NamedTuple):
    tensor: Tensor
    version: int | None
    copy: Tensor


class KeptContent(NamedTuple):
    """A container, and what was in it."""

    value: Any
    content: Any
    way: _Way

    def put(self) -> None:
        """Restore the content."""
        self.way.put(self.value, self.content)


class AttributeCopy:
    """Keeps attributes of modules, and what is in them: containers, arrays, tensors and objects.

    Values are kept at any depth. Parts of torch and Lightning (optimizers, the Trainer), files and
    iterators are left alone.

    Args:
        modules: Modules whose attributes are kept.

    Attributes:
        left_out: Names of attributes that hold more than can be kept, with the reason.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._registered = {id(module): module for module in modules}
        modules = self._registered.values()
        # A `MetricCopy` keeps metrics.
        parts = [_Attributes(module) for module in modules if not isinstance(module, Metric)]
        self._layers = [attributes for attributes in parts if attributes.is_layer]
        self._modules = [attributes for attributes in parts if not attributes.is_layer]
        self._objects: list[_Attributes] = []
        self._values: list[KeptContent] = []
        self._lengths: list[tuple[list[Any], int]] = []
        self._tensors: dict[int, _KeptTensor] = {}
        self._large: list[tuple[str, Tensor, int | None]] = []
        self._seen: dict[int, Any] = {}  # by id; holds the values so that no id is reused
        self.left_out: dict[str, str] = {}

    def take(self) -> None:
        """Keep the current state of everything."""
        self._objects, self._values, self._lengths, self._large = [], [], [], []
        self._seen, self.left_out = dict(self._registered), {}
        old_tensors, self._tensors = self._tensors, {}
        for layer in self._layers:
            if len(layer.values) == len(layer.content):
                layer.content = layer.values.copy()
            else:
                layer.take()
        for attributes in self._modules:
            attributes.take()
        for attributes in (*self._modules, *self._layers):
            for name, value in attributes.inner:
                self._keep(value, name, old_tensors)

    def restore(self) -> None:
        """Restore everything; may be called more than once."""
        for attributes in (*self._modules, *self._layers, *self._objects):
            attributes.put()
        for kept_value in self._values:
            kept_value.put()
        for values, length in self._lengths:
            del values[length:]
        for key, saved in self._tensors.items():
            self._tensors[key] = _put_tensor(saved)
        for name, tensor, version in self._large:
            if read_version(tensor) != version:
                self.left_out[name] = f"a tensor of {tensor.nbytes >> 20} MiB"

    def _keep(self, value: Any, name: str, old_tensors: dict[int, _KeptTensor]) -> None:  # noqa: ANN401
        """Keep a value and everything in it; `name` is the name of the attribute."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in _PLAIN or id(value) in self._seen:
                continue
            if len(self._seen) - len(self._registered) >= _MOST_VALUES:
                self.left_out[name] = f"more than {_MOST_VALUES} values"
                return
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                self._keep_tensor(value, name, old_tensors)
            elif isinstance(value, tuple):
                waiting.extend(value)
            else:
                for inner in self._keep_content(value, kind, name):
                    if type(inner) not in _PLAIN:
                        waiting.append(inner)
                waiting.extend(self._keep_attributes(value, kind))

    def _keep_content(self, value: Any, kind: type, name: str) -> Iterable[Any]:  # noqa: ANN401
        """Keep the content of a container, and return the values in it."""
        way = _find_way(kind)
        if way is None:
            if isinstance(value, Iterator | io.IOBase):
                self.left_out[name] = f"a {kind.__name__}"
            return ()
        if way.is_counted and len(value) > _MOST_ENTRIES:
            size = f"a {kind.__name__} of {len(value)} entries"
            if isinstance(value, list):
                self._lengths.append((value, len(value)))
                size = f"beside appending to {size}"
            self.left_out[name] = size
            return ()
        if getattr(value, "nbytes", 0) > _MOST_BYTES:
            self.left_out[name] = f"an array of {value.nbytes >> 20} MiB"
            return ()
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return ()
        content = way.copy(value)
        self._values.append(KeptContent(value, content, way))
        return way.inner(content)

    def _keep_attributes(self, value: Any, kind: type) -> Iterable[Any]:  # noqa: ANN401
        """Keep the attributes of an object of user code, and return their values."""
        inner: list[Any] = []
        if isinstance(value, nn.Module):  # not registered, because it is in a list
            inner += value._modules.values()
            self._keep_buffers(value._buffers)
        elif _is_foreign(kind):
            return ()
        slots = _read_slots(value)
        if slots:
            self._values.append(KeptContent(value, slots, _SLOTS))
            inner += slots.values()
        if not isinstance(getattr(value, "__dict__", None), dict):
            return inner
        attributes = _Attributes(value)
        attributes.take()
        self._objects.append(attributes)
        return [*inner, *(value for _, value in attributes.inner)]

    def _keep_buffers(self, buffers: dict[str, Tensor | None]) -> None:
        """Keep the buffers of a module, as batch norm's update does not change their versions."""
        for buffer in buffers.values():
            if buffer is not None:
                self._tensors[id(buffer)] = _KeptTensor(buffer, None, buffer.detach().clone())

    def _keep_tensor(self, tensor: Tensor, name: str, old_tensors: dict[int, _KeptTensor]) -> None:
        if tensor.requires_grad:
            return
        version = read_version(tensor)
        if tensor.nbytes > _MOST_BYTES:
            self._large.append((name, tensor, version))
            return
        saved = old_tensors.get(id(tensor))
        if (
            saved is None
            or saved.tensor is not tensor
            or version is None
            or saved.version != version
        ):
            saved = _KeptTensor(tensor, version, tensor.detach().clone())
        self._tensors[id(tensor)] = saved


def find_values(batch: Any) -> tuple[list[KeptContent], list[Tensor]]:  # noqa: ANN401 - any nesting
    """Return the containers of a batch with their current content, and its tensors."""
    contents, tensors = [], []
    waiting = [batch]
    seen = set()
    while waiting:
        value = waiting.pop()
        kind: type = type(value)
        if kind in _PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            tensors.append(value)
            continue
        if isinstance(value, tuple):
            waiting += value
            continue
        way = _find_way(kind)
        if way is None and not _is_foreign(kind):
            value = getattr(value, "__dict__", None)
            way = _WAYS[dict] if isinstance(value, dict) else None
        if way is not None and way.is_counted:
            content = way.copy(value)
            contents.append(KeptContent(value, content, way))
            waiting += way.inner(content)
    return contents, tensors


def read_version(tensor: Tensor) -> int | None:
    """Return the version of a tensor, which grows with each write; None for inference tensors."""
    return None if tensor.is_inference() else tensor._version


@torch.no_grad()
def _put_tensor(kept: _KeptTensor) -> _KeptTensor:
    if kept.version is not None and read_version(kept.tensor) == kept.version:
        return kept
    kept.tensor.copy_(kept.copy)
    return kept if kept.version is None else kept._replace(version=read_version(kept.tensor))


@lru_cache(maxsize=512)
def _find_way(kind: type) -> _Way | None:
    """Return how values of a class are kept."""
    for parent in kind.__mro__:
        if parent in _WAYS:
            return _WAYS[parent]
    return None


@lru_cache(maxsize=512)
def _is_foreign(kind: type) -> bool:
    """Return True for a class whose objects hold no values of user code."""
    for parent in kind.__mro__[:-1]:
        if parent.__module__.startswith("lit_data.callbacks"):
            return True
        package = parent.__module__.partition(".")[0]
        is_of_python = package in sys.stdlib_module_names and package not in _HOLDERS
        if parent not in _WAYS and (is_of_python or package in _ENGINES):
            return True
    return False
