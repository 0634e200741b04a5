"""`WatermarkDataset`: patches of pages and photographs, with text watermarks drawn when they are read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.datasets.bank_dataset import BankDataset
from lit_data.datasets.patch_source import GridPatches, ProgressiveSize, RandomPatches
from lit_data.errors import ConfigError, DataError, list_problems, show_path
from lit_data.grid import pair_px
from lit_data.io.images.image_source import ImageBank, cut_patches
from lit_data.io.store.shared_arrays import share_state
from lit_data.synthesis.watermarks.cover import PROBES, draw_cover, probe_under
from lit_data.synthesis.watermarks.glyphs import GlyphBank
from lit_data.synthesis.watermarks.plan import sample_watermarks
from lit_data.types import Array, FieldSpec

if TYPE_CHECKING:
    import torch

_FIXED: Final = ("bank", "masks", "images", "_patches")
_PIXELS: Final = ("image", "cover", "mask")


class WatermarkDataset(BankDataset):
    """Patches of the images of one split; map-style, and writes many samples at once.

    A sample is a dict:

    - ``image`` [3, h, w] uint8: the patch without a watermark, R, G, B;
    - ``cover`` [1, h, w] uint8: how far its watermark covers each pixel, 255 wholly; only with
      `marks`. What the mark looks like is the plan's, and blended in where the batch is used
      (`lit_data.synthesis.watermarks.blend`);
    - ``under`` [32, 3] uint8: colours of some pixels under the watermark; only with `marks`;
    - ``mask`` [1, h, w] uint8 in {0, 1}: only with `masks`;
    - ``index`` int64: number of the sample among those of *all* images, of which its random stream
      is made;
    - ``image_index`` int64: number of the image in the bank;
    - ``position`` [2] int64: (y, x) of the patch in the image, px;
    - ``epoch`` int64: the epoch it was read for.

    With `progressive`, rows of a batch are as large as the largest patches, and samples are written
    into their upper left corner, see `size_at`.

    Args:
        bank: Decoded images, [3, h, w] uint8 each, of any size; those smaller than a patch are
            mirrored on.
        images: Numbers of this split's images; all of them by default.
        patch_px: Patch size, one number or (height, width).
        samples_per_image: Patches of each image that are cut at random in each epoch; none takes
            those of a grid.
        stride_px: Distance between the patches of the grid; by default they lie side by side.
        progressive: Patch sizes by epoch, in place of `patch_px`, for patches cut at random.
        marks: Texts of the watermarks that are drawn; none draws none.
        masks: Decoded masks of this split's images in the same order, [1, h, w] uint8 each, instead
            of `marks`.
        seed: Seed of every draw.

    Raises:
        DataError: Images are not three channels of uint8, or masks do not fit them.
        ConfigError: Both marks and masks, sizes by epoch for a grid, or a number is not allowed.
    """

    def __init__(
        self,
        bank: ImageBank,
        *,
        images: Sequence[int] | NDArray[np.int64] | None = None,
        patch_px: int | tuple[int, int] = 192,
        samples_per_image: int | None = None,
        stride_px: int | tuple[int, int] | None = None,
        progressive: ProgressiveSize | None = None,
        marks: GlyphBank | None = None,
        masks: ImageBank | None = None,
        seed: int = 0,
    ) -> None:
        if bank.channels != 3 or bank.dtype != np.uint8:
            raise DataError(
                f"images are {bank.channels} channels of {bank.dtype}: watermarks need three of uint8; set "
                "data.read.gray_to_rgb=true for grey images"
            )
        self.bank, self.masks, self.marks, self.seed = bank, masks, marks, seed
        self.patch_px, self.progressive = pair_px("patch_px", patch_px), progressive
        self.images = (
            np.arange(len(bank)) if images is None else np.ascontiguousarray(images, dtype=np.int64)
        )
        self._check(samples_per_image)
        self._patches: RandomPatches | GridPatches = (
            GridPatches(bank, self.images, self.patch_px, stride_px or self.patch_px)
            if samples_per_image is None
            else RandomPatches(bank, self.images, samples_per_image, seed)
        )
        self.fields = self._describe()

    @property
    def row_px(self) -> tuple[int, int]:
        """(h, w) of the rows of a batch."""
        return (self.progressive.largest_px,) * 2 if self.progressive else self.patch_px

    def size_at(self, epoch: int) -> tuple[int, int]:
        """(h, w) of the samples of an epoch."""
        return (self.progressive.size_at(epoch),) * 2 if self.progressive else self.patch_px

    def __len__(self) -> int:
        return len(self._patches)

    @override
    def __getitems__(self, indices: Sequence[int]) -> "list[dict[str, torch.Tensor]]":
        corner = corner_of(self.size_at(self.epoch))
        return [
            {name: value[corner] if name in _PIXELS else value for name, value in sample.items()}
            for sample in super().__getitems__(indices)
        ]

    @override
    def write_into(self, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int) -> None:
        size_px = self.size_at(epoch)
        places, corner = self._patches.locate(indices, epoch, size_px), corner_of(size_px)
        rows["index"][:], rows["image_index"][:], rows["epoch"][:] = (
            places.index,
            places.image,
            epoch,
        )
        rows["position"][:] = places.position
        y, x = places.position.T
        cut_patches(self.bank, places.image, y, x, rows["image"][corner])
        if self.masks is not None:
            cut_patches(self.masks, places.split_image, y, x, rows["mask"][corner])
        elif self.marks is not None:
            cover = rows["cover"][corner][:, 0]
            plan = sample_watermarks(self.marks.spec, self.seed, epoch, places.index, size_px)
            draw_cover(cover, plan, self.marks)
            rows["under"][:] = probe_under(rows["image"][corner], cover)

    def describe_sample(self, index: int) -> str:
        """Name one sample of this split for a message, by its file and place."""
        places = self._patches.locate(np.array([index]), self.epoch, self.size_at(self.epoch))
        y, x = places.position[0].tolist()
        return f"{show_path(self.bank.name(int(places.image[0])))}, patch at (y {y}, x {x}) px"

    @override
    def images_of(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self.images[self._patches.split_images_of(indices)]

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, _FIXED)

    def _describe(self) -> dict[str, FieldSpec]:
        fields = {"image": FieldSpec((3, *self.row_px), "uint8")}
        if self.masks is not None:
            fields["mask"] = FieldSpec((1, *self.row_px), "uint8")
        elif self.marks is not None:
            fields |= {
                "cover": FieldSpec((1, *self.row_px), "uint8"),
                "under": FieldSpec((PROBES, 3), "uint8"),
            }
        numbers: dict[str, tuple[int, ...]] = {
            "index": (),
            "image_index": (),
            "position": (2,),
            "epoch": (),
        }
        return fields | {name: FieldSpec(shape, "int64") for name, shape in numbers.items()}

    def _check(self, samples_per_image: int | None) -> None:
        if self.masks is not None and self.marks is not None:
            raise ConfigError("give marks to draw, or masks that there are, not both")
        if self.progressive is not None and samples_per_image is None:
            raise ConfigError("sizes by epoch are for patches cut at random: set samples_per_image")
        if self.masks is None:
            return
        if len(self.masks) != len(self.images):
            raise DataError(
                f"{len(self.masks)} masks for {len(self.images)} images: give one mask for each image"
            )
        found, wanted = (
            np.stack((bank.heights_px, bank.widths_px), axis=1) for bank in (self.masks, self.bank)
        )
        wrong = np.flatnonzero((found != wanted[self.images]).any(1)).tolist()
        if wrong:
            sizes = [
                (self.masks.name(number), f"{found[number, 0]} x {found[number, 1]} px")
                for number in wrong
            ]
            raise list_problems(sizes).make_error(
                f"{len(wrong)} masks differ in size from their image"
            )


def corner_of(size_px: tuple[int, int]) -> tuple[Any, ...]:
    """What selects the upper left corner of rows [M, C, H, W]."""
    return ..., slice(size_px[0]), slice(size_px[1])
