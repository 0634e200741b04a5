"""Checks of options, with messages that say what is allowed."""

from collections.abc import Sequence

from lit_data.errors import ConfigError

_SHOWN = {"None": "null", "True": "true", "False": "false"}  # as YAML has them


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse what is not one of some values; 1 is not True.

    Args:
        name: Of the option.
        value: What was given.
        choices: As `typing.get_args` of a Literal gives them.

    Raises:
        ConfigError: It is none of them.
    """
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        shown = ", ".join(_SHOWN.get(str(choice), str(choice)) for choice in choices)
        raise ConfigError(f"{name}={value!r} is unknown: choose one of {shown}")


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number of at least `least`.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} is not usable: choose a whole number of at least {least}")


def check_share(name: str, value: float) -> None:
    """Refuse what is no share above 0 and up to 1.

    Raises:
        ConfigError: It is not.
    """
    if not 0 < value <= 1:
        raise ConfigError(f"{name}={value} is a share: give a number above 0 and up to 1")
