"""Submodules and methods that stay in float32 while autocast is on around them."""

import difflib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lit_data.callbacks.wrapping import wrap
from lit_data.errors import ConfigError

KeepFp32 = tuple[str, ...] | Callable[[str, nn.Module], bool]
"""Names of submodules, each with all below it, or of methods; or a predicate of a submodule's name and itself."""


def keep_in_float32(model: nn.Module, keep: KeepFp32, device_type: str) -> list[Callable[[], None]]:
    """Let some submodules and methods run without autocast, with what is float16 or bfloat16 given as float32.

    Of a submodule it is the ``forward``. It can still be copied, pickled and compiled, and its state dict does not
    change.

    Args:
        model: Whose submodules and methods.
        keep: Which.
        device_type: Where autocast works.

    Returns:
        Functions that undo it.

    Raises:
        ConfigError: If there is nothing of a name.
    """
    around = functools.partial(_run_in_float32, device_type)
    return [wrap(owner, method, around) for owner, method in _find_methods(model, keep)]


def _find_methods(model: nn.Module, keep: KeepFp32) -> list[tuple[nn.Module, str]]:
    named = {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): module  # torch.compile puts it in between
        for name, module in model.named_modules(remove_duplicate=False)
    }
    if callable(keep):
        return _unique([(module, "forward") for name, module in named.items() if name and keep(name, module)])
    found = []
    for name in keep:
        owner, _, method = name.rpartition(".")
        if name and name in named:
            found += [(m, "forward") for other, m in named.items() if f"{other}.".startswith(f"{name}.")]
        elif method and owner in named and callable(getattr(type(named[owner]), method, None)):
            found.append((named[owner], method))
        else:
            raise _explain_unknown(model, name, [other for other in named if other])
    return _unique(found)


def _unique(found: list[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    return list({(id(owner), method): (owner, method) for owner, method in found}.values())


def _explain_unknown(model: nn.Module, name: str, known: list[str]) -> ConfigError:
    nearest = ", ".join(difflib.get_close_matches(name, known, cutoff=0.3) or known[:3]) or "no submodule"
    return ConfigError(
        f"AMP: keep_fp32 has {name!r}, which is no submodule or method of {type(model).__name__} - allowed: names as in"
        f" its named_modules(), or of its methods - the nearest: {nearest}"
    )


def _run_in_float32(device_type: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    if not torch.is_autocast_enabled(device_type):
        return call(*args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        args, kwargs = tree_map_only(Tensor, _cast, (args, kwargs))
        return call(*args, **kwargs)


def _cast(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
