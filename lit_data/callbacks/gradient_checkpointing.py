"""`GradientCheckpointing`: submodules that recompute their activations instead of keeping them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lit_data.callbacks.wrapping import Around, UndoneCallback, wrap
from lit_data.core.errors import ConfigError

log = logging.getLogger(__name__)


class _Buffer(NamedTuple):
    """A buffer and its content at some moment.

    Attributes:
        owner: Dict that holds the buffer.
        name: Key of the buffer in `owner`.
        content: Copy of the buffer.
    """

    owner: dict[str, Tensor | None]
    name: str
    content: Tensor


class GradientCheckpointing(UndoneCallback):
    """Trades time for memory: named submodules keep only their inputs and repeat their forward pass.

    Gradients, dropout, buffers (including batch norm's statistics) and checkpoints are the same as
    without this callback. It acts while the LightningModule trains with gradients, from the start
    of a fit to its end. Side effects of a chosen module, other than on its buffers, happen twice:
    hooks of modules inside it, attributes, its own `torch.Generator`. A warning names chosen
    modules that were not called in the first epoch.

    Args:
        modules: Names of submodules as in ``named_modules()``, or patterns (``*``, ``?``,
            ``[...]``) for each part of a dotted name: ``encoder.*`` matches the children of
            ``encoder``, but not theirs.

    Raises:
        ConfigError: `modules` is not a list of names (the empty name, the LightningModule itself,
            is not allowed); at the start of a fit, a name or pattern matches no submodule or a
            container without a forward pass, or a chosen module is inside another one.
    """

    of_run = MappingProxyType({"_undo": ExitStack})

    def __init__(self, modules: Sequence[str]) -> None:
        is_list = not isinstance(modules, str) and len(modules) > 0
        if not is_list or not all(isinstance(name, str) and name for name in modules):
            raise ConfigError(
                f"modules={modules!r}: allowed is a list of names or patterns of submodules, "
                "such as ['encoder.*'] - name at least one, or remove GradientCheckpointing"
            )
        self.modules = tuple(modules)
        self._undo = ExitStack()
        self._idle: set[str] = set()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in setup, because the LightningModule may make modules in its own setup or
        # configure_model, which come later.
        self._undo.close()
        chosen = _choose_modules(pl_module, self.modules)
        self._idle = set(chosen)
        for name, module in chosen.items():
            around = self._make_around(pl_module, module, name)
            self._undo.callback(wrap(module, "forward", around))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._idle and trainer.is_global_zero:
            log.warning(
                "GradientCheckpointing: %s was not called in training, so it saved no memory; "
                "name modules that are called directly",
                _quote(sorted(self._idle)),
            )
        self._idle.clear()

    @override
    def undo(self, trainer: Trainer) -> None:
        self._undo.close()

    def _make_around(self, root: nn.Module, module: nn.Module, name: str) -> Around:
        idle = self._idle

        def around(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any module
            if not (root.training and torch.is_grad_enabled()):
                return call(*args, **kwargs)
            idle.discard(name)
            return _run_checkpointed(module, _watch_inputs(call, name), args, kwargs)

        return around


def _choose_modules(root: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that the patterns match, each once."""
    modules = {name: module for name, module in root.named_modules(remove_duplicate=False) if name}
    chosen: dict[int, str] = {}  # by id: torchmetrics compares its modules by their content
    for pattern in patterns:
        matches = [name for name in modules if _fits(name, pattern)]
        if not matches:
            nearest = get_close_matches(pattern, modules, n=3, cutoff=0.3) or list(modules)[:3]
            raise ConfigError(
                f"modules: {pattern!r} matches no submodule of {type(root).__name__} - allowed "
                "are names of its named_modules() and patterns for each part of them - the "
                f"nearest: {_quote(nearest)}"
            )
        for name in matches:
            module = modules[name]
            if getattr(module.forward, "__func__", None) is nn.Module.forward:
                raise ConfigError(
                    f"modules: {name!r} is a {type(module).__name__}, which has no forward pass of "
                    f"its own - choose what it holds: '{name}.*'"
                )
            chosen.setdefault(id(module), name)
    for name in chosen.values():
        _check_inside(modules[name], name, chosen)
    return {name: modules[name] for name in chosen.values()}


def _fits(name: str, pattern: str) -> bool:
    name_parts = name.split(".")
    pattern_parts = pattern.split(".")
    if len(name_parts) != len(pattern_parts):
        return False
    return all(map(fnmatchcase, name_parts, pattern_parts))


def _check_inside(module: nn.Module, name: str, chosen: Mapping[int, str]) -> None:
    """Refuse a module that holds another chosen one; `chosen` has the names by id."""
    _, *inner_modules = module.modules()
    for inner in inner_modules:
        if id(inner) in chosen:
            raise ConfigError(
                f"modules: {chosen[id(inner)]!r} is inside {name!r}, which would run it three "
                "times - choose one of them"
            )


def _quote(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _watch_inputs(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Refuse a module that changes its inputs in place, as its forward pass is repeated from them."""

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any module
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in inputs]
        output = call(*args, **kwargs)
        if [tensor._version for tensor in inputs] != versions:
            raise ConfigError(
                f"GradientCheckpointing: {name!r} changes its input in place, so its forward "
                f"cannot be repeated: set inplace=False in its first layer, or remove {name!r} "
                "from modules"
            )
        return output

    return run


def _run_checkpointed(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:  # noqa: ANN401 - any module
    """Run `call` now, and repeat it in backward with the current buffers, without changing later ones."""
    if torch.compiler.is_compiling():
        # The compiler itself repeats no update of a buffer, and could not see ours.
        return checkpoint(call, *args, use_reentrant=False, **kwargs)
    buffers = _copy_buffers(module)
    is_repetition = False

    def run(*values: Any) -> Any:  # noqa: ANN401
        nonlocal is_repetition
        positional = values[: len(args)]
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        if is_repetition:
            with _lend(buffers):
                return call(*positional, **named)
        is_repetition = True
        return call(*positional, **named)

    # By position, because torch searches only positional arguments for the devices whose random
    # state it keeps.
    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True)


def _copy_buffers(module: nn.Module) -> list[_Buffer]:
    buffers = []
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                buffers.append(_Buffer(part._buffers, name, buffer.detach().clone()))
    return buffers


@contextmanager
def _lend(buffers: Sequence[_Buffer]) -> Iterator[None]:
    """Temporarily replace buffers by copies of their saved content."""
    tensors_of_now = [buffer.owner[buffer.name] for buffer in buffers]
    for owner, name, content in buffers:
        owner[name] = content.clone()  # backward may be repeated, with retain_graph
    try:
        yield
    finally:
        for buffer, tensor in zip(buffers, tensors_of_now, strict=True):
            buffer.owner[buffer.name] = tensor
