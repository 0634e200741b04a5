"""`GradientCheckpointing`: compute the activations of named submodules again instead of keeping them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lit_data.callbacks.wrapping import Around, wrap
from lit_data.errors import ConfigError

log = logging.getLogger(__name__)


_Buffers = Sequence[tuple[dict[str, Tensor | None], str, Tensor]]
"""Where a buffer hangs, its name there, and its content."""


class GradientCheckpointing(L.Callback):
    """Trades time for memory: named submodules keep only the inputs of their forward pass and
    repeat it in backward.

    Gradients, dropout, buffers (batch norm's statistics among them) and checkpoints are those of a
    run without it. It acts while the LightningModule trains with gradients, from the start of a fit
    to its end. What a chosen module does to anything but its buffers it does twice: hooks of
    modules inside it, attributes, a `torch.Generator` of its own. A chosen module that took no part
    in the first epoch is named in a warning.

    Args:
        modules: Names of submodules as in ``named_modules()``, or patterns (``*``, ``?``,
            ``[...]``) for each part of a dotted name: ``encoder.*`` are the children of ``encoder``
            without theirs.

    Raises:
        ConfigError: Not a list of names (the empty name, the LightningModule itself, is none); at
            the start of a fit, a name or pattern that fits no submodule, a container without a
            forward pass, or a module that lies inside another chosen one.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        if (
            isinstance(modules, str)
            or not modules
            or not all(isinstance(name, str) and name for name in modules)
        ):
            raise ConfigError(
                f"modules={modules!r}: allowed is a list of names or patterns of submodules, such as ['encoder.*'] - "
                "name at least one, or leave GradientCheckpointing out"
            )
        self.modules = tuple(modules)
        self._unwrap: list[Callable[[], None]] = []
        self._idle: set[str] = set()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Not in setup: modules may be made in the LightningModule's own setup or configure_model,
        # which come later.
        self._undo()
        chosen = _choose_modules(pl_module, self.modules)
        self._idle = set(chosen)
        for name, module in chosen.items():
            self._unwrap.append(wrap(module, "forward", self._make_around(pl_module, module, name)))

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._idle and trainer.is_global_zero:
            log.warning(
                "GradientCheckpointing: %s took no part in training, so nothing was saved there; "
                "name modules that are called themselves",
                _quote(sorted(self._idle)),
            )
        self._idle.clear()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._undo()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._undo()  # Lightning calls no teardown then

    def _undo(self) -> None:
        while self._unwrap:
            self._unwrap.pop()()

    def _make_around(self, root: nn.Module, module: nn.Module, name: str) -> Around:
        idle = self._idle

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any module
            if not (root.training and torch.is_grad_enabled()):
                return call(*args, **kwargs)
            idle.discard(name)
            return _run_checkpointed(module, call, args, kwargs)

        return around


def _choose_modules(root: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that the patterns name, each once."""
    names = {name: module for name, module in root.named_modules(remove_duplicate=False) if name}
    chosen: dict[
        int, str
    ] = {}  # by id: torchmetrics compares and hashes its modules by their content
    for pattern in patterns:
        found = [name for name in names if _fits(name, pattern)]
        if not found:
            near = get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names)[:3]
            raise ConfigError(
                f"modules: {pattern!r} fits no submodule of {type(root).__name__} - allowed are names of its "
                f"named_modules() and patterns for each part of them - the nearest: {_quote(near)}"
            )
        for name in found:
            _check_forward(names[name], name)
            chosen.setdefault(id(names[name]), name)
    for name in chosen.values():
        _, *inside = names[name].modules()
        inner = next((chosen[id(module)] for module in inside if id(module) in chosen), None)
        if inner is not None:
            raise ConfigError(
                f"modules: {inner!r} lies inside {name!r}, which would run it three times - choose one of them"
            )
    return {name: names[name] for name in chosen.values()}


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_forward(module: nn.Module, name: str) -> None:
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ConfigError(
            f"modules: {name!r} is a {type(module).__name__}, which has no forward pass of its own - "
            f"choose what it holds: '{name}.*'"
        )


def _quote(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _run_checkpointed(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:  # noqa: ANN401 - any module
    """Run `call` now, and again in backward from the buffers of now, without a trace in those of then."""
    if (
        torch.compiler.is_compiling()
    ):  # it repeats no update of a buffer by itself, and could not see ours
        return checkpoint(call, *args, use_reentrant=False, **kwargs)
    buffers = [
        (owner, name, buffer.detach().clone()) for owner, name, buffer in _find_buffers(module)
    ]
    again = False

    def run(*values: Any) -> Any:  # noqa: ANN401
        nonlocal again
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        if again:
            with _lend(buffers):
                return call(*values[: len(args)], **named)
        again = True
        return call(*values[: len(args)], **named)

    # By position, as torch looks only there for the devices whose random state it keeps.
    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True)


def _find_buffers(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner._buffers, name, buffer


@contextmanager
def _lend(buffers: _Buffers) -> Iterator[None]:
    """Put copies in the place of buffers for a while."""
    own = [(place, name, place[name]) for place, name, _ in buffers]
    for place, name, content in buffers:
        place[name] = content.clone()
    try:
        yield
    finally:
        for place, name, tensor in own:
            place[name] = tensor
