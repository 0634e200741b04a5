"""The default backgrounds of the watermark experiment: pages, photographs and textures, made once."""

from pathlib import Path

import numpy as np

from lit_data.datasets.page_scene import draw_page
from lit_data.datasets.photo_scene import draw_photo, draw_texture
from lit_data.datasets.sample_set import SampleSpec, ensure_set, seal
from lit_data.datasets.splits import SPLITS
from lit_data.io.image_files import write_png
from lit_data.io.progress import track
from lit_data.types import Array

FORMAT_VERSION = 1  # raise it with every change of a pixel or of the layout
SMALLEST_SIDE_PX = 96  # room for a line of text
JPEG_QUALITY = 90

README = """Backgrounds for watermarks, made by lit_data (lit_data.datasets.watermark_samples). Synthetic, CC0.

train/, val/, test/   page_*.png     grey: headings, paragraphs, tables and pictures; words without meaning
                      photo_*.jpg    colour: sky, hills, things
                      texture_*.png  grey: surfaces
                      Of ten images five are pages, four photographs, one is a texture. No image has a watermark.
samples.json          what the set was made from, and the size of each file. Without it the set is made again.
"""


class WatermarkSampleSpec(SampleSpec):
    """What a set is made from; equal specs give equal pixels (of photographs before they are compressed)."""

    __slots__ = ()
    kind = "watermark"
    sides = (SMALLEST_SIDE_PX, 2**13)

    def kind_of(self, number: int) -> str:
        """Return ``page``, ``photo`` or ``texture``."""
        return "page" if number % 2 == 0 else "texture" if number % 10 == 9 else "photo"


def ensure_watermark_samples(
    folder: Path,
    *,
    count: int = 60,
    size_px: tuple[int, int] = (640, 480),
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Make the backgrounds once and say where they are; see `lit_data.datasets.sample_set.ensure_set`.

    Args:
        folder: Where sets are kept; the set gets a folder of its own in it.
        count: Number of images, divided 70 : 15 : 15 into train, val and test.
        size_px: (height, width) of a page; photographs lie on their side.
        seed: Each image is a function of (seed, image number, size) alone.
        progress: Show a bar when it takes longer than two seconds.

    Returns:
        The set's root, which holds ``train``, ``val``, ``test`` and ``README.txt``.

    Raises:
        ConfigError: An argument is not allowed.
        StoreError: The folder cannot be written.
        StoreBusyError: Another process has been making the same set for ten minutes.
    """
    spec = WatermarkSampleSpec(count, size_px, seed)
    root, recipe = Path(folder) / spec.folder_name, spec.recipe(FORMAT_VERSION)
    return ensure_set(root, recipe, lambda made: _write_set(made, spec, progress), what="watermark")


def _write_set(root: Path, spec: WatermarkSampleSpec, progress: bool) -> None:
    for split in SPLITS:
        (root / split).mkdir(parents=True)
    for number in track(range(spec.count), "making watermark samples", spec.count, enabled=progress):
        _write_sample(root / spec.split_of(number), spec, number)
    (root / "README.txt").write_text(README, encoding="utf-8")
    seal(root, spec.recipe(FORMAT_VERSION))


def _write_sample(folder: Path, spec: WatermarkSampleSpec, number: int) -> None:
    rng = np.random.Generator(np.random.Philox(key=[spec.seed, number]))
    height, width = spec.size
    kind, stem = spec.kind_of(number), f"{spec.kind_of(number)}_{number:04d}"
    if kind == "photo":
        _write_jpeg(folder / f"{stem}.jpg", draw_photo(rng, (width, height)))
        return
    draw = draw_page if kind == "page" else draw_texture
    write_png(folder / f"{stem}.png", draw(rng, (height, width))[..., None])


def _write_jpeg(path: Path, pixels: Array) -> None:
    import cv2

    image = np.ascontiguousarray(np.moveaxis(pixels, 0, -1)[..., ::-1])  # OpenCV wants B, G, R
    path.write_bytes(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes())
