"""Drawing of watermarks into patches by workers, see `lit_data.datasets.patches.PatchWriter`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lit_data.core.errors import DataError
from lit_data.core.types import Array, FieldSpec, Ints, Size
from lit_data.images.bank import ImageBank
from lit_data.wings.watermarks.cover import PROBES, draw_cover, probe_under
from lit_data.wings.watermarks.glyphs import GlyphBank
from lit_data.wings.watermarks.plan import sample_watermarks


@dataclass(frozen=True, slots=True)
class WatermarkWriter:
    """Watermarks of patches, before they are blended in.

    Samples have:

    - ``cover`` [1, h, w] uint8: coverage of each pixel by the watermark, up to 255. The plan has
      the look of the mark, which is blended in where the batch is used
      (`lit_data.wings.watermarks.blend`);
    - ``under`` [32, 3] uint8: colors of some pixels under the watermark.

    Args:
        marks: Texts of the watermarks.
        seed: Seed of all random numbers.
    """

    marks: GlyphBank
    seed: int

    def describe(self, size_px: Size) -> Mapping[str, FieldSpec]:
        """Return the fields of samples of (height, width), in addition to ``image``."""
        cover = FieldSpec((1, *size_px), "uint8")
        return {"cover": cover, "under": FieldSpec((PROBES, 3), "uint8")}

    def write_into(self, rows: Mapping[str, Array], index: Ints, epoch: int) -> None:
        """Draw ``cover`` and read ``under`` of samples, by the numbers of their random streams."""
        cover = rows["cover"][:, 0]
        height_px, width_px = cover.shape[1:]
        size_px = (height_px, width_px)
        plan = sample_watermarks(self.marks.spec, self.seed, epoch, index, size_px)
        draw_cover(cover, plan, self.marks)
        # The host chooses colors that are visible there before the batch is moved.
        rows["under"][:] = probe_under(rows["image"], cover)


def check_colours(bank: ImageBank) -> None:
    """Refuse images that watermarks cannot be drawn into.

    Raises:
        DataError: Images do not have three channels of uint8.
    """
    if bank.channels != 3 or bank.dtype != np.uint8:
        raise DataError(
            f"images are {bank.channels} channels of {bank.dtype}: watermarks need three of uint8; "
            "set data.read.gray_to_rgb=true for gray images"
        )
