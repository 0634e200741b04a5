"""The default backgrounds of the watermark experiment: pages, photographs and textures, made once."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lit_data.datasets.page_scene import draw_page
from lit_data.datasets.photo_scene import draw_photo, draw_texture
from lit_data.datasets.sample_set import Recipe, check_integer, ensure_set, seal
from lit_data.datasets.splits import SPLITS
from lit_data.errors import ConfigError
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


@dataclass(frozen=True, slots=True)
class WatermarkSampleSpec:
    """What a set is made from; equal specs give equal pixels (of photographs before they are compressed).

    Raises:
        ConfigError: A value is not allowed.
    """

    count: int
    size_px: tuple[int, int]
    seed: int

    def __post_init__(self) -> None:
        check_integer("count", self.count, 3, 9999)
        if isinstance(self.size_px, str) or not isinstance(self.size_px, Sequence) or len(self.size_px) != 2:
            raise ConfigError(f"size_px is {self.size_px!r}; allowed: (height, width)")
        object.__setattr__(self, "size_px", tuple(self.size_px))
        for side in self.size_px:
            check_integer("a side of size_px", side, SMALLEST_SIDE_PX, 2**13)
        check_integer("seed", self.seed, 0, 2**63 - 1)

    @property
    def folder_name(self) -> str:
        """Name of the set's folder: sets of different specs lie side by side."""
        return f"watermark-{self.count}x{self.size_px[0]}x{self.size_px[1]}-seed{self.seed}"

    def split_of(self, number: int) -> str:
        """Return ``train``, ``val`` or ``test`` for an image number; 60 images give 42, 9 and 9."""
        part = max(1, round(self.count * 0.15))
        return SPLITS[max(0, 2 - (self.count - 1 - number) // part)]

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
    root = Path(folder) / spec.folder_name
    return ensure_set(root, _recipe(spec), lambda made: _write_set(made, spec, progress), what="watermark")


def _recipe(spec: WatermarkSampleSpec) -> Recipe:
    made_from = asdict(spec) | {"size_px": list(spec.size_px)}  # as JSON gives it back
    return {"format": FORMAT_VERSION, "made_from": made_from}


def _write_set(root: Path, spec: WatermarkSampleSpec, progress: bool) -> None:
    for split in SPLITS:
        (root / split).mkdir(parents=True)
    for number in track(range(spec.count), "making watermark samples", spec.count, enabled=progress):
        _write_sample(root / spec.split_of(number), spec, number)
    (root / "README.txt").write_text(README, encoding="utf-8")
    seal(root, _recipe(spec))


def _write_sample(folder: Path, spec: WatermarkSampleSpec, number: int) -> None:
    rng = np.random.Generator(np.random.Philox(key=[spec.seed, number]))
    kind, stem = spec.kind_of(number), f"{spec.kind_of(number)}_{number:04d}"
    if kind == "photo":
        _write_jpeg(folder / f"{stem}.jpg", draw_photo(rng, spec.size_px[::-1]))
        return
    draw = draw_page if kind == "page" else draw_texture
    write_png(folder / f"{stem}.png", draw(rng, spec.size_px)[..., None])


def _write_jpeg(path: Path, pixels: Array) -> None:
    import cv2

    image = np.ascontiguousarray(np.moveaxis(pixels, 0, -1)[..., ::-1])  # OpenCV wants B, G, R
    path.write_bytes(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes())
