"""`GANDataset`: images for generative models, with labels, and with poses where objects are seen from several sides."""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_data.checks import check_choice
from lit_data.datasets.bank_dataset import BankDataset
from lit_data.datasets.gan.table import Ints, SampleTable
from lit_data.datasets.patch_source import GridPatches, RandomPatches, make_padded_grid
from lit_data.errors import ConfigError, list_problems, show_path
from lit_data.grid import pair_px
from lit_data.io.images.image_source import ImageBank, cut_patches
from lit_data.io.store.shared_arrays import share_state
from lit_data.types import Array, FieldSpec

Cut = Literal["whole", "random", "grid"]
"""Samples are whole images or views, patches of them at random places, or those of a grid."""

_FIXED: Final = ("bank", "table", "samples", "_patches")


class GANDataset(BankDataset):
    """Images of one split; map-style, and writes many samples at once.

    A sample is a dict:

    - ``image`` [C, h, w]: pixels as they are stored;
    - ``label`` int64: class, view or object, 0 without labels;
    - ``view``, ``object`` int64 and ``pose`` [2] float32, azimuth and elevation in rad: only where
      objects have views;
    - ``index`` int64: number of the sample among those of *all* images, of which its random stream
      is made;
    - ``image_index`` int64: number of the image in the bank;
    - ``epoch`` int64: the epoch it was read for.

    Args:
        bank: Decoded images [C, h, w]; of `image_px` each, or sheets of `table.tiles` times
            `table.tiles` of them. Those that patches are cut from may have any size, smaller ones
            are mirrored on.
        table: Which samples the bank holds.
        samples: Numbers of this split's samples in the table; all of them by default.
        image_px: Size of a sample, one number or (height, width).
        cut: See `Cut`.
        samples_per_image: Patches of each image in an epoch, for ``cut="random"``.
        seed: Seed of the places of patches.

    Raises:
        ConfigError: Patches are wanted of images with views, or a number is not allowed.
        DataError: Images have another size.
    """

    def __init__(
        self,
        bank: ImageBank,
        table: SampleTable,
        *,
        samples: Ints | None = None,
        image_px: int | tuple[int, int] = 64,
        cut: Cut = "whole",
        samples_per_image: int = 16,
        seed: int = 0,
    ) -> None:
        self.bank = bank
        self.table = table
        self.image_px = pair_px("image_px", image_px)
        if samples is None:
            samples = np.arange(len(table.images))
        self.samples = np.ascontiguousarray(samples, np.int64)
        self._patches: RandomPatches | GridPatches | None = None
        self._check(cut)
        if cut == "random":
            images = table.images[self.samples]
            self._patches = RandomPatches(bank, images, samples_per_image, self.image_px, seed)
        elif cut == "grid":
            grid = make_padded_grid(bank, self.image_px, self.image_px)
            self._patches = GridPatches(grid, table.images[self.samples])
        self.fields = self._describe()

    def __len__(self) -> int:
        return len(self.samples if self._patches is None else self._patches)

    @override
    def write_into(self, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int) -> None:
        samples = self._write_pixels(rows, indices, epoch)
        rows["image_index"][:] = self.table.images[samples]
        rows["epoch"][:] = epoch
        rows["label"][:] = self.table.label[samples]
        if self.table.poses is not None:
            view = self.table.view[samples]
            rows["view"][:] = view
            rows["object"][:] = self.table.object[samples]
            rows["pose"][:] = self.table.poses[view]

    def views_of(self, number: int) -> Array:
        """Return all views of one object, as they are stored: [V, C, h, w]."""
        samples = np.flatnonzero(self.table.object == number)
        return np.stack([self._whole(sample) for sample in samples.tolist()])

    def describe_sample(self, index: int) -> str:
        """Name one sample of this split for a message, by its file and place."""
        if self._patches is None:
            sample = int(self.samples[index])
            view = f", view {self.table.view[sample]}" if self.table.poses is not None else ""
            return show_path(self.bank.name(int(self.table.images[sample]))) + view
        places = self._patches.locate(np.array([index]), self.epoch)
        y, x = places.position[0].tolist()
        return f"{show_path(self.bank.name(int(places.image[0])))}, patch at (y {y}, x {x}) px"

    @override
    def images_of(self, indices: Ints, epoch: int) -> Ints:
        if self._patches is not None:
            return self._patches.images_of(indices, epoch)
        return self.table.images[self.samples[indices]]

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return share_state(self, _FIXED)

    def _write_pixels(self, rows: Mapping[str, Array], indices: Ints, epoch: int) -> Ints:
        """Write images and their numbers, and return which rows of the table they are."""
        if self._patches is None:
            samples = self.samples[indices]
            rows["index"][:] = samples
            for sample, row in zip(samples.tolist(), rows["image"], strict=True):
                row[...] = self._whole(sample)
            return samples
        places = self._patches.locate(indices, epoch)
        rows["index"][:] = places.index  # of the patch: each has a random stream of its own
        y, x = places.position.T
        cut_patches(self.bank, places.image, y, x, rows["image"])
        return self.samples[places.split_image]

    def _whole(self, sample: int) -> Array:
        """A view of the pixels of one row of the table: [C, h, w]."""
        image = self.bank[int(self.table.images[sample])]
        height, width = self.image_px
        row, column = 0, 0
        if self.table.tiles > 1:  # views lie row by row on a sheet
            row, column = divmod(int(self.table.view[sample]), self.table.tiles)
        return image[:, row * height : (row + 1) * height, column * width : (column + 1) * width]

    def _describe(self) -> dict[str, FieldSpec]:
        fields = {"image": FieldSpec((self.bank.channels, *self.image_px), self.bank.dtype.name)}
        names = ["label", "index", "image_index", "epoch"]
        if self.table.poses is not None:
            names += ["view", "object"]
            fields["pose"] = FieldSpec((2,), "float32")
        return fields | {name: FieldSpec((), "int64") for name in names}

    def _check(self, cut: Cut) -> None:
        check_choice("cut", cut, get_args(Cut))
        if cut == "whole":
            self._check_sizes()
        elif self.table.poses is not None:
            raise ConfigError(
                "patches of images with views would have no pose: leave the views or the patches "
                "out"
            )

    def _check_sizes(self) -> None:
        """Refuse images that are no sample, or no sheet of them."""
        sizes_px = np.stack((self.bank.heights_px, self.bank.widths_px), axis=1)
        expected_px = np.array(self.image_px) * self.table.tiles
        problems = []
        for number in np.flatnonzero((sizes_px != expected_px).any(1)).tolist():
            height, width = sizes_px[number]
            problems.append((self.bank.name(number), f"{height} x {width} px"))
        if problems:
            raise list_problems(problems).make_error(
                f"{len(problems)} images are not of {list(self.image_px)} px for each view"
            )
