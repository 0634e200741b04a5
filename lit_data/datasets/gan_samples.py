"""The default data of the gan experiment: a small set of drawn objects, each seen from several sides, made once."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from typing_extensions import override

from lit_data.datasets.gan_scene import KINDS, Cameras, draw_solid, render_views
from lit_data.datasets.gan_table import LAYOUT_FILE, ViewLayout
from lit_data.datasets.sample_set import Recipe, SampleSpec, check_integer, ensure_set, seal
from lit_data.datasets.splits import SPLITS
from lit_data.io.image_files import write_png
from lit_data.io.progress import track

FORMAT_VERSION = 1  # raise it with every change of a pixel or of the layout
SMALLEST_SIDE_PX = 8
MOST_TILES = 16

README = """Objects seen from several sides, made by lit_data (lit_data.datasets.gan_samples). Synthetic, CC0.

train, val, test / ellipsoid, box, cylinder, cone, torus
                        PNG, R, G, B: one sheet of k x k views for each object. From left to right the azimuth grows,
                        from top to bottom the elevation.
views.json              k (tiles), the azimuth of the first view and where the circle ends, the lowest and the highest
                        elevation, in degrees. The camera looks at the middle of the object; lit_data.datasets.gan_scene
                        has its distance and its field of view.
samples.json            what the set was made from, and the size of each file. Without it the set is made again.
"""


@dataclass(frozen=True, slots=True)
class GANSampleSpec(SampleSpec):
    """What a set is made from; equal specs give equal pixels.

    Args:
        tiles: Views along each side of a sheet.
    """

    kind = "gan"
    sides = (SMALLEST_SIDE_PX, 1024)

    tiles: int = 4

    def __post_init__(self) -> None:
        SampleSpec.__post_init__(self)
        check_integer("tiles", self.tiles, 1, MOST_TILES)

    @property
    def folder_name(self) -> str:
        """Name of the set's folder: sets of different specs lie side by side."""
        height, width = self.size
        return f"{self.kind}-{self.count}x{self.tiles**2}x{height}x{width}-seed{self.seed}"

    @override
    def recipe(self, format_version: int) -> Recipe:
        recipe = SampleSpec.recipe(self, format_version)
        return {**recipe, "made_from": {**recipe["made_from"], "tiles": self.tiles}}


def ensure_gan_samples(
    folder: Path,
    *,
    count: int = 300,
    size_px: tuple[int, int] = (64, 64),
    tiles: int = 4,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Make the objects once and say where they are; see `lit_data.datasets.sample_set.ensure_set`.

    Args:
        folder: Where sets are kept; the set gets a folder of its own in it.
        count: Number of objects, divided 70 : 15 : 15 into train, val and test.
        size_px: (height, width) of a view.
        tiles: k, for k * k views of each object: k azimuths and k elevations.
        seed: Each object is a function of (seed, its number) alone.
        progress: Show a bar when it takes longer than two seconds.

    Returns:
        The set's root, which holds ``train``, ``val``, ``test``, ``views.json`` and ``README.txt``.

    Raises:
        ConfigError: An argument is not allowed.
        StoreError: The folder cannot be written.
        StoreBusyError: Another process has been making the same set for ten minutes.
    """
    spec = GANSampleSpec(count, size_px, seed, tiles)
    root, recipe = Path(folder) / spec.folder_name, spec.recipe(FORMAT_VERSION)
    return ensure_set(root, recipe, lambda made: _write_set(made, spec, progress), what="GAN")


def _write_set(root: Path, spec: GANSampleSpec, progress: bool) -> None:
    for split in SPLITS:
        for kind in KINDS:
            (root / split / kind).mkdir(parents=True)
    layout = ViewLayout(views="sheet", tiles=spec.tiles)
    cameras = Cameras.at(layout.poses(spec.tiles), (spec.size[0], spec.size[1]))
    for number in track(range(spec.count), "making GAN samples", spec.count, enabled=progress):
        solid = draw_solid(spec.seed, number)
        rows = [np.concatenate(list(row), axis=1) for row in np.split(render_views(solid, cameras), spec.tiles)]
        name = f"{solid.kind}_{number:04d}.png"
        write_png(root / spec.split_of(number) / solid.kind / name, np.concatenate(rows))
    (root / LAYOUT_FILE).write_text(json.dumps(asdict(layout), indent=1), encoding="utf-8")
    (root / "README.txt").write_text(README, encoding="utf-8")
    seal(root, spec.recipe(FORMAT_VERSION))
