"""Wrap a method of one object, more than once if need be, and take each wrapper off again in any order."""

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]
"""Called as ``around(call, *args, **kwargs)``, where `call` is what it wraps."""


class _Wrapped:
    """Stands on an object in place of a method: the last wrapper outermost."""

    def __init__(self, method: Callable[..., Any], *, own: bool) -> None:
        # Lightning asks a hook for its code, torch's schedules ask an optimizer's step for a mark of theirs.
        functools.update_wrapper(self, method)
        self.method, self.own = method, own
        self.arounds: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any method
        call = self.method
        for around in self.arounds:
            call = functools.partial(around, call)
        return call(*args, **kwargs)


def wrap(owner: Any, name: str, around: Around) -> Callable[[], None]:  # noqa: ANN401 - any object
    """Let `around` run in place of ``owner.name``.

    Args:
        owner: An object whose attributes can be set; its class is left alone.
        name: One of its methods.
        around: Called with the method that it wraps and the arguments.

    Returns:
        A function that takes the wrapper off.
    """
    wrapped = vars(owner).get(name)
    if not isinstance(wrapped, _Wrapped):
        wrapped = _Wrapped(getattr(owner, name), own=name in vars(owner))
        setattr(owner, name, wrapped)
    wrapped.arounds.append(around)

    def unwrap() -> None:
        if around in wrapped.arounds:
            wrapped.arounds.remove(around)
        if not wrapped.arounds and vars(owner).get(name) is wrapped:
            if wrapped.own:
                setattr(owner, name, wrapped.method)
            else:
                delattr(owner, name)

    return unwrap
