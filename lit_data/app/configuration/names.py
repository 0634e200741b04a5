"""Names of Python objects that a configuration may use, and the objects behind them.

A configuration is data: it may come from a colleague or from the web. A ``_target_`` in it is
looked at before anything is imported, the object behind it is looked at again, and only the command
line can widen the list.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_data.app import MODULES
from lit_data.app.configuration.installed import list_conf_packages
from lit_data.app.configuration.suggest import did_you_mean, nearest
from lit_data.core.errors import ConfigError
from lit_data.core.import_path import admit_packages

ALLOWED = (
    "lit_data",
    "torch.optim",
    "torch.nn",
    "torchmetrics",
    "kornia.augmentation",
    "albumentations",
    "torchvision.transforms.v2",
    "lightning.pytorch.Trainer",
    "lightning.pytorch.trainer.trainer.Trainer",  # the same class under its own name
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "lightning.pytorch.plugins",
    "lightning.fabric.plugins",  # where lightning.pytorch.plugins takes some of its classes from
    "lightning.pytorch.demos.boring_classes",
    "torch.distributed.fsdp.wrap",  # which parts of a model are cut
)
ALLOWED_FOR_HYDRA = (
    "hydra._internal.core_plugins",
    "hydra_plugins",
    "optuna.samplers",
    "lit_data.app.sweeps.SweepTable",
)
_REFUSED = (
    "lit_data.app.cli",  # they run commands and build objects themselves
    "lit_data.app",
    "torchmetrics.text",  # these load models by a name or a path that they are given
    "torchmetrics.audio",
    "torchmetrics.multimodal",
    "albumentations.core.hub_mixin",  # it loads what a server has
    "optuna.samplers.CmaEsSampler",  # it unpickles what stands in hydra.sweeper.storage
    "optuna.samplers._cmaes",
)
_PACKAGES = (
    "lit_data.augment",
    "lit_data.callbacks",
    "lit_data.datamodules",
    "lit_data.loading",
    "lit_data.models",
    "lit_data.synthesis",
)
"""Packages whose exported classes a configuration may name."""
CLASSES = frozenset(
    {
        "lit_data.core.grid.PatchGrid",
        "lit_data.core.mosaic.MosaicSpec",
        "lit_data.app.sweeps.SweepTable",
        "lit_data.datasets.balanced_patches.SamplingOptions",
        "lit_data.images.store.pixels.StoreOptions",
        "lit_data.images.read_options.ReadOptions",
        "lit_data.images.masks.MaskOptions",
        "lit_data.core.addresses.RemoteOptions",
    }
)
"""Further ones, under their own names."""
_FUNCTIONS = frozenset(
    {
        "lit_data.augment.pipeline.detection_augment",
        "lit_data.augment.pipeline.segmentation_augment",
        "lit_data.augment.pipeline.stripe_augment",
        "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
    }
)
"""All functions that may be named without a package of one's own: they only build something."""
_EXTRAS = {
    "hydra_plugins.hydra_joblib_launcher": "hydra-joblib-launcher",
    "hydra_plugins.hydra_submitit_launcher": "hydra-submitit-launcher",
    "hydra_plugins.hydra_optuna_sweeper": "hydra-optuna-sweeper",
}
"""Packages that bring what a configuration may name below ``hydra``."""
_WING = re.compile(r"lit_data\.wings\.\w+(?=\.)")
_NAME = re.compile(r"(?!.*__)[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")
_PRIVATE = re.compile(r"(^|\.)_")
_PACKAGE = re.compile(r"(?!.*__)[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")

_trusted: ContextVar[tuple[str, ...]] = ContextVar("trusted", default=())
"""Packages that the command line allows: their functions and private names may be named too."""


@contextmanager
def allow_packages(packages: Sequence[str]) -> Iterator[None]:
    """Allow targets of these packages too, as ``--package`` does.

    Raises:
        ConfigError: a name is not that of a package.
    """
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise ConfigError(
                f"--package {package!r} is not a package name such as my_project or "
                "my_project.models."
            )
    if packages:
        admit_packages(packages)
    token = _trusted.set((*_trusted.get(), *packages))
    try:
        yield
    finally:
        _trusted.reset(token)


def _list_trusted() -> tuple[str, ...]:
    """List the packages of the command line, and installed ones that bring configurations."""
    installed = tuple(package.trusted for package in list_conf_packages())
    return (*_trusted.get(), *installed)


def check_targets(cfg: Container | Mapping[str, Any] | Sequence[Any]) -> None:
    """Refuse every ``_target_`` that is not below an allowed name; nothing is imported.

    Args:
        cfg: the whole configuration or a part of it; interpolations are followed.

    Raises:
        ConfigError: names the key and the target.
    """
    for key, target in find_targets(to_plain(cfg)):
        _check_name(target, key)


def resolve_targets(plain: object, key: str) -> dict[str, Callable[..., Any]]:
    """Find what plain data name: all names are checked before the first is imported.

    Args:
        plain: dicts, lists and values.
        key: where they stand, for messages.

    Returns:
        A class or function for each name.

    Raises:
        ConfigError: see `check_targets` and `resolve_target`.
    """
    targets = list(find_targets(plain, key))
    for target_key, target in targets:
        _check_name(target, target_key)
    resolved = {}
    for target_key, target in targets:
        name = str(target)
        resolved[name] = resolve_target(name, target_key)
    return resolved


