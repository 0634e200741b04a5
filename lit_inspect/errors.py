"""Errors that a user can act on, with the exit codes of ``lit-inspect``."""

from typing import ClassVar

_LONGEST = 200


class InspectError(Exception):
    """Base of all errors; the text is one line, without terminal control codes."""

    exit_code: ClassVar[int] = 1

    def __init__(self, text: str) -> None:
        super().__init__(escape(text))


class UsageError(InspectError):
    """A wrong argument, such as an array of another shape, or a missing folder."""

    exit_code = 2


class ImageError(InspectError):
    """A bad image."""

    exit_code = 3


class AnswerError(ImageError):
    """An image for which the net gives no answer, or an invalid one."""


class BoardError(InspectError):
    """A damaged file, a file of another version, or a result that cannot be written."""

    exit_code = 4


def escape(text: str) -> str:
    """Show control characters, line breaks and bytes that are not UTF-8 as escapes."""
    if text.isprintable():
        return text
    return "".join(map(_escape_character, text))


def describe_error(error: BaseException) -> str:
    """Return the beginning of another library's error message, or its class if it has no text."""
    return str(error).strip()[:_LONGEST] or type(error).__name__


def _escape_character(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # os.fsdecode encodes a byte that is not UTF-8 this way
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
