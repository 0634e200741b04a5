"""Arrays that are made once and kept beside stores, in folders named by all they depend on."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_data.errors import StoreError, show_path
from lit_data.io.images.image_source import ImageBank
from lit_data.io.store.arrays import ArrayFolder, ArrayWriter, publish
from lit_data.io.store.files import is_there
from lit_data.io.store.store import StoredImages
from lit_data.io.temp import temp_folder
from lit_data.types import Array


def keep_arrays(
    folder: Path, key: str, kind: str, version: int, make: Callable[[], Mapping[str, Array]]
) -> ArrayFolder:
    """Open the arrays [n] of a key, which are made and published first if they are not there.

    Args:
        folder: Of all that is kept so; it is made.
        key: Names what the arrays depend on, so that they are never out of date.
        kind: Word for what they are.
        version: Layout of that kind.
        make: Makes them.

    Raises:
        StoreError: The folder cannot be written.
    """
    path = folder / key
    if not is_there(path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with temp_folder(folder) as temp:
                writer = ArrayWriter(temp)
                for name, array in make().items():
                    writer.add(name, array)
                writer.finish(kind, version, key, {})
                publish(temp, path)
        except OSError as error:
            raise StoreError(
                f"cannot keep {kind} in {show_path(folder)} ({error}); set data.cache_dir"
            ) from error
    return ArrayFolder(path, kind, version)


def keep_found(
    folder: Path | None,
    bank: ImageBank,
    inputs: Sequence[Array | None],
    kind: str,
    make: Callable[[], Mapping[str, Array]],
    dtype: Any = np.int64,  # noqa: ANN401 - all that NumPy takes
    version: int = 1,
) -> dict[str, Any]:
    """Return arrays [n] that reading all of a dataset once gives, from the folder if possible.

    Args:
        folder: Where they are kept; None keeps nothing.
        bank: What was read; only a store says what it holds, so of others nothing is kept.
        inputs: What else they depend on.
        kind: What they are.
        make: Finds them.
        dtype: Of all of them.
        version: Raised with every change of what `make` finds.
    """
    if folder is None or not isinstance(bank, StoredImages):
        return dict(make())
    digest = hashlib.sha256(repr((kind, version, bank.key)).encode())
    for array in inputs:
        digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
    arrays = keep_arrays(folder, digest.hexdigest()[:32], kind, version, make)
    return {name: arrays.map(name, dtype) for name in arrays.arrays}
