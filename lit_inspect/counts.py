"""Counts in sentences: ``1 image is bad``, ``3 images are bad``, ``1 of 10 images is bad``."""

import re

_FORMS = re.compile(r"\[([^][|]*)\|([^][|]*)\]")


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return a count with the noun or words that follow it.

    Args:
        count: Number of items.
        one: Words after 1, such as ``image is``.
        many: Words after all other counts; by default `one` with an s at the end.
    """
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def inflect(text: str, count: int) -> str:
    """Return a text with the words that fit a count.

    Args:
        text: Text with pairs of words, such as ``[image has|images have] no mask``; the first is
            for a count of 1, the second for all other counts.
        count: Number of items.
    """
    return _FORMS.sub(lambda form: form[1] if count == 1 else form[2], text)


def counted_of(count: int, total: int, noun: str, one: str, many: str) -> str:
    """Return a count of a total with the words that follow it.

    Args:
        count: Number of items that the words apply to.
        total: Number of all items.
        noun: Singular of the items, such as ``image``; its plural ends with s.
        one: Words after a count of 1, such as ``is bad``.
        many: Words after all other counts, such as ``are bad``.
    """
    return f"{count} of {counted(total, noun)} {one if count == 1 else many}"
