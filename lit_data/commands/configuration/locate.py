"""Find an object by its dotted name, and know whether it is one a configuration may name."""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from lit_data.commands.configuration.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError

_REFUSED = (
    "lit_data.cli",  # they run commands and build objects themselves
    "lit_data.commands",
    "torchmetrics.text",  # these load models by a name or a path that they are given
    "torchmetrics.audio",
    "torchmetrics.multimodal",
)
_PACKAGES = ("augment", "callbacks", "datamodules", "loading", "modules", "synthesis")
"""Packages of lit_data whose exported classes a configuration may name."""
CLASSES = frozenset(
    f"lit_data.{name}"
    for name in (
        *("grid.PatchGrid", "mosaic.MosaicSpec", "datasets.ct.windows.WindowSpec"),
        *("datasets.inspection.patches.SamplingOptions", "io.store.bands.StoreOptions"),
        *(
            "io.images.options.ReadOptions",
            "io.images.masks.MaskOptions",
            "io.remote.options.RemoteOptions",
        ),
        *("io.volumes.resampling.Resolution", "synthesis.watermarks.spec.WatermarkSpec"),
    )
)
"""Further ones, under their own names."""
_FUNCTIONS = frozenset(
    {
        "lit_data.augment.builders.detection_augment",
        "lit_data.augment.builders.segmentation_augment",
        "lit_data.augment.builders.stripe_augment",
        "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
    }
)
"""All functions that a configuration may name without a package of its own: they only build what they return."""


def is_below(name: str, places: Sequence[str]) -> bool:
    """Whether a dotted name is one of `places` or lies below one, and not in the command line itself."""
    dotted = f"{name}."
    refused = any(dotted.startswith(f"{place}.") for place in _REFUSED)
    return not refused and any(dotted.startswith(f"{place}.") for place in places)


def resolve_target(
    target: str, key: str, allowed: Sequence[str], trusted: Sequence[str] = ()
) -> Callable[..., Any]:
    """Import what a checked target names, and check what was found under its own name.

    Args:
        target: A dotted name.
        key: Where it stands, for messages.
        allowed: Places it may lie below.
        trusted: Those of them whose functions and private names are allowed too: packages of the
            user's own.

    Raises:
        ConfigError: nothing is found, or it is not a public class at an allowed place, nor a
            function that is listed.
    """
    found = _locate(target, key)
    if not isinstance(found, type) and not (
        isinstance(found, FunctionType) and "." not in found.__qualname__
    ):
        raise ConfigError(
            f"'{key}' is '{target}', which is neither a class nor a function of a module."
        )
    own_name = f"{found.__module__}.{found.__qualname__}"
    if not is_below(own_name, allowed):
        raise ConfigError(f"'{key}' is '{target}', which is really '{own_name}' and not allowed.")
    if not (is_below(own_name, trusted) or own_name in _FUNCTIONS or _is_public(found, own_name)):
        raise ConfigError(
            f"'{key}' is '{target}', which is not allowed: of what is installed only public classes are. Name a "
            "package of your own on the command line: --package NAME."
        )
    return found


def _is_public(found: object, own_name: str) -> bool:
    """Whether this is a class that its package offers; of lit_data only those that are made for configurations."""
    if not isinstance(found, type) or found.__name__.startswith("_"):
        return False
    package, _, rest = own_name.partition(".")
    if package != "lit_data" or own_name in CLASSES:
        return True
    room = rest.partition(".")[0]
    return room in _PACKAGES and found.__name__ in import_module(f"lit_data.{room}").__all__


def _locate(target: str, key: str) -> object:
    path, _, rest = target.partition(".")
    found: object = _import(path, target, key)
    for part in rest.split("."):
        path = f"{path}.{part}"
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = _import(path, target, key, parent=found)
        else:
            found = getattr(found, part, None)
        if isinstance(found, ModuleType) and found.__name__ != path:
            raise ConfigError(
                f"'{key}' is '{target}': '{path}' is another name of '{found.__name__}'."
            )
    return found


def _import(path: str, target: str, key: str, *, parent: ModuleType | None = None) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise ConfigError(
                f"'{key}' is '{target}', which needs the package '{error.name}'."
            ) from error
        hint = (
            did_you_mean(nearest(path.rpartition(".")[2], dir(parent)))
            if parent
            else " Is it installed?"
        )
        raise ConfigError(f"'{key}' is '{target}', but there is no '{path}'.{hint}") from error
