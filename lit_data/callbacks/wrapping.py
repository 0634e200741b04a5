"""Wrappers around a method of one object, which can be removed in any order."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

SAVE = "save_checkpoint"
"""Method of a Trainer that saves any checkpoint; callbacks do not hear of weights-only ones."""

Around = Callable[..., Any]
"""Wrapper, called as ``around(call, *args, **kwargs)`` where `call` is the wrapped method."""


class Wrapped:
    """Replaces a method of an object, with the last wrapper outermost.

    Attributes:
        method: The original method.
        was_attribute: True if the method was an attribute of the object, not of its class.
        arounds: The wrappers, innermost first.
        lasting: The wrappers that copies of the object have too.
    """

    def __init__(self, method: Callable[..., Any], *, was_attribute: bool) -> None:
        # Lightning reads a hook's code, and torch's schedules read a mark that they set on an
        # optimizer's step.
        functools.update_wrapper(self, method)
        self.method = method
        self.was_attribute = was_attribute
        self.arounds: list[Around] = []
        self.lasting: list[Around] = []
        self.call = method

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, D102 - any method
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Give copies of the object only the lasting wrappers; the others belong to a run."""
        lasting = [around for around in self.arounds if around in self.lasting]
        return _rebuild, (self.method, self.was_attribute, lasting)

    def compose(self) -> None:
        """Compose the wrappers once for each change, as a training step makes a dozen calls."""
        self.call = self.method
        for around in self.arounds:
            self.call = functools.partial(around, self.call)


def _rebuild(
    method: Callable[..., Any], was_attribute: bool, arounds: list[Around]
) -> Callable[..., Any]:
    if not arounds:
        return method
    wrapped = Wrapped(method, was_attribute=was_attribute)
    wrapped.arounds, wrapped.lasting = arounds, list(arounds)
    wrapped.compose()
    return wrapped


def wrap(
    owner: Any,  # noqa: ANN401 - any object
    name: str,
    around: Around,
    *,
    lasting: bool = False,
) -> Callable[[], None]:
    """Run `around` in place of ``owner.name``.

    Args:
        owner: Object whose attributes can be set; its class does not change.
        name: Name of the method.
        around: Wrapper, called with the method that it wraps and the arguments.
        lasting: Give copies of the object the wrapper too, which must itself allow copying and
            pickling.

    Returns:
        A function that removes the wrapper.
    """
    wrapped = vars(owner).get(name)
    if not isinstance(wrapped, Wrapped):
        wrapped = Wrapped(getattr(owner, name), was_attribute=name in vars(owner))
        setattr(owner, name, wrapped)
    wrapped.arounds.append(around)
    if lasting:
        wrapped.lasting.append(around)
    wrapped.compose()

    def unwrap() -> None:
        if around in wrapped.arounds:
            wrapped.arounds.remove(around)
            wrapped.compose()
        # after the last one the object is as before, if nobody else has set the method
        if not wrapped.arounds and vars(owner).get(name) is wrapped:
            if wrapped.was_attribute:
                setattr(owner, name, wrapped.method)
            else:
                delattr(owner, name)

    return unwrap


def run_after(owner: Any, name: str, act: Callable[[], None]) -> Callable[[], None]:  # noqa: ANN401
    """Run `act` after each successful call of ``owner.name``, and return as `wrap` does."""

    def around(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any method
        result = call(*args, **kwargs)
        act()
        return result

    return wrap(owner, name, around)


class CopiedCallback(Callback):
    """Callback whose copies have its options and counts, but nothing of the current run.

    Attributes:
        of_run: Functions that make the initial values of copies, by the names of attributes.
    """

    of_run: ClassVar[Mapping[str, Callable[[], Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        for name, make in self.of_run.items():
            state[name] = make()
        return state


class UndoneCallback(CopiedCallback, ABC):
    """Callback that changes objects of a run and restores them when the run is over."""

    @abstractmethod
    def undo(self, trainer: Trainer) -> None:
        """Restore everything; may be called more than once."""

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.undo(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.undo(trainer)  # Lightning calls no teardown then
