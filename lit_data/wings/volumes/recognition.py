"""Recognition of folders of volumes."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lit_data.core.errors import DataError


def recognize(folder: Path, *, has_images: bool) -> Iterator[str]:
    """Yield the name of a volume experiment if a folder has volumes and no images."""
    from lit_data.wings.volumes.files.sources import find_volumes

    if has_images:
        return
    with suppress(DataError):
        has_labels = any(volume.labels for volume in find_volumes(folder))
        yield "ct_segmentation" if has_labels else "ct"
