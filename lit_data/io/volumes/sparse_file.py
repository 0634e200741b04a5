"""One sparse volume on disk: a folder of arrays, made to be mapped, and what is known of it without its voxels."""

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lit_data.errors import DataError
from lit_data.io.store.arrays import META_NAME, ArrayFolder, is_count
from lit_data.io.store.mapping import corrupt
from lit_data.io.volumes.sparse import LABEL_DTYPES, VALUE_DTYPES, LabelIndex, SparseVolume, index_dtype
from lit_data.io.volumes.volume import Triple

KIND: Final = "sparse volume"
VERSION: Final = 2
"""Version of the layout; part of every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseFacts:
    """The facts of one volume.

    Args:
        name: Of the volume.
        path: Of its source.
        shape: (z, y, x).
        spacing_mm: (z, y, x).
        affine: 16 numbers, row by row; None if unknown.
        low_hu: See ``SparseVolume``.
        high_hu: See ``SparseVolume``.

    Raises:
        ValueError: or TypeError: one of them cannot be.
    """

    name: str
    path: str
    shape: Triple
    spacing_mm: tuple[float, float, float]
    affine: tuple[float, ...] | None
    low_hu: float
    high_hu: float | None

    def __post_init__(self) -> None:
        for name in ("shape", "spacing_mm", "affine"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        numbers = [*self.spacing_mm, *(self.affine or ()), self.low_hu, 0 if self.high_hu is None else self.high_hu]
        checks = {
            "shape": len(self.shape) == 3 and all(is_count(length) and length > 0 for length in self.shape),
            "affine": self.affine is None or len(self.affine) == 16,
            "spacing_mm": len(self.spacing_mm) == 3,
            "a number": all(isinstance(number, int | float) and math.isfinite(number) for number in numbers),
            "a text": all(isinstance(text, str) for text in (self.name, self.path)),
        }
        if wrong := [name for name, is_right in checks.items() if not is_right]:
            raise ValueError(f"wrong: {', '.join(wrong)}")

    def as_meta(self) -> dict[str, Any]:
        """For `meta.json`."""
        return dataclasses.asdict(self)


class StoredVolume:
    """A volume of a store, of which nothing but its `meta.json` is read before it is mapped.

    Arrays are those of ``SparseVolume``: ``positions``, ``values`` and ``slices``, with labels also ``labels``,
    ``classes``, ``class_starts`` and ``class_positions``.

    Args:
        path: Its folder.

    Attributes:
        folder: Its arrays.
        facts: What is known of it.

    Raises:
        StoreError: It cannot be opened.
        StoreCorruptError: It is damaged, or not of this version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = ArrayFolder(path, KIND, VERSION)
        try:
            self.facts = SparseFacts(**self.folder.facts)
            self._descrs = self._expect()
            self.points = self.folder.arrays["positions"].shape[0]
        except (ValueError, TypeError, KeyError) as error:
            raise corrupt(self.folder.path / META_NAME, f"no facts of a volume ({error!s:.200})") from error
        self.folder.check_size()

    @property
    def nbytes(self) -> int:
        """Bytes of the files of its arrays."""
        return self.folder.nbytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of the volume as a dense array of the values' dtype."""
        return math.prod(self.facts.shape) * self._descrs["values"].itemsize

    def map(self) -> SparseVolume:
        """Its arrays as read-only views, which are read when they are used.

        Raises:
            StoreCorruptError: They are damaged.
        """
        arrays = {name: self.folder.map(name, dtype) for name, dtype in self._descrs.items()}
        facts, index = self.facts, None
        try:
            if "labels" in arrays:
                index = LabelIndex(facts.shape, arrays["classes"], arrays["class_starts"], arrays["class_positions"])
            return SparseVolume(
                positions=arrays["positions"],
                values=arrays["values"],
                shape=facts.shape,
                spacing_mm=facts.spacing_mm,
                slices=arrays["slices"],
                affine=None if facts.affine is None else np.array(facts.affine).reshape(4, 4),
                low_hu=facts.low_hu,
                high_hu=facts.high_hu,
                labels=arrays.get("labels"),
                label_index=index,
            )
        except DataError as error:
            raise corrupt(self.folder.path / META_NAME, str(error)) from error

    def _expect(self) -> dict[str, "np.dtype[Any]"]:
        """The arrays that there must be; values and labels may have several dtypes."""
        found, positions = self.folder.arrays, index_dtype(self.facts.shape)
        dtypes = {"slices": np.dtype(np.int64), "positions": positions, "values": found["values"].dtype}
        if "labels" in found:
            dtypes |= {"labels": found["labels"].dtype, "classes": np.dtype(np.int32)}
            dtypes |= {"class_starts": np.dtype(np.int64), "class_positions": positions}
        allowed = dtypes["values"].name in VALUE_DTYPES and dtypes.get("labels", np.dtype("u1")).name in LABEL_DTYPES
        if not allowed or found.keys() != dtypes.keys() or any(len(facts.shape) != 1 for facts in found.values()):
            raise ValueError(f"other arrays: {sorted(found)}")
        return dtypes
