"""Inspection datasets with listed images: by a sharded dataset, or by lists of paths and arrays."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_data.core.errors import ConfigError, DataError, Problems, show_path
from lit_data.core.files import explaining, replacing
from lit_data.datasets.layouts import InspectionSet
from lit_data.images.npy import MAX_CHANNELS
from lit_data.images.scope import find_fault
from lit_inspect.counts import counted

SET_FILE = "inspection.json"
Item = NDArray[Any] | str | os.PathLike[str]

_DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "float16", "float32")


def read_set(folder: Path) -> InspectionSet:
    """Read the files that `InspectionFiles.list_beside` wrote for a sharded dataset on a server.

    Raises:
        DataError: They cannot be read.
    """
    try:
        listing = json.loads((folder / SET_FILE).read_bytes())
        images, masks, kinds = listing["images"], listing["masks"], listing["kinds"]
        # The list comes from a server: its names must not lead out of the folder.
        if any(find_fault(name) for name in (*images, *filter(None, masks))):
            raise ValueError("its lists do not fit")
        if not len(images) == len(masks) == len(kinds):
            raise ValueError("its lists do not fit")
        return InspectionSet(
            layout=listing["layout"],
            images=tuple(folder / name for name in images),
            masks=tuple(name and folder / name for name in masks),
            kinds=tuple(kinds),
            where=listing["where"],
            bad=frozenset(folder / name for name in listing["bad"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{show_path(folder / SET_FILE)}: not a list of an inspection set ({error!s:.80})"
        ) from error


def list_items(
    images: Sequence[Item],
    masks: Sequence[Item | None] | None,
    labels: Sequence[str] | None,
    cache: Path,
) -> tuple[Path, InspectionSet]:
    """Return the common folder of listed images, and the set of these.

    Args:
        images: Paths or arrays, see `InspectionDataModule.from_files`.
        masks: Mask of each image, or None.
        labels: Kind of each image.
        cache: Folder that arrays are written to.

    Raises:
        ConfigError: There are no images, lists differ in length, or an item is neither a path nor
            an array.
        DataError: Arrays have a wrong shape or dtype, or a path is listed twice.
    """
    for name, others in (("mask", masks), ("label", labels)):
        if others is not None and len(others) != len(images):
            raise ConfigError(
                f"{counted(len(images), 'image')} and {counted(len(others), name)}: "
                "give one for each"
            )
    if not len(images):
        raise ConfigError("there are no images: give at least one path or array")
    _check_items("images", images, most_axes=3)
    _check_items("masks", [mask for mask in masks or () if mask is not None], most_axes=2)
    folder = cache / "arrays" / _find_digest((*images, *(masks or ())))
    image_paths = [_place(item, folder / f"images/{n:06}") for n, item in enumerate(images)]
    mask_paths: list[Path | None] = [None] * len(images)
    for number, mask in enumerate(masks or ()):
        if mask is not None:
            mask_paths[number] = _place(mask, folder / f"masks/{number:06}")
    if len(set(image_paths)) < len(image_paths):
        twice = next(path for path in image_paths if image_paths.count(path) > 1)
        raise DataError(f"{show_path(twice)} is listed twice among the images")
    listed = InspectionSet(
        layout="none" if not any(mask_paths) else "folder",
        images=tuple(image_paths),
        masks=tuple(mask_paths),
        kinds=tuple(map(str, labels or [""] * len(images))),
        where="as they were listed",
    )
    return Path(os.path.commonpath([path.parent for path in image_paths])), listed


def _check_items(name: str, items: Sequence[Item], most_axes: int) -> None:
    problems = Problems()
    form = "[H, W] or [H, W, C]" if most_axes == 3 else "[H, W]"
    for number, item in enumerate(items):
        what = f"{name}[{number}]"
        if isinstance(item, np.ndarray):
            is_form = 2 <= item.ndim <= most_axes and item.size > 0
            if not is_form or (item.ndim == 3 and item.shape[2] > MAX_CHANNELS):
                cure = f"give {form} with at most {MAX_CHANNELS} channels"
                problems.add(
                    what, f"shape {list(item.shape)}; {cure}, such as array.transpose(1, 2, 0)"
                )
            elif item.dtype.name not in _DTYPES:
                problems.add(
                    what, f"dtype {item.dtype}; {', '.join(_DTYPES)} are read: array.astype(...)"
                )
        elif not isinstance(item, str | os.PathLike):
            raise ConfigError(
                f"{what} is a {type(item).__name__}: give a path or a NumPy array, such as "
                "numpy.asarray(image)"
            )
    problems.raise_if_any(f"{counted(len(problems), 'array')} cannot be used as {name}")


def _find_digest(items: Sequence[Item | None]) -> str:
    """Return a digest of the arrays of a list."""
    digest = hashlib.sha256()
    for item in items:
        if isinstance(item, np.ndarray):
            digest.update(f"{item.shape} {item.dtype}".encode())
            digest.update(np.ascontiguousarray(item).data)
        else:
            digest.update(b"-")
    return digest.hexdigest()[:16]


def _place(item: Item, stem: Path) -> Path:
    """Return the absolute path of an item; an array is first written to a file, as [C, H, W]."""
    if not isinstance(item, np.ndarray):
        return Path(item).expanduser().absolute()
    path = stem.with_suffix(".npy").absolute()
    if not path.is_file():
        planes = item if item.ndim == 2 else np.moveaxis(item, -1, 0)
        with explaining(path, "give another cache_dir"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, sync=False) as file:
                np.save(file, planes.astype(np.float32) if item.dtype == np.float16 else planes)
    return path
