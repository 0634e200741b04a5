"""The libraries of the extra ``medical``, imported when a file needs them."""

import importlib
from typing import Any, Literal

from lit_data.errors import ConfigError


def import_medical(name: Literal["nibabel", "pydicom"]) -> Any:  # noqa: ANN401 - a module without types
    """Import one of them.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f'{name} is not installed; pip install "lit_data[medical]" to read such files') from error
