"""Datasets of Hugging Face ``datasets``: folders of ``save_to_disk``, parquet files, and arrow files of its cache."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from lit_data.core.errors import DataError
from lit_data.wings.imports.records import (
    BOX_NAMES,
    IMAGE_NAMES,
    LABEL_NAMES,
    MASK_NAMES,
    Record,
    find_column,
    open_library,
    take_record,
)

TITLE = "a dataset of Hugging Face"
_NAME, _SUFFIX = attrgetter("name"), attrgetter("suffix")
_NUMBERED = re.compile(r"-\d+-of-\d+$")


def recognize(files: Sequence[Path]) -> bool:
    """Return True for the files of such a dataset."""
    names, suffixes = set(map(_NAME, files)), set(map(_SUFFIX, files))
    if {"dataset_dict.json", "state.json"} & names or ".parquet" in suffixes:
        return True
    return "dataset_info.json" in names and ".arrow" in suffixes


def read(root: Path, files: Sequence[Path], scratch: Path) -> Iterator[Record]:
    """Yield the images of a dataset, without running any of its code or contacting a server."""
    library = open_library("datasets", TITLE)
    library.disable_progress_bars()
    for split, rows in _open_splits(library, root, files, scratch):
        yield from _read_rows(library, rows, split)


def _open_splits(
    library: Any,  # noqa: ANN401 - a module
    root: Path,
    files: Sequence[Path],
    scratch: Path,
) -> Iterator[tuple[str, Any]]:
    if {"dataset_dict.json", "state.json"} & set(map(_NAME, files)):
        stored = library.load_from_disk(str(root))
        yield from stored.items() if isinstance(stored, library.DatasetDict) else [("", stored)]
        return
    parts: dict[str, list[str]] = defaultdict(list)
    kind = ".arrow"
    if ".parquet" in set(map(_SUFFIX, files)):
        kind = ".parquet"
    for path in files:
        if path.suffix == kind:
            stem = _NUMBERED.sub("", path.stem)
            parts[stem.rpartition("-")[2]].append(str(path))
    for split, paths in parts.items():
        name = split if len(parts) > 1 or split in ("train", "test") else ""
        if kind == ".parquet":
            cache = str(scratch / "parquet")
            yield name, library.Dataset.from_parquet(paths, cache_dir=cache)
        else:
            yield name, library.concatenate_datasets(list(map(library.Dataset.from_file, paths)))


def _read_rows(library: Any, rows: Any, split: str) -> Iterator[Record]:  # noqa: ANN401 - of the library
    pictures = [name for name, kind in rows.features.items() if isinstance(kind, library.Image)]
    mask = find_column(pictures, MASK_NAMES)
    image = find_column(pictures, IMAGE_NAMES) or next(iter(set(pictures) - {mask}), None)
    if image is None:
        raise DataError(f"no column is an image: there are {', '.join(rows.features)}")
    # If there are two pictures, the other one is the mask, whatever its name.
    if mask is None and len(pictures) == 2:
        [mask] = {*pictures} - {image}
    label = find_column({*rows.features} - {*pictures}, LABEL_NAMES)
    objects = find_column(rows.features, BOX_NAMES)
    # Files stay encoded, because our own readers are stricter.
    for name in pictures:
        rows = rows.cast_column(name, library.Image(decode=False))
    for number, row in enumerate(rows):
        yield take_record(
            {"image": _read_file(row[image]), "mask": _read_file(row[mask]) if mask else None},
            {name: value for name, value in row.items() if name not in pictures},
            name=Path(row[image]["path"] or f"{number:06d}").stem,
            split=split,
            classes=getattr(rows.features.get(label), "names", ()),
            box_classes=_name_objects(rows.features.get(objects)),
        )


def _read_file(value: dict[str, Any] | None) -> bytes | None:
    if not value:
        return None
    content = value["bytes"]
    return Path(value["path"]).read_bytes() if content is None else bytes(content)


def _name_objects(feature: Any) -> Sequence[str]:  # noqa: ANN401 - of the library
    """Return the names of the classes of boxes, wherever the feature stores them."""
    inner = getattr(feature, "feature", feature)
    inner = inner[0] if isinstance(inner, list) else inner
    columns = inner if isinstance(inner, dict) else {}
    for name in ("category", "label", "category_id"):
        kind = columns.get(name)
        names = getattr(kind, "names", None) or getattr(
            getattr(kind, "feature", None), "names", None
        )
        if names:
            return list(names)
    return ()
