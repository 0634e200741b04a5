"""`CTDataModule`: CT volumes as sets of occupied voxels, or as dense windows of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Unpack, cast, get_args

import torch
from typing_extensions import override

from lit_data.core.batch_form import count_samples, slice_batch
from lit_data.core.checks import check_choice, check_count
from lit_data.core.errors import ConfigError
from lit_data.core.types import COUNT_SUFFIX, NEUTRAL, Batch, PathText, PlannedBatch, Stage
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat, names_parts
from lit_data.datamodules.source import FileKeywords
from lit_data.loading import LoaderOptions
from lit_data.wings.volumes.augment import DRAWS, VolumeAugment
from lit_data.wings.volumes.datasets.dataset import CTDataset
from lit_data.wings.volumes.datasets.dense import DenseVolumes
from lit_data.wings.volumes.datasets.distance import PointDistances
from lit_data.wings.volumes.datasets.points import PointRows, WindowRows
from lit_data.wings.volumes.datasets.windows import WindowSpec
from lit_data.wings.volumes.files.hounsfield import Window, read_window
from lit_data.wings.volumes.files.resampling import Resolution
from lit_data.wings.volumes.files.sparse_store import SparseStore
from lit_data.wings.volumes.source import (
    CTSource,
    CTVolumes,
    SampleKind,
    TooFew,
    read_classes,
    read_range,
    read_sdf,
)

POINT_KEYS = ("coords", "feats", "label", "coords_count", "occupied_total")
WINDOW_KEYS = ("image", "occupied", "sdf", "mask", "position")
COMMON_KEYS = ("index", "volume_index", "shape", "spacing", "path", "epoch")
"""Keys of a batch, see `CTDataModule`."""

COUNT = "coords" + COUNT_SUFFIX
_RAGGED = ("coords", "feats", "label")


def keep_one_count(batch: Batch) -> Batch:
    """Drop the counts of features and labels, which equal those of the points."""
    counts = {name + COUNT_SUFFIX for name in _RAGGED} - {COUNT}
    return {name: part for name, part in batch.items() if name not in counts}


def widen_labels(batch: Batch) -> Batch:
    """Convert labels to the dtype that losses expect."""
    return batch | {name: batch[name].long() for name in ("label", "mask") if name in batch}


def cut_batch(
    batch: Any,  # noqa: ANN401
    batch_format: BatchFormat,
    keys: Sequence[str],
    start: int,
    stop: int,
) -> Any:  # noqa: ANN401
    """Return some samples of a batch in a user's format.

    Args:
        batch: A dict or a tuple.
        batch_format: Format of the batch.
        keys: Keys of lit_data in the batch; a tuple holds those named by its format.
        start: First sample.
        stop: End of the samples, excluded.

    Raises:
        ConfigError: The batch does not tell which points belong to which sample.
    """
    if isinstance(batch, tuple):
        names = [key for key in cast(Sequence[str], batch_format) if key in keys]
        parts = dict(zip(names, batch, strict=True))
        points = _find_points(parts, start, stop)
        return tuple(_cut(part, name, start, stop, points) for name, part in parts.items())
    # A user's keys, and ours by them; without a mapping they are the same.
    our_keys = batch_format if isinstance(batch_format, Mapping) else {}
    parts = {our_keys.get(key, key): part for key, part in batch.items()}
    points = _find_points(parts, start, stop)
    cut = {}
    for key, part in batch.items():
        cut[key] = _cut(part, our_keys.get(key, key), start, stop, points)
    return cut


def _find_points(parts: Mapping[str, Any], start: int, stop: int) -> slice:
    """Return the range of the points of some samples among all points.

    Raises:
        ConfigError: The batch does not tell which points belong to which sample.
    """
    if COUNT in parts:
        # Number of the first point of each sample, and the end of the last.
        ends = torch.nn.functional.pad(parts[COUNT].cumsum(0), (1, 0))
        stop = min(stop, len(ends) - 1)
        return slice(int(ends[min(start, stop)]), int(ends[stop]))
    if "coords" in parts:
        # Points are sorted by row, so bisection finds those of some rows.
        rows = parts["coords"][:, 0].contiguous()
        edges = torch.tensor((start, stop), dtype=rows.dtype, device=rows.device)
        first, last = torch.searchsorted(rows, edges)
        return slice(int(first), int(last))
    if parts.keys() & set(_RAGGED):
        raise ConfigError(
            f"batch_format names {sorted(parts)}: "
            f"add coords or {COUNT}, or a batch cannot be divided"
        )
    return slice(0)


def _cut(part: Any, name: str, start: int, stop: int, points: slice) -> Any:  # noqa: ANN401 - a tensor, or a list of paths
    if name not in _RAGGED:
        return part[start:stop]
    if name != "coords":
        return part[points]
    # Column 0 is the row in the batch, which starts at 0 again.
    return part[points] - torch.tensor((start, 0, 0, 0), dtype=part.dtype, device=part.device)


class CTDataModule(BaseDataModule[CTDataset]):
    """CT volumes, indexed once; a sample is a volume's occupied voxels, or a dense window of them.

    A batch of points is a dict:

    ==================  ==================  =======================================================
    key                 shape, dtype        what
    ==================  ==================  =======================================================
    ``coords``          [N, 4] int32        (row, z, y, x) of the points of all volumes, row by row
    ``feats``           [N, C] float32      value in 0..1; with `sdf` the signed distance, mm
    ``label``           [N, 1] int64        with labels; 0 none, -1 in a volume that has no labels
    ``coords_count``    [B] int64           points of each volume, in order
    ``occupied_total``  [B] int64           occupied voxels of each volume; points may be fewer
    ==================  ==================  =======================================================

    A batch of windows:

    ==================  ==================  =======================================================
    key                 shape, dtype        what
    ==================  ==================  =======================================================
    ``image``           [B, 1, D, H, W]     float32, 0..1; 0 where nothing is occupied
    ``occupied``        [B, 1, D, H, W]     bool
    ``sdf``             [B, 1, D, H, W]     float32, with `sdf`: signed distance, mm
    ``mask``            [B, 1, D, H, W]     int64, in datasets with labels, as ``label``
    ``position``        [B, 3] int64        (z, y, x) of the first voxel in the volume
    ==================  ==================  =======================================================

    And both:

    ==================  ==================  =======================================================
    key                 shape, dtype        what
    ==================  ==================  =======================================================
    ``index``           [B] int64           number of the sample
    ``volume_index``    [B] int64           number of its volume
    ``shape``           [B, 3] int64        (z, y, x) voxels of the volume
    ``spacing``         [B, 3] float32      (z, y, x) mm between voxels
    ``path``            B paths             of the volume
    ``epoch``           [B] int64           epoch the sample was drawn for
    ==================  ==================  =======================================================

    Workers scale the values, because they touch occupied voxels only; the device would scale whole
    windows. Distances are measured from a voxel's center to the nearest center of the other kind,
    and are negative in the occupied set.

    Args, in addition to those of `CTSource` and `BaseDataModule`:
        sample: `points` or `windows`.
        window: Name of a window of `lit_data.wings.volumes.files.hounsfield.WINDOWS`, or (center,
            width) in HU.
        max_points: Number of points drawn in each epoch from volumes with more, see
            `choose_points`; `None` takes all.
        sdf: Largest signed distance in mm, `exact` for no limit; `None` for no distances.
        windows: Size and places of windows.
        classes: Names of the labels 1, 2, ... of windows that are to be segmented. Volumes without
            labels are then skipped in training and scores. Other labels are bad, and so are labels
            whose affine differs from that of their volume.
        augment: Augmentation of training windows, see `VolumeAugment`.

    Raises:
        ConfigError: An option is out of its range.
    """

    task = "lit_data.wings.volumes.predictions.VolumeTask"
    volumes: CTVolumes
    batch_keys: Sequence[str] = (*POINT_KEYS, *WINDOW_KEYS, *COMMON_KEYS)

    def __init__(
        self,
        root: PathText | None = None,
        *,
        sample: SampleKind = "points",
        window: str | Sequence[float] | Window = "bone",
        occupied_hu: Sequence[float | None] | None = None,
        resolution: Resolution | None = None,
        min_points: int = 1,
        too_few: TooFew = "error",
        max_points: int | None = None,
        sdf: float | Literal["exact"] | None = None,
        windows: WindowSpec | None = None,
        classes: Sequence[str] | None = None,
        augment: Annotated[VolumeAugment | None, NEUTRAL] = None,
        processes: Annotated[int | Literal["auto"], NEUTRAL] = "auto",
        nan_fill: float | None = None,
        loader: LoaderOptions | None = None,
        batch_format: BatchFormat = "dict",
        **options: Unpack[FileKeywords],
    ) -> None:
        super().__init__(loader=loader, batch_format=batch_format)
        check_choice("sample", sample, get_args(SampleKind))
        self.sample = sample
        self.window = read_window(window)
        self.windows = windows or WindowSpec()
        self.classes = read_classes(classes)
        if augment is not None and not isinstance(augment, VolumeAugment):
            raise ConfigError(
                f"augment is a {type(augment).__name__}: give a VolumeAugment, which moves "
                "labels together with their windows"
            )
        self.augment = augment
        needs_windows = bool(self.classes) or augment is not None
        if needs_windows and (sample == "points" or sdf is not None):
            raise ConfigError(
                "classes and augment are only for windows: set data.sample=windows, not "
                f"{sample}, and data.sdf=null"
            )
        if max_points is not None:
            check_count("max_points", max_points, 1)
        self.max_points = max_points
        self.has_sdf = sdf is not None
        self.most_mm = read_sdf(sdf)
        self.source: CTSource = CTSource.of(
            root=root,
            occupied_hu=read_range(occupied_hu, self.window),
            resolution=resolution,
            min_points=min_points,
            too_few=too_few,
            processes=processes,
            nan_fill=nan_fill,
            class_count=len(self.classes) or None,
            **options,
        )

    @override
    def prepare_data(self) -> None:
        super().prepare_data()
        for computed in (self._distances(), self._dense()):
            # Distances of fetched volumes are measured on demand.
            if computed is not None and not self.volumes.bank.fetches:
                computed.prepare()

    def build_dataset(self, stage: Stage) -> CTDataset:
        """Build the dataset of a stage: its volumes, or windows of them; all volumes for ``predict``."""
        if self.sample == "points":
            points = PointRows(
                self.volumes.bank,
                self.volumes.of(stage),
                window=self.window,
                most=self.volumes.find_room(self.max_points),
                has_labels=self.volumes.has_labels,
                distances=self._distances(),
                seed=self.loader.seed,
            )
            return CTDataset(points)
        volumes = self.volumes.of(stage)
        if self.classes and stage != "predict":
            volumes = self.volumes.labelled(volumes)
        windows = WindowRows(
            self.volumes.bank,
            volumes,
            window=self.window,
            spec=self.windows,
            draws=stage == "train" and self.windows.mode == "random",
            has_labels=self.volumes.has_labels,
            sdf=self.has_sdf,
            most_mm=self.most_mm,
            seed=self.loader.seed,
            dense=self._dense(),
        )
        return CTDataset(windows)

    def overlap_windows(self, overlap: int | None) -> None:
        """Let neighboring windows of the grid overlap, and keep all windows, even empty ones.

        Args:
            overlap: Voxels that neighbors share along each axis; None for half a window.

        Raises:
            ConfigError: The overlap is as large as a window.
        """
        sides = self.windows.sides
        shared = [side // 2 if overlap is None else overlap for side in sides]
        if not 0 <= max(shared) < min(sides) and overlap is not None:
            raise ConfigError(
                f"overlap_px={overlap} must be at least 0 and less than a window of {sides} voxels"
            )
        stride = [side - voxels for side, voxels in zip(sides, shared, strict=True)]
        self.windows = replace(self.windows, stride=stride, min_points=0)
        self._datasets.pop("predict", None)

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Add the paths, and draw the random numbers of the augmentation."""
        paths = [self.volumes.bank.name(number) for number in batch["volume_index"].tolist()]
        planned: PlannedBatch = keep_one_count(batch) | {"path": paths}
        if self.augment is not None and stage == "train":
            numbers = batch["index"].numpy()
            epoch = int(batch["epoch"][0])
            planned[DRAWS] = self.augment.draw(self.loader.seed, epoch, numbers)
        return planned

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Widen labels, which are transferred as four bytes, and augment training windows."""
        draws = batch.pop(DRAWS, None)
        if self.augment is not None and draws is not None:
            batch = batch | self.augment(batch, draws)
        return widen_labels(batch)

    def slice_batch(self, batch: Any, start: int, stop: int) -> Any:  # noqa: ANN401 - the user's format
        """Return some samples of a batch in the format of this datamodule."""
        if not names_parts(batch, self.batch_format):
            return slice_batch(batch, start, stop, count_samples(batch))
        return cut_batch(batch, self.batch_format, self.sample_keys, start, stop)

    @property
    def sample_keys(self) -> Sequence[str]:
        """Keys of `batch_keys` that batches have with the current options and dataset."""
        fields = {*self.dataset("predict").fields, "path"}
        keys = []
        for key in self.batch_keys:
            if key in fields or key.removesuffix(COUNT_SUFFIX) in fields:
                keys.append(key)
        return keys

    @override
    def verify_sources(self) -> list[str]:
        """Return a line for each volume whose index is damaged or does not match its files."""
        return self.source.verify(self.volumes)

    @override
    def describe(self) -> dict[str, Any]:
        """Return facts about the opened dataset: numbers of volumes and points, bytes of volumes and index."""
        return self.volumes.describe()

    def _distances(self) -> PointDistances | None:
        if not self.has_sdf or self.sample != "points":
            return None
        folder = self.source.store_folder / "distances"
        return PointDistances(self.volumes.bank, folder, self.most_mm)

    def _dense(self) -> DenseVolumes | None:
        """Return the dense copies that windows with classes are cut from; None if there are none."""
        bank = self.volumes.bank
        if not self.classes or not isinstance(bank, SparseStore):
            return None
        return DenseVolumes(bank, self.source.store_folder / "dense", self.window.low_hu)

    @override
    def open_source(self) -> None:
        self.volumes = self.source.open()
