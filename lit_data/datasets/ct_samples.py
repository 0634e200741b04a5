"""The default data of the ct experiment: a small set of drawn volumes, made once where no ``data.root`` is given."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lit_data.datasets.ct_scene import render_volume
from lit_data.datasets.sample_set import Recipe, check_integer, ensure_set, seal
from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError
from lit_data.io.progress import track

FORMAT_VERSION = 1  # raise it with every change of a voxel or of the layout
SMALLEST_SIDE = 16  # voxels

README = """CT samples, made by lit_data (lit_data.datasets.ct_samples). Synthetic, CC0: free to use.

train, val, test
  ct_NNNN.npy           int16 Hounsfield units [z, y, x]: a trunk of fat and muscle with lungs, vessels, spine, ribs
                        and, in two lungs of three, a tumour
  ct_NNNN_labels.npy    uint8 [z, y, x]: 1 where a tumour is
                        A .npy file holds no spacing: voxels count as 1 mm.
samples.json            what the set was made from, and the size of each file. Without it the set is made again.
"""


@dataclass(frozen=True, slots=True)
class CTSampleSpec:
    """What a set is made from; equal specs give equal voxels.

    Raises:
        ConfigError: A value is not allowed.
    """

    count: int
    shape: tuple[int, int, int]
    seed: int

    def __post_init__(self) -> None:
        check_integer("count", self.count, 3, 9999)
        if isinstance(self.shape, str) or not isinstance(self.shape, Sequence) or len(self.shape) != 3:
            raise ConfigError(f"shape is {self.shape!r}; allowed: (z, y, x) voxels")
        object.__setattr__(self, "shape", tuple(self.shape))
        for side in self.shape:
            check_integer("a side of shape", side, SMALLEST_SIDE, 1024)
        check_integer("seed", self.seed, 0, 2**63 - 1)

    @property
    def folder_name(self) -> str:
        """Name of the set's folder: sets of different specs lie side by side."""
        return f"ct-{self.count}x{'x'.join(map(str, self.shape))}-seed{self.seed}"

    def split_of(self, number: int) -> str:
        """Return ``train``, ``val`` or ``test`` for the number of a volume; 32 volumes give 22, 5 and 5."""
        part = max(1, round(self.count * 0.15))
        return SPLITS[max(0, 2 - (self.count - 1 - number) // part)]


def ensure_ct_samples(
    folder: Path,
    *,
    count: int = 32,
    shape: tuple[int, int, int] = (64, 64, 64),
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Make the CT samples once and say where they are.

    A complete set is recognised by its marker file and used as it is, also from a read-only folder. A new set is made
    in a temporary folder and renamed, so a killed run leaves no half-made set, and two processes at once end with one.

    Args:
        folder: Where sets are kept; the set gets a folder of its own in it.
        count: Number of volumes, divided 70 : 15 : 15 into train, val and test.
        shape: (z, y, x) voxels of each.
        seed: Each volume is a function of (seed, its number, shape) alone.
        progress: Show a bar when it takes longer than two seconds.

    Returns:
        The set's root, which holds ``train``, ``val``, ``test`` and ``README.txt``.

    Raises:
        ConfigError: An argument is not allowed.
        StoreError: The folder cannot be written.
        StoreBusyError: Another process has been making the same set for ten minutes.
    """
    spec = CTSampleSpec(count, shape, seed)
    root = Path(folder) / spec.folder_name
    return ensure_set(root, _recipe(spec), lambda made: _write_set(made, spec, progress), what="CT")


def _recipe(spec: CTSampleSpec) -> Recipe:
    made_from = asdict(spec) | {"shape": list(spec.shape)}  # as JSON gives it back
    return {"format": FORMAT_VERSION, "made_from": made_from}


def _write_set(root: Path, spec: CTSampleSpec, progress: bool) -> None:
    for split in SPLITS:
        (root / split).mkdir(parents=True)
    for number in track(range(spec.count), "making CT samples", spec.count, enabled=progress):
        scene = render_volume(spec.seed, number, spec.shape)
        stem = root / spec.split_of(number) / f"ct_{number:04d}"
        np.save(stem.with_suffix(".npy"), scene.volume)
        np.save(stem.with_name(f"{stem.name}_labels.npy"), scene.labels)
    (root / "README.txt").write_text(README, encoding="utf-8")
    seal(root, _recipe(spec))
