"""Errors that a user can act on, with the exit codes of ``lit-inspect``."""

from typing import ClassVar

_LONGEST = 200


class InspectError(Exception):
    """Base of all of them; the text is one line, without codes that a terminal would obey."""

    exit_code: ClassVar[int] = 1

    def __init__(self, text: str) -> None:
        super().__init__(escape(text))


class UsageError(InspectError):
    """A wrong argument: an array of another form, a folder that is not there."""

    exit_code = 2


class ImageError(InspectError):
    """An image is bad."""

    exit_code = 3


class AnswerError(ImageError):
    """The net gives no answer for an image, or none that a verdict can be read from."""


class BoardError(InspectError):
    """A file is damaged, of another version or not what it says, or a result cannot be written."""

    exit_code = 4


def escape(text: str) -> str:
    """Show control characters, line breaks and bytes that are not UTF-8 as escapes."""
    if text.isprintable():
        return text
    return "".join(map(_escape_character, text))


def describe_error(error: BaseException) -> str:
    """Return the beginning of an error of another library, or its class where it has no text."""
    return str(error).strip()[:_LONGEST] or type(error).__name__


def _escape_character(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how os.fsdecode carries a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
