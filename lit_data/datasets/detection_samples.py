"""The default data of the detection experiment: a small set of images, made once where no ``data.root`` is given."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.detection_scene import CLASSES, render_scene
from lit_data.datasets.sample_set import SampleSpec, ensure_set, seal
from lit_data.datasets.splits import SPLITS
from lit_data.io.image_files import write_png
from lit_data.io.progress import track

FORMAT_VERSION = 1  # raise it with every change of a pixel or of the layout
SMALLEST_SIDE_PX = 64  # room for a few objects

README = """Detection samples, made by lit_data (lit_data.datasets.detection_samples). Synthetic, CC0: free to use.

images/train, val, test   PNG, R, G, B: discs, squares and triangles of any size, angle and colour on textured ground.
                          Rings are of no class. One image in ten is tall, one is wide, one in twelve has no object.
labels/train, val, test   YOLO text with the stems of the images: class cx cy w h, in shares of the image. A box holds
                          the whole object as far as it lies in the image, also what another object covers: at most
                          half of it.
data.yaml                 names of the classes, folders of the splits.
samples.json              what the set was made from, and the size of each file. Without it the set is made again.
"""


class DetectionSampleSpec(SampleSpec):
    """What a set is made from; equal specs give equal pixels."""

    __slots__ = ()
    kind = "detection"
    sides = (SMALLEST_SIDE_PX, 2**13)

    def size_of(self, number: int) -> tuple[int, int]:
        """(height, width) of an image: of ten one is twice as high as wide, and one is twice as wide as high."""
        height, width = self.size
        side = min(self.size)
        return {3: (side, side // 2), 7: (side // 2, side)}.get(number % 10, (height, width))

    def is_empty(self, number: int) -> bool:
        """Whether an image has no object: one in twelve has none."""
        return number % 12 == 5


def ensure_detection_samples(
    folder: Path,
    *,
    count: int = 160,
    size_px: tuple[int, int] = (240, 320),
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Make the detection samples once and say where they are.

    A complete set is recognised by its marker file and used as it is, also from a read-only folder. A new set is made
    in a temporary folder and renamed, so a killed run leaves no half-made set, and two processes at once end with one.

    Args:
        folder: Where sets are kept; the set gets a folder of its own in it.
        count: Number of images, divided 70 : 15 : 15 into train, val and test.
        size_px: (height, width) of most images.
        seed: Each image is a function of (seed, image number, size) alone.
        progress: Show a bar when it takes longer than two seconds.

    Returns:
        The set's root, which holds ``images``, ``labels``, ``data.yaml`` and ``README.txt``.

    Raises:
        ConfigError: An argument is not allowed.
        StoreError: The folder cannot be written.
        StoreBusyError: Another process has been making the same set for ten minutes.
    """
    spec = DetectionSampleSpec(count, size_px, seed)
    root, recipe = Path(folder) / spec.folder_name, spec.recipe(FORMAT_VERSION)
    return ensure_set(root, recipe, lambda made: _write_set(made, spec, progress), what="detection")


def _write_set(root: Path, spec: DetectionSampleSpec, progress: bool) -> None:
    for split in SPLITS:
        (root / "images" / split).mkdir(parents=True)
        (root / "labels" / split).mkdir(parents=True)
    for number in track(range(spec.count), "making detection samples", spec.count, enabled=progress):
        _write_sample(root, spec, number)
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES))
    folders = "".join(f"{split}: images/{split}\n" for split in SPLITS)
    (root / "data.yaml").write_text(f"path: .\n{folders}names:\n{names}", encoding="utf-8")
    (root / "README.txt").write_text(README, encoding="utf-8")
    seal(root, spec.recipe(FORMAT_VERSION))


def _write_sample(root: Path, spec: DetectionSampleSpec, number: int) -> None:
    size_px, split, stem = spec.size_of(number), spec.split_of(number), f"detection_{number:04d}"
    scene = render_scene(spec.seed, number, size_px, empty=spec.is_empty(number))
    write_png(root / "images" / split / f"{stem}.png", np.moveaxis(scene.image, 0, -1))
    lines = "".join(_format_box(box, size_px) for box in scene.boxes)
    (root / "labels" / split / f"{stem}.txt").write_text(lines, encoding="utf-8")


def _format_box(box: NDArray[np.int64], size_px: tuple[int, int]) -> str:
    kind, top, left, bottom, right = box.tolist()
    height, width = size_px
    centre = f"{(left + right) / 2 / width:.6f} {(top + bottom) / 2 / height:.6f}"
    return f"{kind} {centre} {(right - left) / width:.6f} {(bottom - top) / height:.6f}\n"
