"""`Part`: a fraction of the work of a command, for independent processes."""

import re
from dataclasses import dataclass
from typing import Self

from lit_data.core.checks import check_count, is_count
from lit_data.core.errors import ConfigError

_FRACTION = re.compile(r"(\d{1,9})/(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of some work.

    Args:
        number: Number of the part, from 0.
        count: Number of parts.
    """

    number: int
    count: int

    @classmethod
    def read(cls, command: str, part: int | str | None, of: int | None) -> Self | None:
        """Read the options ``part`` and ``of`` of a command.

        ``part=3 of=64``, which a sweep can write as ``part=range(0,64) of=64``, and ``part=3/64``
        are the same.

        Args:
            command: Name of the node of the options, for messages.
            part: A number, or a number and a count.
            of: Number of parts, if `part` does not include it.

        Returns:
            The part, or None for all of the work.

        Raises:
            ConfigError: There is no such part, or one of the options is missing.
        """
        if part is None and of is None:
            return None
        fraction = _FRACTION.fullmatch(str(part))
        if fraction is not None and of is None:
            part, of = map(int, fraction.groups())
        if of is None or not is_count(part, 0):
            raise ConfigError(
                f"{command}.part={part} {command}.of={of} do not name a part: give its number, "
                f"from 0, and how many parts there are, {command}.part=0 {command}.of=4 or "
                f"{command}.part=0/4"
            )
        check_count(f"{command}.of", of, 1)
        if part >= of:
            raise ConfigError(
                f"{command}.part={part} is not usable: {of} parts are numbered from 0 to {of - 1}"
            )
        return cls(part, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def take(self, total: int) -> range:
        """Return the numbers of the items of this part; all parts together have each item once.

        Args:
            total: Number of all items.
        """
        first = total * self.number // self.count
        end = total * (self.number + 1) // self.count
        return range(first, end)
