"""`MadeOfFiles`: datamodules of your own lists of paths and arrays."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from lit_data.datamodules.inspection_source import InspectionFiles
from lit_data.datamodules.source import find_cache
from lit_data.datasets.listed import Item, list_items


class MadeOfFiles:
    """Part of the datamodules whose files are `InspectionFiles`."""

    source: InspectionFiles

    @classmethod
    def from_files(
        cls,
        images: Sequence[Item],
        *,
        masks: Sequence[Item | None] | None = None,
        labels: Sequence[str] | None = None,
        **options: Any,  # noqa: ANN401 - those of the class
    ) -> Self:
        """Make a datamodule from your own list of images, for fit and predict.

            data = InspectionDataModule.from_files(paths, masks=masks, patch_px=128)

        Args:
            images: Paths of files anywhere, or arrays [H, W] or [H, W, C] with C up to 16. All have
                the same C, for which gray images count as color images, and one dtype: bool, uint8,
                int8, uint16, int16, or float16 and float32 in 0..1. Arrays are written into the
                cache, where all images are decoded anyway.
            masks: Mask of each image, or None if it shows no defect: a path, or an array [H, W]
                whose values `mask_read` explains.
            labels: Kind of each image, such as ``good`` or ``scratch``; empty if it is not known.
                For `LabelledImageDataModule`, the class of each image.
            options: Options of the class, except `root` and `masks`. `splits` uses the names of
                images, which are their paths below their common folder.

        Raises:
            ConfigError: Lists differ in length, or an item is neither path nor array.
            DataError: Arrays have another shape or dtype; all of them are listed.
        """
        cache = Path(options.get("cache_dir") or find_cache()).expanduser()
        folder, listed = list_items(images, masks, labels, cache)
        data: Any = cls(folder, **options)  # type: ignore[call-arg]  # the class that this is a part of
        data.source = replace(data.source, listed=listed)
        datamodule: Self = data
        return datamodule
