"""The opened volumes of a CT set: their bank, what is known of each, and which split each is in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError
from lit_data.io.progress import track
from lit_data.io.volumes.banks import VolumeBank
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse_npz import write_npz
from lit_data.io.volumes.volume import Triple
from lit_data.types import Stage

README: Final = """Occupied voxels of CT volumes, written by lit_data. The arrays of each file in train, val and test:

shape            [3] int64, (z, y, x) voxels of the volume
spacing_mm       [3] float64, (z, y, x)
occupied_hu      [2] float64: voxels above the first and up to the second number are occupied
positions        [N] int32 or int64, where they lie in the flat volume, ascending: z * Y * X + y * X + x
values           [N] their Hounsfield units
slices           [z + 1] int64, where each slice begins in positions
labels           [N] their labels, where there are any; classes, class_starts and class_positions: all labelled voxels
affine           [4, 4] float64, where it is known: from voxels (x, y, z) to mm (right, anterior, superior)
"""


@dataclass(frozen=True, slots=True, eq=False)
class CTVolumes:
    """The volumes that are good, in the order of their names.

    Args:
        bank: Their occupied voxels; it may hold more volumes than there are in the splits.
        sources: Their files.
        shapes: (z, y, x) voxels of each.
        splits: For each of train, val, test the ascending numbers of its volumes.
        has_labels: Whether any volume has labels.
        too_few: Volumes that were left out because too few voxels are occupied.
    """

    bank: VolumeBank
    sources: Sequence[VolumeSource]
    shapes: Sequence[Triple]
    splits: Mapping[str, NDArray[np.int64]]
    has_labels: bool
    too_few: int

    def of(self, stage: Stage) -> NDArray[np.int64]:
        """Numbers of the volumes of a stage: to predict, those of all splits."""
        if stage == "predict":
            return np.sort(np.concatenate([self.splits[split] for split in SPLITS]))
        return self.splits[stage]

    def find_room(self, most: int | None) -> int:
        """Most points of a sample.

        Raises:
            ConfigError: They are not limited, and not known.
        """
        counts = self.bank.counts
        if counts is None:
            if most is None:
                raise ConfigError("max_points=null needs precompute=true, which counts points: set data.max_points")
            return most
        largest = max(1, int(counts[self.of("predict")].max(initial=0)))
        return largest if most is None else min(most, largest)

    def describe(self) -> dict[str, Any]:
        """Numbers for a report; sizes and points where all volumes are indexed."""
        found: dict[str, Any] = {
            "volumes": len(self.of("predict")),
            "refused": len(self.bank.skipped),
            "too_few": self.too_few,
        }
        if self.bank.counts is not None:
            volumes = [self.bank[number] for number in range(len(self.bank))]
            dense_bytes, sparse_bytes = sum(v.dense_bytes for v in volumes), sum(v.nbytes for v in volumes)
            found |= {"points": int(self.bank.counts.sum()), "dense_bytes": dense_bytes, "sparse_bytes": sparse_bytes}
            found["sparse_share"] = sparse_bytes / dense_bytes
        return found | {f"{split}_volumes": len(self.splits[split]) for split in SPLITS}

    def export(self, folder: Path) -> dict[str, int]:
        """Write every volume as ``SPLIT/NAME.npz``; the folder can be read as a set again.

        Raises:
            ConfigError: The folder holds files already.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"prepare.export={folder} is not empty: name a new folder")
        places = [(split, number) for split in SPLITS for number in self.splits[split].tolist()]
        written_bytes = 0
        for split, number in track(places, "exporting", len(places)):
            path = folder / split / f"{self.sources[number].name.removeprefix(f'{split}/')}.npz"
            write_npz(self.bank[number], path)
            written_bytes += path.stat().st_size
        (folder / "README.txt").write_text(README, encoding="utf-8")
        return {"volumes": len(places), "bytes": written_bytes}
