"""Where a detection set comes from: its files, its decoded store, and the drawn set."""

from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from typing_extensions import override

from lit_data.datamodules.source import Source
from lit_data.datasets.detection.files import DetectionFiles, LabelFormat, find_detection_files
from lit_data.datasets.detection.labels import LabelTable
from lit_data.datasets.splits import Splits
from lit_data.io.images.decoders import ImageDecoder, ImageSource
from lit_data.io.images.header_scan import find_faults
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.resize import ResizedDecoder
from lit_data.io.store.store import DecodedStore
from lit_data.samples.detection import ensure_detection_samples


@dataclass(frozen=True, kw_only=True)
class DetectionSource(Source):
    """The files of a detection set.

    Args:
        label_format: `auto`, `yolo`, `coco` or `voc`, see `find_detection_files`.
        classes: Names of the classes in the order of their numbers; by default those of the set.
        annotations: The one COCO file to read, relative to the root.
        difficult: Keep VOC objects that are marked as difficult.
        splits: `auto`, `folders`, shares, or lists, see `find_detection_files`.
        split_seed: Chooses the images of each share.
        size_px: (height, width) of a sample.
        read: How files are read.
    """

    label_format: LabelFormat
    classes: tuple[str, ...] | None
    annotations: str | None
    difficult: bool
    splits: Splits
    split_seed: int
    size_px: tuple[int, int]
    read: ReadOptions = field(default_factory=ReadOptions)

    def open(self) -> tuple[DetectionFiles, DecodedStore]:
        """The images that are good with their boxes and splits, and their pixels; the first call decodes them.

        Raises:
            DataError: Files or boxes are bad; all of them are listed.
        """
        files = self._find()
        decoder = ResizedDecoder(self.size_px, ImageDecoder(self.read))
        sources = [ImageSource((path,)) for path in files.images]
        store = DecodedStore.build(sources, self.store_folder / "detection", decoder=decoder, on_bad=self.on_bad)
        return _leave_out(files, {path for path, _ in store.skipped}), store

    def check(self) -> dict[str, int]:
        """Decode every image strictly and check every label, and keep nothing.

        Raises:
            DataError: Lists everything that is wrong.
        """
        self.refresh()
        files = self._find()
        problems = find_faults([ImageSource((path,)) for path in files.images], ImageDecoder(self.read))
        problems.raise_if_any(f"{len(problems)} of {len(files.images)} images are bad")
        return {"images": len(files.images), "boxes": len(files.labels.boxes)}

    @override
    def _make_samples(self, folder: Path) -> Path:
        return ensure_detection_samples(folder, **self.samples)

    def _find(self) -> DetectionFiles:
        return find_detection_files(
            self.folder,
            label_format=self.label_format,
            classes=self.classes,
            annotations=self.annotations,
            difficult=self.difficult,
            splits=self.splits,
            seed=self.split_seed,
            on_bad=self.on_bad,
            read=self.read,
        )


def _leave_out(files: DetectionFiles, paths: Set[str]) -> DetectionFiles:
    """The files without some images."""
    if not paths:
        return files
    kept = [number for number, path in enumerate(files.images) if path not in paths]
    places = {number: place for place, number in enumerate(kept)}
    parts = [files.labels.of(number) for number in kept]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return DetectionFiles(
        tuple(files.images[number] for number in kept),
        LabelTable(files.labels.classes, np.concatenate(parts), ends),
        {split: [places[number] for number in part if number in places] for split, part in files.splits.items()},
        files.sizes_px[kept],
    )
