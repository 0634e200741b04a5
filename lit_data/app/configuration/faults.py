"""Complaints of Hydra and OmegaConf as one line, with the nearest name."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_data.app.configuration.hydra_node import PLUGINS
from lit_data.app.configuration.suggest import did_you_mean, nearest, nearest_key
from lit_data.app.configuration.tree import list_keys, missing_value
from lit_data.core.errors import ConfigError

_UNKNOWN_KEY = re.compile(r"Interpolation key '(.+?)' not found")
_MISSING_VALUE = re.compile(r"Missing mandatory value: (\S+)")


def _explain(error: Exception, cfg: DictConfig | None) -> str:
    """Return one line for an error of composing or resolving."""
    if isinstance(error, MissingConfigException):
        return _explain_missing_file(error)
    # Hydra wraps the errors of OmegaConf, which know the key.
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    reasons = [str(reason).split("full_key:")[0] for reason in dict.fromkeys((error, cause))]
    text = " ".join(" ".join(reasons).split())
    if match := _MISSING_VALUE.search(text):
        return missing_value(match[1])
    hint = ""
    match = _UNKNOWN_KEY.search(text)
    if match and cfg is not None:
        hint = did_you_mean(nearest_key(match[1], list_keys(cfg)))
    # The text of any other error says little without its type.
    if not isinstance(error, HydraException | OmegaConfBaseException | YAMLError | UserWarning):
        text = f"{type(error).__name__}: {text}"
    key = getattr(cause, "full_key", None)
    if key:
        text = f"'{key}': {text}"
    return f"{text.rstrip('.')}.{hint}"


def unknown_option(option: str, group: str, options: Sequence[str]) -> str:
    """Return the line for an option that a group does not have."""
    line = f"unknown option '{option}' of '{group}'"
    if group == "experiment":
        line = f"unknown experiment '{option}'"
    if package := PLUGINS.get(f"{group}={option}"):
        return f"'{group}={option}' needs a package: pip install {package}."
    options = [name for name in options if not name.startswith("base")]  # shared by the others
    verb = "is" if len(options) == 1 else "are"
    near = did_you_mean(nearest(option, options))
    return f"{line}.{near} There {verb}: {', '.join(options) or 'none'}."


def _explain_missing_file(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    line = unknown_option(option, group, error.options or [])
    asking = re.match(r"In '(.+?)'", str(error))
    return f"{line} ({asking[1]}.yaml asks for it.)" if asking else line


@contextmanager
def as_config_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Raise what Hydra and OmegaConf complain about as a `ConfigError` of one line.

    Args:
        cfg: Whose keys are offered for those that are not found.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"provider=.*\s+is not available", UserWarning)
            yield
    except ConfigError:
        raise
    except Exception as error:
        # Also what Hydra and OmegaConf raise by mistake: it is the user's text that they read.
        raise ConfigError(_explain(error, cfg)) from error
