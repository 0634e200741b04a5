"""Shapes, batches and small protocols that connect the packages of lit_data.

Shape legend, used by every docstring:
    B samples in a batch, M samples in a micro-batch, C channels, H and W pixels (rows and columns),
    N defects or boxes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class OptionRole(Enum):
    """Role of an option of a datamodule, which its annotation holds: ``Annotated[int, NEUTRAL]``."""

    NEUTRAL = "changes nothing that is predicted of an input"


NEUTRAL = OptionRole.NEUTRAL
"""Of an option with which a prediction goes on whatever value it has."""
Stage = Literal["train", "val", "test", "predict"]
"""The four stages of a run; the sanity check counts as ``val``."""

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Size = tuple[int, int]
"""(height, width), px."""
Triple = tuple[int, int, int]
"""(z, y, x), voxels."""
Spacing = tuple[float, float, float]
"""(z, y, x), mm."""
Batch = dict[str, "torch.Tensor"]
"""A batch is a dict of tensors whose first dimension is B; each datamodule documents its keys."""
PlannedBatch = dict[str, Any]
"""Batch between `plan_batch` and `finish_batch`: tensors beside plans, paths, other objects."""

IGNORED = 255
"""In masks: the number of pixels that neither train nor are scored."""

PathText = str | PathLike[str]
"""A path, or text that is one or an address."""

COUNT_SUFFIX = "_count"
"""A ragged field ``boxes`` has its number of items of each sample under ``boxes_count``."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """Field of a sample: what it holds under one key.

    Attributes:
        shape: Of one sample, without the batch dimension; of one item where samples hold several.
        dtype: NumPy dtype name.
        max_items: For a ragged field (boxes, sparse voxels): the most items of one sample. Such a
            field travels flat, the items of all samples of the batch in their order.
        row_column: Column 0 of a ragged field is filled with the item's row in the batch.
    """

    shape: tuple[int, ...]
    dtype: str
    max_items: int | None = None
    row_column: bool = False


def row_shapes(
    fields: "Mapping[str, FieldSpec]",
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of all that `RowWriter.write_into` fills for a sample.

    These are its fields, and the counts of ragged ones.
    """
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for name, field in fields.items():
        dtype = np.dtype(field.dtype)
        if field.max_items is None:
            shapes[name] = field.shape, dtype
        else:
            shapes[name] = (field.max_items, *field.shape), dtype
            shapes[name + COUNT_SUFFIX] = (), np.dtype(np.int64)
    return shapes


class LookAhead(Protocol):
    """Fetches what the samples of an epoch are read from, some ahead."""

    def advance(self, samples: int) -> None:
        """Report the number of samples that have been read."""

    def close(self) -> None:
        """Stop fetching."""


class SampleRuns(NamedTuple):
    """Samples of a dataset that lie together on the disk, such as the patches of an image.

    Attributes:
        ends: [R] int64, ascending: the samples of run r are those from ``ends[r - 1]`` up to
            ``ends[r]``.
        nbytes: [R] int64, bytes on the disk that they share.
        samples: [n] the samples in the order of the runs; none where they lie in their own.
        most_bytes: Of a window of them; none where any will do. Then the first windows of an epoch
            are smaller, as they have to be fetched before its first batch.
    """

    ends: "NDArray[np.int64]"
    nbytes: "NDArray[np.int64]"
    samples: "NDArray[np.int64] | None" = None
    most_bytes: int | None = None


@runtime_checkable
class RowWriter(Protocol):
    """Dataset that writes samples straight into rows of a batch, without a copy of each.

    ``fields`` names every key of a sample. ``write_into`` fills ``rows[key][m]`` for the m-th of
    ``indices``; what it writes is a pure function of (index, epoch), so any worker may write any
    row, and several threads may at once. For a ragged field it fills the first items of
    ``rows[key][m]`` ([max_items, ...]) and sets ``rows[key + "_count"][m]``.

    More is used where a dataset has it: ``describe_sample(index) -> str`` names a sample in
    messages, ``check_sources()``, which must be cheap, raises if files changed under a running
    process, and ``runs``, a `SampleRuns`, a function of the epoch that gives one, or none, says
    which samples lie together. What reads a set of shards has ``fetches``, whether it does,
    ``needs_windows``, whether they have no room here all at once, and ``look_ahead(indices,
    epoch)``, which is given a function for the samples to come and gives a `LookAhead` or none.
    ``find_lack() -> str`` names what scores are made of, such as boxes, where no sample holds any.
    """

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Every key of a sample, with shape and dtype."""
        ...

    def __len__(self) -> int: ...

    def write_into(
        self, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int
    ) -> Mapping[str, list[Any]] | None:
        """Write the samples of `indices` into the rows of each key.

        Returns:
            What has no rows (text), if anything.
        """
        ...


def read_rows(dataset: RowWriter, indices: NDArray[np.int64], epoch: int = 0) -> dict[str, Array]:
    """Read several samples into rows of their own."""
    rows: dict[str, Array] = {}
    for name, (shape, dtype) in row_shapes(dataset.fields).items():
        rows[name] = np.zeros((len(indices), *shape), dtype)
    dataset.write_into(rows, indices, epoch)
    return rows


def read_samples(
    dataset: RowWriter, indices: Sequence[int], epoch: int
) -> "list[dict[str, torch.Tensor]]":
    """Read samples one by one, without the room for items that they do not have.

    Raises:
        IndexError: The dataset has fewer samples.
    """
    import torch

    for index in indices:
        if not 0 <= index < len(dataset):
            raise IndexError(f"sample {index} of {len(dataset)}")
    rows = read_rows(dataset, np.array(indices, dtype=np.int64), epoch)
    samples = []
    for row in range(len(indices)):
        sample = {}
        for name, field in dataset.fields.items():
            values = torch.from_numpy(rows[name])[row]
            if field.max_items is not None:
                values = values[: rows[name + COUNT_SUFFIX][row]]
            sample[name] = values
        samples.append(sample)
    return samples


@runtime_checkable
class ResizableLoader(Protocol):
    """A loader whose batch size can be set between batches."""

    batch_size: int

    @property
    def resizable(self) -> bool:
        """True if a new batch size takes effect within the epoch, with no sample lost."""
        ...


@runtime_checkable
class Summarises(Protocol):
    """Callback that adds entries to ``summary.json``."""

    def summary(self) -> Mapping[str, float | int | str]:
        """Return the entries, with units in their keys."""
        ...


@runtime_checkable
class CountsAssembly(Protocol):
    """Loader that measures its own work separately from waiting for its workers."""

    @property
    def assemble_s(self) -> float:
        """Seconds that handing out batches took in the thread that asked for them, so far."""
        ...


@runtime_checkable
class HasPoses(Protocol):
    """Data with the same views of each object."""

    @property
    def poses(self) -> "torch.Tensor | None":
        """[V, 2] float32 (azimuth, elevation) of each view, rad; None if objects have one image."""
        ...
