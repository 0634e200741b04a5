"""`StripeDataset`: patches of inspection images, cut from decoded pixels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.datasets.bank_dataset import BankDataset
from lit_data.errors import DataError, list_problems, show_path
from lit_data.grid import PatchGrid
from lit_data.io.images.image_source import ImageBank, cut_patches
from lit_data.io.shards.store import ShardedStore
from lit_data.io.store.shared_arrays import share_state
from lit_data.synthesis import DefectSpec, sample_plan
from lit_data.synthesis.drawing import draw_spots
from lit_data.synthesis.renderer import draw
from lit_data.synthesis.values import ValueRange
from lit_data.types import Array, FieldSpec, SampleRuns

FIXED: Final = ("bank", "grid", "masks", "images", "_ends", "_shifts")
"""What copies in worker processes share."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DefectWriter:
    """Draws each sample's defects into its row; the same as drawn on the device, to the byte.

    Args:
        spec: The distribution.
        seed: 0 <= seed < 2**64.
        values: Value range of the pixels, of whole numbers.
    """

    spec: DefectSpec
    seed: int
    values: ValueRange

    def write_into(self, images: Array, masks: Array, index: NDArray[np.int64], epoch: int) -> None:
        """Draw the defects of some samples.

        Args:
            images: [M, C, H, W] written samples of an integer dtype, changed in place.
            masks: [M, 1, H, W] uint8, written.
            index: [M] numbers of the samples' random streams.
            epoch: The epoch they are drawn for.
        """
        plan = sample_plan(self.spec, self.seed, epoch, index, images.shape[1:])
        masks[...] = 0
        if self.spec.has_plain_spots_only:
            draw_spots(images, masks, plan, self.values)
        else:
            draw(torch.from_numpy(images), torch.from_numpy(masks), plan, self.values)


