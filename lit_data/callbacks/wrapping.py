"""Wrappers around a method of one object, which come off again in any order."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

SAVE = "save_checkpoint"
"""Method of a Trainer for checkpoints of all kinds: of those of weights alone no callback is told."""

Around = Callable[..., Any]
"""Called as ``around(call, *args, **kwargs)``, where `call` is what it wraps."""


class Wrapped:
    """Stands on an object in place of a method: the last wrapper outermost.

    Attributes:
        method: The method.
        was_attribute: It was an attribute of the object and not of its class.
        arounds: The wrappers, the first one innermost.
        lasting: Those of them that copies of the object have too.
    """

    def __init__(self, method: Callable[..., Any], *, was_attribute: bool) -> None:
        # Lightning asks a hook for its code, torch's schedules ask an optimizer's step for a mark
        # of theirs.
        functools.update_wrapper(self, method)
        self.method = method
        self.was_attribute = was_attribute
        self.arounds: list[Around] = []
        self.lasting: list[Around] = []
        self.call = method

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, D102 - any method
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Let copies of the object have the lasting wrappers alone: the others are those of a run."""
        lasting = [around for around in self.arounds if around in self.lasting]
        return _rebuild, (self.method, self.was_attribute, lasting)

    def compose(self) -> None:
        """Put the wrappers together, once for each change: a training step makes a dozen calls."""
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
    """Let `around` run in place of ``owner.name``.

    Args:
        owner: An object whose attributes can be set; its class is left alone.
        name: One of its methods.
        around: Called with the method that it wraps and the arguments.
        lasting: Copies of the object have it too; it can be copied and pickled itself.

    Returns:
        A function that takes the wrapper off.
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
    """Let `act` run after each call of ``owner.name`` that raises nothing; returns as `wrap` does."""

    def around(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any method
        result = call(*args, **kwargs)
        act()
        return result

    return wrap(owner, name, around)


class CopiedCallback(Callback):
    """Callback whose copies have its options and counts, and nothing of the run that it is in.

    Attributes:
        of_run: Makes the values with which copies begin, by the names of attributes.
    """

    of_run: ClassVar[Mapping[str, Callable[[], Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        for name, make in self.of_run.items():
            state[name] = make()
        return state


class UndoneCallback(CopiedCallback, ABC):
    """Callback that changes objects of a run, and leaves them as before when the run is over."""

    @abstractmethod
    def undo(self, trainer: Trainer) -> None:
        """Leave everything as before; may be called again."""

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.undo(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.undo(trainer)  # Lightning calls no teardown then
