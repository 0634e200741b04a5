"""Shards of WebDataset: tar files in which the files of a sample share a name."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_data.core.errors import DataError, first_line
from lit_data.datasets.split_names import find_split, split_of
from lit_data.wings.imports.records import IMAGE_NAMES, Record, open_library, take_record

TITLE = "a set of WebDataset"


def recognize(files: Sequence[Path]) -> bool:
    """Return True if there are tar files."""
    return ".tar" in {path.suffix for path in files}


def read(root: Path, files: Sequence[Path], scratch: Path) -> Iterator[Record]:
    """Yield the images of all shards; their files stay encoded, and nothing is unpickled."""
    library = open_library("webdataset", TITLE)
    base = root if root.is_dir() else root.parent
    for path in files:
        if path.suffix != ".tar":
            continue
        split = split_of(path.relative_to(base).as_posix()) or find_split(path.stem) or ""
        try:
            # An open file, because the library runs names such as `pipe:` as commands.
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
    notes = json.loads(sample["json"]) if "json" in sample else {}
    return take_record(
        {_strip_suffix(name): value for name, value in sample.items()},
        {**notes, **sample} if isinstance(notes, Mapping) else sample,
        name=str(sample["__key__"]).replace("/", "_"),
        split=split,
    )


def _strip_suffix(name: str) -> str:
    """Return `mask` for `mask.png`, and `png` unchanged."""
    stem, _, suffix = name.rpartition(".")
    return stem if stem and suffix.casefold() in IMAGE_NAMES else name