class StripeDataset(BankDataset):
    """Patches of the images of one split; map-style, and writes many samples at once.

    A sample is a dict:

    - ``image`` [C, h, w], dtype of the bank: the patch, channels as the bank holds them;
    - ``mask`` [1, h, w] uint8 in {0, 1}: only with `masks` or `defects`;
    - ``index`` int64: number of the patch among those of *all* images of the bank, whatever the
      split, so that a sample's random stream does not depend on the split;
    - ``image_index`` int64: number of the image in the bank;
    - ``position`` [2] int64: (y, x) of the patch in the image, px;
    - ``epoch`` int64: the epoch it was read for.

    Without `pixels` it has no ``image``, and instead of ``mask`` the number of its mask,
    ``mask_index`` int64: enough to cut the patch elsewhere, see
    `lit_data.datasets.stripes.device_bank`.

    A pickled copy shares the arrays of a large set with this one, see
    `lit_data.io.store.shared_arrays.SharedState`.

    Args:
        bank: Decoded images.
        grid: The patches of all images of the bank.
        images: Numbers of this split's images; all of them by default.
        masks: Decoded masks of this split's images in the same order, [1, H, W] uint8 each.
        pixels: Whether samples hold pixels, or only say where they are.
        defects: Drawn into the patches as they are written, for images of an integer dtype without
            real masks.
        margin_px: Pixels (above and below, left and right) that every patch is read larger by, for
            augmentation to move in; `position` stays that of the patch.

    Raises:
        DataError: A mask is missing, or its size is not its image's.
    """

    def __init__(
        self,
        bank: ImageBank,
        grid: PatchGrid,
        *,
        images: Sequence[int] | NDArray[np.int64] | None = None,
        masks: ImageBank | None = None,
        pixels: bool = True,
        defects: DefectWriter | None = None,
        margin_px: tuple[int, int] = (0, 0),
    ) -> None:
        self.bank, self.grid, self.masks, self.pixels, self.defects = (
            bank,
            grid,
            masks,
            pixels,
            defects,
        )
        self.margin_px = margin_px
        self.images = (
            np.arange(len(bank)) if images is None else np.ascontiguousarray(images, dtype=np.int64)
        )
        counts = grid.rows * grid.columns
        self._ends = np.cumsum(counts[self.images])
        self._shifts = np.cumsum(counts)[self.images] - self._ends
        if masks is not None:
            self._check_masks(masks)
        self.fields = self._describe()

    @property
    def read_px(self) -> tuple[int, int]:
        """(h, w) of a patch with its margin."""
        (height, width), (above, left) = self.grid.patch_px, self.margin_px
        return height + 2 * above, width + 2 * left

    @property
    @override
    def runs(self) -> SampleRuns | Callable[[int], SampleRuns] | None:
        if not self.pixels:
            return None
        ends, images = self._ends, self.images
        if isinstance(self.bank, ShardedStore):  # images of a split lie in the order of the shards
            last = np.flatnonzero(np.diff(self.bank.shard_of[images], append=-1))
            ends, images = ends[last], images[last]
        has = np.diff(ends, prepend=0) > 0
        return SampleRuns(ends[has], self._count_bytes(images)[has], most_bytes=self._window_bytes)

    @override
    def images_of(self, indices: Ints, epoch: int) -> Ints:
        return self._place(indices, epoch)[2]

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    @override
    def write_into(self, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int) -> None:
        split_image, index, image, y, x = self._place(indices, epoch)
        rows["index"][:], rows["image_index"][:], rows["epoch"][:] = index, image, epoch
        rows["position"][:, 0], rows["position"][:, 1] = y, x
        if self.pixels:
            y, x = y - self.margin_px[0], x - self.margin_px[1]
            cut_patches(self.bank, image, y, x, rows["image"])
            if self.masks is not None:
                cut_patches(self.masks, split_image, y, x, rows["mask"])
            elif self.defects is not None:
                self.defects.write_into(rows["image"], rows["mask"], index, epoch)
        elif self.masks is not None:
            rows["mask_index"][:] = split_image

    def locate(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """[M, 2] (y, x) px, where patches of this split lie in their images."""
        return np.stack(self._locate(indices)[3:], axis=1)

    def cut(self, images: NDArray[np.int64], positions: NDArray[np.int64]) -> Array:
        """Pixels of patches as they are stored, without defects.

        Args:
            images: [M] numbers of images of the bank.
            positions: [M, 2] (y, x) px.

        Returns:
            [M, C, h, w], dtype of the bank, with their margins.
        """
        patches = np.empty((len(images), self.bank.channels, *self.read_px), self.bank.dtype)
        y, x = (positions - self.margin_px).T
        cut_patches(self.bank, images, y, x, patches)
        return patches

    def describe_sample(self, index: int) -> str:
        """Name one sample of this split for a message, by its file and place."""
        _, _, image, y, x = self._locate(np.array([index]))
        return f"{show_path(self.bank.name(int(image[0])))}, patch at (y {y[0]}, x {x[0]}) px"

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, FIXED)

    def _locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Number of the image in the split, of the patch and of the image in the whole set, y and x."""
        split_image = np.searchsorted(self._ends, indices, side="right")
        index = self._shifts[split_image] + indices
        return split_image, index, *self.grid.locate(index)

    def _place(self, indices: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], ...]:
        """As `_locate`, in an epoch: by default the same in all of them."""
        return self._locate(indices)

    def _describe(self) -> dict[str, FieldSpec]:
        height, width = self.read_px
        fields = (
            {"image": FieldSpec((self.bank.channels, height, width), str(self.bank.dtype))}
            if self.pixels
            else {}
        )
        if self.masks is not None or self.defects is not None:
            mask = {"mask": FieldSpec((1, height, width), "uint8")}
            fields |= mask if self.pixels else {"mask_index": FieldSpec((), "int64")}
        numbers: dict[str, tuple[int, ...]] = {
            "index": (),
            "image_index": (),
            "position": (2,),
            "epoch": (),
        }
        return fields | {name: FieldSpec(shape, "int64") for name, shape in numbers.items()}

    def _check_masks(self, masks: ImageBank) -> None:
        if len(masks) != len(self.images):
            raise DataError(
                f"{len(masks)} masks for {len(self.images)} images: give one mask for each image"
            )
        wrong = np.flatnonzero(
            (masks.heights_px != self.bank.heights_px[self.images])
            | (masks.widths_px != self.bank.widths_px[self.images])
        )
        if wrong.size:
            found = [
                (masks.name(number), self._compare_sizes(masks, number))
                for number in wrong.tolist()
            ]
            raise list_problems(found).make_error(
                f"{wrong.size} masks differ in size from their image (height x width px)"
            )

    def _compare_sizes(self, masks: ImageBank, number: int) -> str:
        image = int(self.images[number])
        mask_size = (int(masks.heights_px[number]), int(masks.widths_px[number]))
        image_size = (int(self.bank.heights_px[image]), int(self.bank.widths_px[image]))
        turned = " (turned by 90 degrees?)" if mask_size == image_size[::-1] else ""
        return (
            f"{mask_size[0]} x {mask_size[1]}, "
            f"{show_path(self.bank.name(image))}: {image_size[0]} x {image_size[1]}{turned}"
        )
