"""The default data of the ct experiment: a small set of drawn volumes, made once where no ``data.root`` is given."""

from pathlib import Path

import numpy as np

from lit_data.datasets.ct_scene import render_volume
from lit_data.datasets.sample_set import SampleSpec, ensure_set, seal
from lit_data.datasets.splits import SPLITS
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


class CTSampleSpec(SampleSpec):
    """What a set is made from; equal specs give equal voxels."""

    __slots__ = ()
    kind = "ct"
    size_name = "shape"
    axes = ("z", "y", "x")
    sides = (SMALLEST_SIDE, 1024)


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
    root, recipe = Path(folder) / spec.folder_name, spec.recipe(FORMAT_VERSION)
    return ensure_set(root, recipe, lambda made: _write_set(made, spec, progress), what="CT")


def _write_set(root: Path, spec: CTSampleSpec, progress: bool) -> None:
    for split in SPLITS:
        (root / split).mkdir(parents=True)
    depth, height, width = spec.size
    for number in track(range(spec.count), "making CT samples", spec.count, enabled=progress):
        scene = render_volume(spec.seed, number, (depth, height, width))
        stem = root / spec.split_of(number) / f"ct_{number:04d}"
        np.save(stem.with_suffix(".npy"), scene.volume)
        np.save(stem.with_name(f"{stem.name}_labels.npy"), scene.labels)
    (root / "README.txt").write_text(README, encoding="utf-8")
    seal(root, spec.recipe(FORMAT_VERSION))
