"""Recognition of folders of images with boxes."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lit_data.core.errors import DataError


def recognize(folder: Path, *, has_images: bool) -> Iterator[str]:
    """Yield the name of the detection experiment if a folder has labels with boxes."""
    from lit_data.wings.detection.files import list_dataset

    if not has_images:
        return
    with suppress(DataError):
        list_dataset(folder, "auto", None, None, "auto", "skip", ())
        yield "detection"
