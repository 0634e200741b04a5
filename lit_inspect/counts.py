"""Counts in sentences: ``1 image is bad``, ``3 images are bad``, ``1 of 10 images is bad``."""


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return a count and what is counted.

    Args:
        count: How many there are.
        one: The words after 1, such as ``image is``.
        many: The words after all other counts; None: `one` with an s at the end.
    """
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def counted_of(count: int, total: int, noun: str, one: str, many: str) -> str:
    """Return how many of a total, and what holds for them.

    Args:
        count: How many it holds for.
        total: How many there are.
        noun: What each of them is, such as ``image``; its plural ends with s.
        one: The words if it holds for 1, such as ``is bad``.
        many: The words for all other counts, such as ``are bad``.
    """
    return f"{count} of {counted(total, noun)} {one if count == 1 else many}"
