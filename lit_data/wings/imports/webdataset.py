"""Shards of WebDataset: tar files in which the files of a sample share a name."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_data.core.errors import DataError, first_line
from lit_data.datasets.split_names import find_split, split_of
from lit_data.wings.imports.records import (
    BOX_NAMES,
    IMAGE_NAMES,
    LABEL_NAMES,
    MASK_NAMES,
    Record,
    find_column,
    name_class,
    open_library,
    read_boxes,
)

TITLE = "a set of WebDataset"
_MASKS = tuple(f"{name}.{end}" for name in MASK_NAMES for end in IMAGE_NAMES) + MASK_NAMES
_IMAGES = (*IMAGE_NAMES, *(f"image.{end}" for end in IMAGE_NAMES))


def recognise(root: Path, files: Sequence[Path]) -> bool:
    """Return True for tar files."""
    return ".tar" in {path.suffix for path in files}


def read(root: Path, files: Sequence[Path], scratch: Path) -> Iterator[Record]:
    """Yield the images of all shards; their files are left encoded, and nothing is unpickled."""
    library = open_library("webdataset", TITLE)
    base = root if root.is_dir() else root.parent
    for path in files:
        if path.suffix != ".tar":
            continue
        split = split_of(path.relative_to(base).as_posix()) or find_split(path.stem) or ""
        try:
            # An open file: names such as `pipe:` are commands to the library.
            with path.open("rb") as stream:
                source = [{"url": path.name, "stream": stream}]
                members = library.tariterators.tar_file_expander(source)
                for sample in library.tariterators.group_by_keys(members):
                    yield _read_sample(sample, split)
        except DataError:
            raise
        except Exception as error:  # of many kinds
            raise DataError(f"{path.name}: {first_line(error)}") from error


def _read_sample(sample: Mapping[str, Any], split: str) -> Record:
    key = str(sample["__key__"])
    image, mask = find_column(sample, _IMAGES), find_column(sample, _MASKS)
    if image is None:
        raise DataError(f"sample {key} has no image: it has {', '.join(sorted(sample))}")
    notes = json.loads(sample["json"]) if "json" in sample else {}
    notes = notes if isinstance(notes, Mapping) else {}
    label, objects = find_column(sample, LABEL_NAMES), find_column(notes, BOX_NAMES)
    noted = find_column(notes, LABEL_NAMES)
    name: str | None = None
    if label or noted:
        name = name_class(sample[label] if label else notes[noted])
    return Record(
        name=key.replace("/", "_"),
        image=sample[image],
        mask=sample[mask] if mask else None,
        boxes=read_boxes(notes[objects]) if objects else None,
        label=name,
        split=split,
    )
