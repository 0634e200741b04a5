"""Errors that a user can act on, with the exit codes of ``python -m lit_inspect``."""

from typing import ClassVar


class InspectError(Exception):
    """Base of all of them; the text is one line."""

    exit_code: ClassVar[int] = 1


class UsageError(InspectError):
    """A wrong argument: an array of another form, a folder that is not there."""

    exit_code = 2


class ImageError(InspectError):
    """An image is bad."""

    exit_code = 3


class BoardError(InspectError):
    """A file is damaged, of another version or not what it says, or a result cannot be written."""

    exit_code = 4
