"""Words of a command line into options; a mistake is one line that names the nearest option."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from lit_data.commands.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Knows whole names of options only.

    Args:
        program: What is typed before the options; ``--help`` after it explains them.
    """

    def __init__(self, program: str) -> None:
        super().__init__(prog=program, add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="store_true")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message}. See {self.prog} --help.")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Options and words in any order.

        Raises:
            ConfigError: An option is unknown or lacks its value.
        """
        options, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            near = nearest(unknown[0], self._option_string_actions)
            raise ConfigError(f"unknown option '{unknown[0]}'.{did_you_mean(near)} See {self.prog} --help.")
        return options
