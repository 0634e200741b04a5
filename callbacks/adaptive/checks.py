"""Checks of options, with messages that say what is allowed."""

from typing import Any, get_args

from lit_data.errors import ConfigError


def check_choice(name: str, value: object, choices: Any) -> None:  # noqa: ANN401 - a Literal
    """Raise `ConfigError` unless a value is one of a Literal's."""
    if value not in get_args(choices):
        raise ConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(get_args(choices))}")


def check_size(name: str, size: int | None) -> None:
    """Raise `ConfigError` unless a size is a whole number of at least 1, or none."""
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ConfigError(f"{name}={size} must be a whole number of 1 or more")


def check_share(name: str, share: float) -> None:
    """Raise `ConfigError` unless a share is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ConfigError(f"{name}={share} is a share: give a number above 0 and up to 1")
