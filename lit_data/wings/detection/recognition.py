"""The experiment that a folder of images with boxes is for."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lit_data.core.errors import DataError


def recognize(folder: Path, *, has_images: bool) -> Iterator[str]:
    """Yield the experiment on boxes, where a folder has labels of some."""
    from lit_data.wings.detection.files import list_dataset

    if not has_images:
        return
    with suppress(DataError):
        list_dataset(folder, "auto", None, None, "auto", "skip", ())
        yield "detection"
