"""`StripeDataset`: patches of inspection images, cut from decoded pixels."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from lit_data.datasets.stripes.drawn import DefectWriter
from lit_data.errors import DataError, show_path
from lit_data.grid import PatchGrid
from lit_data.io.images.image_source import ImageBank, cut_patches
from lit_data.io.shards.store import ShardedStore
from lit_data.io.store.shared_arrays import share_state
from lit_data.io.store.store import StoredImages
from lit_data.types import Array, FieldSpec, LookAhead, SampleRuns

if TYPE_CHECKING:
    import torch

FIXED: Final = ("bank", "grid", "masks", "images", "_ends", "_shifts")
"""What copies in worker processes share."""
_PLACED: Final = 2**16
Ints = NDArray[np.int64]


class StripeDataset:
    """Patches of the images of one split; map-style, and writes many samples at once.

    A sample is a dict:

    - ``image`` [C, h, w], dtype of the bank: the patch, channels as the bank holds them;
    - ``mask`` [1, h, w] uint8 in {0, 1}: only with `masks` or `defects`;
    - ``index`` int64: number of the patch among those of *all* images of the bank, whatever the split, so that a
      sample's random stream does not depend on the split;
    - ``image_index`` int64: number of the image in the bank;
    - ``position`` [2] int64: (y, x) of the patch in the image, px;
    - ``epoch`` int64: the epoch it was read for.

    Without `pixels` it has no ``image``, and instead of ``mask`` the number of its mask, ``mask_index`` int64: enough
    to cut the patch elsewhere, see `lit_data.datasets.stripes.device_bank`.

    A pickled copy shares the arrays of a large set with this one, see `lit_data.io.store.shared_arrays.SharedState`.

    Args:
        bank: Decoded images.
        grid: The patches of all images of the bank.
        images: Numbers of this split's images; all of them by default.
        masks: Decoded masks of this split's images in the same order, [1, H, W] uint8 each.
        pixels: Whether samples hold pixels, or only say where they are.
        defects: Drawn into the patches as they are written, for images of an integer dtype without real masks.
        margin_px: Pixels (above and below, left and right) that every patch is read larger by, for augmentation to
            move in; `position` stays that of the patch.

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
        self.bank, self.grid, self.masks, self.pixels, self.defects = bank, grid, masks, pixels, defects
        self.margin_px = margin_px
        self.images = np.arange(len(bank)) if images is None else np.ascontiguousarray(images, dtype=np.int64)
        counts = grid.rows * grid.columns
        self._ends = np.cumsum(counts[self.images])
        self._shifts = np.cumsum(counts)[self.images] - self._ends
        self.epoch = 0
        if masks is not None:
            self._check_masks(masks)
        self.fields: Mapping[str, FieldSpec] = self._describe()

    @property
    def read_px(self) -> tuple[int, int]:
        """(h, w) of a patch with its margin."""
        (height, width), (above, left) = self.grid.patch_px, self.margin_px
        return height + 2 * above, width + 2 * left

    @property
    def runs(self) -> SampleRuns | Callable[[int], SampleRuns] | None:
        """The patches of each image or shard, for an order by windows; none where they are cut elsewhere."""
        if not self.pixels:
            return None
        bank = self.bank
        if isinstance(bank, ShardedStore):  # images of a split lie in the order of the shards
            last = np.flatnonzero(np.diff(bank.shard_of[self.images], append=-1))
            ends, nbytes = self._ends[last], bank.count_bytes(self.images[last])
        else:
            ends, nbytes = self._ends, self._count_bytes(self.images)
        has = np.diff(ends, prepend=0) > 0
        return SampleRuns(ends[has], nbytes[has], most_bytes=self._window_bytes)

    def _group_runs(self, split_images: Ints) -> SampleRuns:
        """Samples by what they are read from: images, or the shards that hold them.

        Args:
            split_images: [n] number in the split of the image of each sample.
        """
        bank, images = self.bank, self.images[split_images]
        group = bank.shard_of[images] if isinstance(bank, ShardedStore) else split_images
        order = np.argsort(group, kind="stable")
        firsts = np.unique(group[order], return_index=True)[1]
        one = images[order[firsts]]
        nbytes = bank.count_bytes(one) if isinstance(bank, ShardedStore) else self._count_bytes(one)
        return SampleRuns(np.append(firsts[1:], len(order)), nbytes, order, self._window_bytes)

    def _count_bytes(self, images: Ints) -> Ints:
        """[n] bytes of images, with their masks."""
        item_bytes = self.bank.channels * self.bank.dtype.itemsize + (self.masks is not None)
        nbytes: Ints = self.bank.heights_px[images] * self.bank.widths_px[images] * item_bytes
        return nbytes

    @property
    def _window_bytes(self) -> int | None:
        return self.bank.window_bytes if isinstance(self.bank, ShardedStore) else None

    @property
    def fetches(self) -> bool:
        """Whether the images come in shards."""
        return isinstance(self.bank, ShardedStore) and self.pixels

    @property
    def needs_windows(self) -> bool:
        """Whether the images come in shards that have no room here all at once."""
        return isinstance(self.bank, ShardedStore) and self.pixels and not self.bank.fits

    def look_ahead(self, indices: Callable[[], Ints], epoch: int) -> LookAhead | None:
        """Begin to fetch the shards that samples of an epoch need; nothing where the images are here.

        Args:
            indices: Gives the samples, in their order.
            epoch: The epoch they are read for.
        """
        if not isinstance(self.bank, ShardedStore) or not self.pixels:
            return None
        samples = indices()
        parts = [self._place(samples[at : at + _PLACED], epoch)[2] for at in range(0, len(samples), _PLACED)]
        return self.bank.look_ahead(np.concatenate(parts)) if parts else None

    def set_epoch(self, epoch: int) -> None:
        """Stamp samples read by `__getitem__` with this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __getitem__(self, index: int) -> "dict[str, torch.Tensor]":
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> "list[dict[str, torch.Tensor]]":
        """Several samples at once, which torch's DataLoader asks for where it can."""
        import torch

        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} of {len(self)}")
        rows = {name: np.empty((len(indices), *field.shape), field.dtype) for name, field in self.fields.items()}
        self.write_into(rows, np.array(indices, dtype=np.int64), self.epoch)
        tensors = {name: torch.from_numpy(array) for name, array in rows.items()}
        return [{name: tensor[row] for name, tensor in tensors.items()} for row in range(len(indices))]

    def write_into(self, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int) -> None:
        """Write samples into the rows of a batch, without a copy in between.

        Args:
            rows: For each key of `fields`, an array [M, ...].
            indices: [M] sample numbers in this split.
            epoch: The epoch they are read for.
        """
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

    def check_sources(self) -> None:
        """Find out, after a worker was killed, whether a store was cut short while it was read; cheap.

        Raises:
            StoreCorruptError: It was.
        """
        for bank in (self.bank, self.masks):
            if isinstance(bank, StoredImages):
                bank.check_size()

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
        fields = {"image": FieldSpec((self.bank.channels, height, width), str(self.bank.dtype))} if self.pixels else {}
        if self.masks is not None or self.defects is not None:
            mask = {"mask": FieldSpec((1, height, width), "uint8")}
            fields |= mask if self.pixels else {"mask_index": FieldSpec((), "int64")}
        numbers: dict[str, tuple[int, ...]] = {"index": (), "image_index": (), "position": (2,), "epoch": ()}
        return fields | {name: FieldSpec(shape, "int64") for name, shape in numbers.items()}

    def _check_masks(self, masks: ImageBank) -> None:
        if len(masks) != len(self.images):
            raise DataError(f"{len(masks)} masks for {len(self.images)} images: give one mask for each image")
        wrong = np.flatnonzero(
            (masks.heights_px != self.bank.heights_px[self.images])
            | (masks.widths_px != self.bank.widths_px[self.images])
        )
        if wrong.size:
            lines = "\n".join(f"  {self._compare_sizes(masks, number)}" for number in wrong[:100].tolist())
            raise DataError(f"{wrong.size} masks differ in size from their image (height x width px):\n{lines}")

    def _compare_sizes(self, masks: ImageBank, number: int) -> str:
        image = int(self.images[number])
        mask_size = (int(masks.heights_px[number]), int(masks.widths_px[number]))
        image_size = (int(self.bank.heights_px[image]), int(self.bank.widths_px[image]))
        turned = " (turned by 90 degrees?)" if mask_size == image_size[::-1] else ""
        return (
            f"{masks.name(number)}: {mask_size[0]} x {mask_size[1]}, "
            f"{self.bank.name(image)}: {image_size[0]} x {image_size[1]}{turned}"
        )
