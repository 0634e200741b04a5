"""`CTDataset`: volumes as occupied voxels or dense windows, written into rows of a batch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from lit_data.core.types import Array, FieldSpec, Ints, LookAhead, SampleRuns, read_samples
from lit_data.wings.volumes.datasets.points import PointRows, WindowRows

if TYPE_CHECKING:
    import torch

_NUMBERS: Mapping[str, FieldSpec] = {
    "index": FieldSpec((), "int64"),
    "volume_index": FieldSpec((), "int64"),
    "shape": FieldSpec((3,), "int64"),
    "spacing": FieldSpec((3,), "float32"),
    "epoch": FieldSpec((), "int64"),
}


class CTDataset:
    """Map-style volumes of one split; writes many samples at once and reads no dense volume.

    A sample is a dict. For points (`PointRows`) it contains:

    - ``coords`` [n, 4] int32: (0, z, y, x) of the points; a batch has one flat array, whose first
      column is the row;
    - ``feats`` [n, C] float32: value in 0..1, and, on request, the signed distance in mm;
    - ``label`` [n, 1] int32, in datasets with labels: 0 for none, -1 throughout a volume without
      labels;
    - ``occupied_total`` int64: number of occupied voxels of the volume; the points may be a subset.

    For windows (`WindowRows`):

    - ``image`` [1, D, H, W] float32 in 0..1, 0 for voxels that are not occupied;
    - ``occupied`` [1, D, H, W] bool;
    - ``sdf`` [1, D, H, W] float32 mm, on request;
    - ``mask`` [1, D, H, W] int32, in datasets with labels, as for points;
    - ``position`` [3] int64: (z, y, x) of the first voxel.

    And for both:

    - ``index`` int64: number of the sample among those of *all* splits, which seeds its random
      stream;
    - ``volume_index`` int64: number of the volume in the bank;
    - ``shape`` [3] int64: (z, y, x) of the volume;
    - ``spacing`` [3] float32: (z, y, x) mm;
    - ``epoch`` int64: the epoch it was read for.

    Args:
        rows: Writer of the samples, as points or as windows.
    """

    def __init__(self, rows: PointRows | WindowRows) -> None:
        self.rows = rows
        self.epoch = 0
        self.fields: Mapping[str, FieldSpec] = {**rows.fields, **_NUMBERS}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samples that `__getitem__` reads."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> "dict[str, torch.Tensor]":
        return read_samples(self, [index], self.epoch)[0]

    def write_into(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> None:
        """Write samples into the rows of a batch, without a copy in between.

        Args:
            rows: For each key of `fields` an array [M, ...], and the number of items of each ragged
                array.
            indices: [M] sample numbers in this split.
            epoch: Epoch of the samples.
        """
        rows["epoch"][:] = epoch
        self.rows.place(rows, indices, epoch)
        for row in range(len(indices)):
            volume = self.rows.write(rows, row, epoch)
            rows["shape"][row], rows["spacing"][row] = volume.shape, volume.spacing_mm

    def find_lack(self) -> str:
        """Return ``labeled voxels`` if no local volume has one, so that scores lack them; otherwise an empty string."""
        rows = self.rows
        if not isinstance(rows, WindowRows) or not rows.has_labels or self.fetches:
            return ""
        indices = (rows.bank[number].label_index for number in rows.volumes.tolist())
        has_label = any(index is not None and len(index.classes) for index in indices)
        return "" if has_label else "labeled voxels"

    @property
    def fetches(self) -> bool:
        """True if volumes are fetched on demand."""
        return self.rows.bank.fetches

    @property
    def needs_windows(self) -> bool:
        """True if many samples share a volume, and the volumes do not fit here all at once."""
        return isinstance(self.rows, WindowRows) and not self.rows.bank.fits

    @property
    def runs(self) -> SampleRuns | None:
        """Samples of each volume, for an order by windows; None if the volumes are local."""
        bank = self.rows.bank
        if not bank.fetches:
            return None
        volumes = self.rows.volumes_of(np.arange(len(self)))
        # The samples of a volume follow one another.
        firsts = np.flatnonzero(np.diff(volumes, prepend=-1))
        ends = np.append(firsts[1:], len(volumes))
        nbytes = bank.count_bytes(volumes[firsts])
        return SampleRuns(ends, nbytes, most_bytes=bank.window_bytes)

    def look_ahead(self, indices: Callable[[], Ints], epoch: int) -> LookAhead | None:
        """Start fetching the volumes that samples of an epoch need.

        Args:
            indices: Returns the samples, in their order.
            epoch: Epoch of the samples.

        Returns:
            None if the volumes are local.
        """
        if not self.fetches:
            return None  # the order, which is long, is not computed
        return self.rows.bank.look_ahead(self.rows.volumes_of(indices()))

    def describe_sample(self, index: int) -> str:
        """Name one sample of this split for a message, by its file and, for a window, its place."""
        return self.rows.describe(index)

    def check_sources(self) -> None:
        """Check cheaply whether a file of the index was truncated while it was read.

        It is called after a worker was killed.

        Raises:
            StoreCorruptError: A file was truncated.
        """
        self.rows.bank.check_size()
