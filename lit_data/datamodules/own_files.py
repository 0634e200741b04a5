"""`MadeOfFiles`: datamodules of one's own lists of paths and arrays."""

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
        """Make a datamodule of one's own list of images, for fit and predict.

            data = InspectionDataModule.from_files(paths, masks=masks, patch_px=128)

        Args:
            images: Paths of files anywhere, or arrays [H, W] or [H, W, C], C up to 16. All have one
                C, where gray levels count as colors, and one dtype: bool, uint8, int8, uint16,
                int16, or float16 and float32 in 0..1. Arrays are written into the cache, where all
                images are decoded anyway.
            masks: For each image its mask, or None where it shows no defect: a path, or an array
                [H, W] whose values `mask_read` explains.
            labels: For each image its kind, such as ``good`` or ``scratch``; empty where it is not
                known. For `LabelledImageDataModule` its class.
            options: Those of the class but for `root` and `masks`. Images are named by their paths
                below the folder that they have in common, which `splits` goes by.

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
