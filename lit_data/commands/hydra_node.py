"""What a configuration may say under `hydra`, which Hydra acts on before any command runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_data.commands.locate import resolve_target
from lit_data.commands.targets import allowed_names, find_targets
from lit_data.errors import ConfigError

_LOGGING_NAMES = (
    "logging.Formatter",
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.handlers.RotatingFileHandler",
    "colorlog.ColoredFormatter",
    "ext://sys.stdout",
    "ext://sys.stderr",
)
_FACTORY_KEYS = ("()", "class", "queue", "listener")
_CODE_PATHS = ("LD_", "DYLD_", "PYTHON", "PATH")  # variables that decide which code a child process loads


def check_hydra_node(hydra: Mapping[str, Any]) -> None:
    """Refuse launchers, callbacks, log handlers and variables that would run something else.

    Args:
        hydra: the resolved node as plain data; the names of its targets are checked already.

    Raises:
        ConfigError: names the key and the value.
    """
    for key, target in find_targets(hydra, "hydra"):
        resolve_target(str(target), key, allowed_names(hydra=True))
    for group in ("hydra_logging", "job_logging"):
        for key, name in _find_factories(hydra.get(group), f"hydra.{group}"):
            if name not in _LOGGING_NAMES:
                raise ConfigError(f"'{key}' is {name!a}, which is not allowed. Allowed: {', '.join(_LOGGING_NAMES)}.")
    for name in hydra.get("job", {}).get("env_set", {}):
        if str(name).upper().startswith(_CODE_PATHS):
            raise ConfigError(
                f"'hydra.job.env_set.{name}' is not allowed; set {name} in the shell that starts the run."
            )


def _find_factories(node: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name in _FACTORY_KEYS:
                yield f"{key}.{name}", value
            else:
                yield from _find_factories(value, f"{key}.{name}")
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for place, value in enumerate(node):
            yield from _find_factories(value, f"{key}[{place}]")
    elif isinstance(node, str) and "://" in node:
        yield key, node