def resolve_target(target: str, key: str) -> Callable[..., Any]:
    """Check a name, import what it stands for, and check that under its own name.

    Args:
        target: A dotted name.
        key: Where it stands, for messages; below `hydra` other names are allowed.

    Raises:
        ConfigError: nothing is there, or it is not a public class at an allowed place, nor a
            function that is listed.
    """
    _check_name(target, key)
    resolved = _locate(target, key)
    if not _is_class_or_function(resolved):
        raise ConfigError(
            f"'{key}' is '{target}', which is neither a class nor a function of a module."
        )
    # An allowed module may import what is not allowed, such as os.system.
    true_name = f"{resolved.__module__}.{resolved.__qualname__}"
    if not _is_below(true_name, _list_allowed(key)):
        raise ConfigError(f"'{key}' is '{target}', which is really '{true_name}' and not allowed.")
    if _is_below(true_name, _list_trusted()) or true_name in _FUNCTIONS:
        return resolved
    if not _is_public(resolved, true_name):
        raise ConfigError(
            f"'{key}' is '{target}', which is not allowed: only public classes of installed "
            "packages are. Name a package of your own on the command line: --package NAME."
        )
    return resolved


def find_targets(plain: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield every ``_target_`` of plain data, with its own dotted key, which starts with `key`."""
    for node_key, node in walk(plain, key):
        if isinstance(node, Mapping) and "_target_" in node:
            yield join_key(node_key, "_target_"), node["_target_"]


def walk(plain: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every node and value of plain data with its key, such as ``a.b[0].c``; outer ones first.

    Args:
        plain: Dicts, lists and values.
        key: Of the data as a whole, which comes first.
    """
    yield key, plain
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            yield from walk(value, join_key(key, name))
    elif isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        for index, value in enumerate(plain):
            yield from walk(value, f"{key}[{index}]")


def dot_indices(key: str) -> str:
    """Return a key with the numbers of lists as parts of their own: ``a[0].b`` is a.0.b."""
    return re.sub(r"\[(\w+)\]", r".\1", key)


def join_key(key: str, name: object) -> str:
    """Return the dotted key of an entry of the node at `key`, which is empty for the root."""
    return f"{key}.{name}" if key else str(name)


def to_plain(node: Container | Mapping[str, Any] | Sequence[Any]) -> Any:  # noqa: ANN401 - YAML data
    """Return a node as dicts, lists and values, with interpolations replaced.

    Raises:
        ConfigError: an interpolation leads nowhere.
    """
    if not isinstance(node, Container):
        return node
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _list_allowed(key: str) -> tuple[str, ...]:
    """Places below which a target may lie: those of the `hydra` node, or of everything else."""
    allowed = ALLOWED_FOR_HYDRA if key.startswith("hydra.") else ALLOWED
    return (*allowed, *_list_trusted())


def _is_below(name: str, allowed: Sequence[str]) -> bool:
    """Return True if a name is allowed or lies below one that is, and is not refused."""
    dotted = f"{name}."
    all_refused = (*_REFUSED, *MODULES.values())
    is_refused = any(dotted.startswith(f"{refused}.") for refused in all_refused)
    if is_refused and name not in CLASSES:
        return False
    return any(dotted.startswith(f"{name}.") for name in allowed)


def _check_name(target: object, key: str) -> None:
    allowed = _list_allowed(key)
    if isinstance(target, str) and _NAME.fullmatch(target) and _is_below(target, allowed):
        # Hydra has its own launcher and sweeper in a private package.
        checked = target.removeprefix("hydra._internal.")
        if _is_below(target, _list_trusted()) or not _PRIVATE.search(checked):
            return
    raise ConfigError(
        f"'{key}' is {target!a}, which is not allowed. Allowed are names below "
        f"{', '.join(allowed)}; name a package of your own on the command line: --package NAME."
    )


def _is_class_or_function(located: object) -> TypeGuard[type | FunctionType]:
    """Return True for a class or a function of a module, and no method."""
    if isinstance(located, FunctionType):
        return "." not in located.__qualname__
    return isinstance(located, type)


def _is_public(resolved: object, true_name: str) -> bool:
    """Return True for a class that its package offers; of lit_data for those of configurations."""
    if not isinstance(resolved, type) or resolved.__name__.startswith("_"):
        return False
    package = true_name.partition(".")[0]
    if package != "lit_data" or true_name in CLASSES:
        return True
    wing = _WING.match(true_name)
    if wing is not None:
        return resolved.__name__ in import_module(wing[0]).TARGETS
    for offering in _PACKAGES:
        if true_name.startswith(f"{offering}."):
            return resolved.__name__ in import_module(offering).__all__
    return False


def _locate(target: str, key: str) -> object:
    path, _, rest = target.partition(".")
    located: object = _import(path, target, key)
    for part in rest.split("."):
        path = f"{path}.{part}"
        if isinstance(located, ModuleType) and not hasattr(located, part):
            located = _import(path, target, key, parent=located)
        else:
            located = getattr(located, part, None)
        if isinstance(located, ModuleType) and located.__name__ != path:
            raise ConfigError(
                f"'{key}' is '{target}': '{path}' is another name of '{located.__name__}'."
            )
    return located


def _import(path: str, target: str, key: str, *, parent: ModuleType | None = None) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise ConfigError(
                f"'{key}' is '{target}', which needs the package '{error.name}'."
            ) from error
        hint = " Is it installed?"
        if parent:
            hint = did_you_mean(nearest(path.rpartition(".")[2], dir(parent)))
        for module, package in _EXTRAS.items():
            if f"{target}.".startswith(f"{module}."):
                hint = f" It comes with a package: pip install {package}."
        raise ConfigError(f"'{key}' is '{target}', but there is no '{path}'.{hint}") from error
