"""Scaling of images and masks on their way into a store, and of results back to the original size."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError, show_path
from lit_data.core.grid import pair_px
from lit_data.core.types import IGNORED, Array, Bools, Bytes, Ints, Size
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import (
    DecodedSource,
    Decoder,
    ImageDecoder,
    ImageSource,
    MaskDecoder,
    SourceHeader,
)
from lit_data.images.header import refuse_mask_sizes
from lit_data.images.header_scan import survey_sources
from lit_data.images.store.store import keep_found
from lit_inspect.scaling import Fit, place_centred, resize_planes, restore, scale_size

_FORMAT = 1  # increases when the same files and options give other pixels

log = logging.getLogger(__name__)

LARGEST_FACTOR = 16
_STRIP = 4.0
"""Ratio of the scale factors of both sides from which small defects may be lost."""

FitPadding = Literal["reflect", "border", "zeros"]
"""Values of the padding: the mirrored image, its outermost pixels, or 0."""

_PAD_MODES: dict[FitPadding, Literal["reflect", "edge", "constant"]] = {
    "reflect": "reflect",
    "border": "edge",
    "zeros": "constant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Size that images and masks are scaled to; exactly one of `size_px` and `factor` is set.

    Args:
        size_px: (height, width) that each image is scaled to fit, with its aspect ratio kept. The
            image is centered, and missing pixels around it are reflect-padded.
        factor: Factor of height and width of every image; below 1 shrinks.
        is_padded: False adds no padding around an image that `size_px` scales.
        fit: `stretch` scales each side to `size_px` by itself.
    """

    size_px: Size | None = None
    factor: float | None = None
    is_padded: bool = True
    fit: Fit = "contain"

    @classmethod
    def of(
        cls, size_px: int | Size | None, scale: float | None, fit: Fit = "contain"
    ) -> Self | None:
        """Return the scaling that options ask for; None if neither size nor scale is set.

        Raises:
            ConfigError: Both are set, or one is out of range.
        """
        check_choice("fit", fit, ("contain", "stretch"))
        if size_px is None and fit != "contain":
            log.info("data.fit=%s has no effect, because data.size_px is not set", fit)
        if size_px is None and scale is None:
            return None
        if scale is None:
            return cls(size_px=pair_px("size_px", size_px), fit=fit)  # type: ignore[arg-type]  # not None
        if size_px is not None:
            raise ConfigError(
                f"size_px={size_px} and scale={scale} exclude each other: size_px scales each "
                "image to one size, scale multiplies all sizes by one factor; set one of them "
                "to null"
            )
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not is_number or not 0 < scale <= LARGEST_FACTOR:
            raise ConfigError(
                f"scale={scale!r} is not usable: give a number above 0 and up to {LARGEST_FACTOR}, "
                "such as 0.5 for half of height and width"
            )
        return cls(factor=float(scale))

    def scaled_px(self, size_px: Size) -> Size:
        """Return the (height, width) of an image of `size_px` after scaling, without padding; at least 1 x 1."""
        return scale_size(size_px, self.size_px, self.fit, self.factor)

    def stored_px(self, size_px: Size) -> Size:
        """Return the (height, width) of an image of `size_px` after scaling and padding."""
        if self.size_px is None or not self.is_padded:
            return self.scaled_px(size_px)
        return self.size_px

    def scale_image(self, image: Array) -> Array:
        """Scale and pad an image: area means to shrink, bilinear to enlarge.

        Args:
            image: [C, H, W] of uint8, uint16, int16 or float32.

        Returns:
            [C, h, w] of the same dtype.
        """
        size_px = image.shape[1], image.shape[2]
        scaled = resize_planes(image, self.scaled_px(size_px))
        return place_centred(scaled, self.stored_px(size_px))

    def scale_mask(self, mask: Array) -> Array:
        """Scale and pad a mask like its image, see `scale_classes`: [1, H, W] uint8 to [1, h, w]."""
        size_px = mask.shape[1], mask.shape[2]
        scaled = scale_classes(mask[0], self.scaled_px(size_px))
        return place_centred(scaled[None], self.stored_px(size_px))

    def restore(self, values: Array, size_px: Size) -> Array:
        """Remove the padding and scale back: bilinear to enlarge, area means to shrink.

        Args:
            values: [C, h, w] of a scaled image, such as probabilities.
            size_px: (H, W) of its file.

        Returns:
            [C, H, W] of the same dtype.
        """
        return restore(values, self.scaled_px(size_px), size_px)

    def restore_mask(self, mask: Array, size_px: Size) -> Array:
        """Remove the padding and scale back to the (H, W) of the file: [1, h, w] uint8 to [1, H, W]."""
        return scale_classes(place_centred(mask, self.scaled_px(size_px))[0], size_px)[None]

    def describe_loss(self, sizes_px: Ints | Sequence[Size]) -> str:
        """Return a warning if one side of most images shrinks far more than the other, or else "".

        Args:
            sizes_px: [n, 2] (height, width) of files.
        """
        if self.size_px is None or not len(sizes_px):
            return ""
        height, width = np.median(sizes_px, axis=0).astype(int)
        to_height, to_width = self.size_px
        factors = height / to_height, width / to_width
        if max(factors) < _STRIP * min(factors):
            return ""
        return (
            f"images of {height} x {width} px become {to_height} x {to_width} px, so small defects "
            "may be lost"
        )


def scale_classes(numbers: Bytes, size_px: Size) -> Bytes:
    """Scale a mask so that no defect is lost and none is counted twice.

    To shrink, each pixel belongs to the one scaled pixel that contains its center. A scaled pixel
    gets the most frequent class of its foreground pixels (the smaller number in a tie), even if
    they are few. Without foreground pixels it is ignored (255) if one of its pixels is, or else
    background. A scaled mask therefore shows a defect exactly where its file does, and thin defects
    become up to one scaled pixel wide. To enlarge, a pixel takes the class of the nearest one.

    Args:
        numbers: [H, W] class numbers.
        size_px: (h, w) of the result.

    Returns:
        [h, w] class numbers.
    """
    if numbers.shape == size_px:
        return numbers
    # An axis that shrinks stays unchanged here, and one that grows is counted pixel by pixel below.
    enlarged = numbers[_nearest(numbers.shape[0], size_px[0])]
    enlarged = enlarged[:, _nearest(numbers.shape[1], size_px[1])]
    starts = _starts(enlarged.shape[0], size_px[0]), _starts(enlarged.shape[1], size_px[1])
    scaled: Bytes = np.zeros(size_px, np.uint8)
    most_pixels = np.zeros(size_px, np.int32)
    for number in np.unique(enlarged).tolist():  # ascending: the first one wins a tie
        counts = _count(enlarged == number, starts)
        if number == IGNORED:
            scaled[(counts > 0) & (most_pixels == 0)] = IGNORED
        elif number > 0:
            is_more = counts > most_pixels
            scaled[is_more] = number
            most_pixels[is_more] = counts[is_more]
    return scaled


def _nearest(length: int, scaled: int) -> Ints:
    """Return the pixels of an axis that an enlarged axis takes; all of them, once, if it shrinks."""
    places = np.arange(max(length, scaled))
    return (2 * places + 1) * length // (2 * len(places))


def _starts(length: int, scaled: int) -> Ints:
    """Return the first pixel whose center is in each scaled pixel, along an axis that does not grow."""
    return -((scaled - 2 * length * np.arange(scaled)) // (2 * scaled))


def _count(is_class: Bools, starts: tuple[Ints, Ints]) -> NDArray[np.int32]:
    """Count the pixels of a class in each scaled pixel: [H, W] to [h, w]."""
    by_rows = np.add.reduceat(is_class, starts[0], axis=0, dtype=np.int32)
    counts: NDArray[np.int32] = np.add.reduceat(by_rows, starts[1], axis=1)
    return counts


@dataclass(frozen=True, slots=True)
class ScaledDecoder:
    """Decoder that scales the images or masks of another decoder.

    Args:
        scaling: Size to scale to.
        decoder: Decoder of the files; with a decoder of masks, they are scaled as masks.
    """

    scaling: Scaling
    decoder: ImageDecoder | MaskDecoder

    @property
    def fingerprint(self) -> str:
        """JSON of the scaling, this decoder's format and the inner fingerprint."""
        options = {"decoder": "scaled", "format": _FORMAT, "size_px": self.scaling.size_px}
        options |= {"scale": self.scaling.factor, "is_padded": self.scaling.is_padded}
        if self.scaling.fit != "contain":  # earlier stores stay valid
            options["fit"] = self.scaling.fit
        options |= {"of": json.loads(self.decoder.fingerprint)}
        return json.dumps(options, sort_keys=True)

    def header(self, source: ImageSource) -> SourceHeader:
        """Return the shape and dtype that decoding will give.

        Raises:
            DataError: As the inner decoder, or the result would have more pixels than allowed.
        """
        header = self.decoder.header(source)
        height, width = self.scaling.stored_px((header.height_px, header.width_px))
        if isinstance(self.decoder, MaskDecoder):
            key = "mask_read"
            most_px = self.decoder.options.max_pixels
        else:
            key = "read"
            most_px = self.decoder.read.max_pixels
        if height * width > most_px:
            raise DataError(
                f"{show_path(source.paths[0])}: scaled to {height} x {width} px it has more than "
                f"{key}.max_pixels={most_px}: choose a smaller data.scale or size_px"
            )
        return header._replace(height_px=height, width_px=width)

    def __call__(self, source: ImageSource) -> DecodedSource:
        """Decode strictly, then scale.

        Raises:
            DataError: As the inner decoder.
        """
        decoded = self.decoder(source)
        is_mask = isinstance(self.decoder, MaskDecoder)
        scale = self.scaling.scale_mask if is_mask else self.scaling.scale_image
        return replace(decoded, array=scale(decoded.array))


@dataclass(frozen=True, slots=True)
class FittedDecoder:
    """Decoder that fits images, or the tiles of square sheets of images, to one size.

    Images shrink by area means and enlarge bilinearly.

    Args:
        size_px: (height, width) of the result, or of each tile of a sheet.
        fit: See `Fit`.
        padding: See `FitPadding`.
        tiles: Number of tiles along each side of a sheet; 1 for images.
        decoder: Decoder of the files.

    Raises:
        ConfigError: A size is below 1, or `fit` or `padding` is unknown.
    """

    size_px: Size
    fit: Fit = "cover"
    padding: FitPadding = "reflect"
    tiles: int = 1
    decoder: ImageDecoder = field(default_factory=ImageDecoder)

    def __post_init__(self) -> None:
        """Check the arguments."""
        if min(*self.size_px, self.tiles) < 1:
            raise ConfigError(
                f"size_px={list(self.size_px)} and tiles={self.tiles} must be at least 1"
            )
        for name, choices in (("fit", get_args(Fit)), ("padding", get_args(FitPadding))):
            check_choice(name, getattr(self, name), choices)

    @property
    def fingerprint(self) -> str:
        """JSON of the options, this decoder's format and the inner fingerprint."""
        options = {"decoder": "fitted", "format": _FORMAT, "size_px": self.size_px, "fit": self.fit}
        options |= {"padding": self.padding, "tiles": self.tiles}
        options |= {"of": json.loads(self.decoder.fingerprint)}
        return json.dumps(options, sort_keys=True)

    def header(self, source: ImageSource) -> SourceHeader:
        """Return the shape and dtype that decoding will give.

        Raises:
            DataError: As the inner decoder, or a sheet cannot be divided into tiles.
        """
        header = self.decoder.header(source)
        self._check_sheet(source, header.height_px, header.width_px)
        height, width = self.size_px
        return header._replace(height_px=height * self.tiles, width_px=width * self.tiles)

    def __call__(self, source: ImageSource) -> DecodedSource:
        """Decode strictly, then fit to the size."""
        decoded = self.decoder(source)
        _, height, width = decoded.array.shape
        self._check_sheet(source, height, width)
        # Tile by tile, so that none shows pixels of its neighbours.
        rows = []
        for sheet_row in np.split(decoded.array, self.tiles, axis=1):
            tiles = np.split(sheet_row, self.tiles, axis=2)
            rows.append(np.concatenate([self._fit(tile) for tile in tiles], axis=2))
        return replace(decoded, array=np.concatenate(rows, axis=1))

    def _check_sheet(self, source: ImageSource, height_px: int, width_px: int) -> None:
        if height_px % self.tiles or width_px % self.tiles:
            raise DataError(
                f"{show_path(source.paths[0])}: a sheet of {self.tiles} x {self.tiles} views "
                f"cannot be {height_px} x {width_px} px: its sides must be multiples of "
                f"{self.tiles}"
            )

    def _fit(self, image: Array) -> Array:
        """Fit an image to the size: [C, H, W] to [C, h, w]."""
        scaled_px = scale_size((image.shape[1], image.shape[2]), self.size_px, self.fit)
        return place_centred(
            resize_planes(image, scaled_px), self.size_px, _PAD_MODES[self.padding]
        )


@dataclass(frozen=True, slots=True)
class OriginalSizes:
    """Sizes of scaled images in their files.

    Args:
        scaling: Scaling of the images.
        sizes_px: [n, 2] (height, width) of each file.
    """

    scaling: Scaling
    sizes_px: Ints

    def of(self, number: int) -> Size:
        """Return the (height, width) of the file of an image."""
        height, width = self.sizes_px[number].tolist()
        return height, width

    def restore(self, number: int, values: Array) -> Array:
        """Scale values of a scaled image back to the size of its file: [C, h, w] to [C, H, W]."""
        return self.scaling.restore(values, self.of(number))


def read_sizes(bank: ImageBank, decoder: Decoder, folder: Path) -> Ints:
    """Read the original sizes of scaled images from the headers of their files, once for a store.

    Args:
        bank: The scaled images or masks.
        decoder: Decoder of their files, without scaling.
        folder: Folder that keeps the sizes.

    Returns:
        [n, 2] (height, width) px.

    Raises:
        DataError: A header is bad.
    """

    def read() -> dict[str, Ints]:
        sources = [ImageSource((bank.name(number),)) for number in range(len(bank))]
        survey = survey_sources(sources, decoder, on_bad="error", progress=True)
        return {"height_px": survey.heights_px, "width_px": survey.widths_px}

    sizes = keep_found(folder, bank, (), "sizes", read)
    return np.stack((sizes["height_px"], sizes["width_px"]), axis=1)


def check_mask_sizes(
    images: tuple[ImageBank, Ints],
    masks: tuple[ImageBank, Ints],
    of_image: Ints,
) -> None:
    """Refuse masks that fit their images only because both were scaled.

    Args:
        images: All images, with the [n, 2] sizes of their files.
        masks: All masks, with the [n, 2] sizes of their files.
        of_image: [n] number of the mask of each image; -1 if it has none.

    Raises:
        DataError: There are such masks; all of them are listed.
    """
    pairs = []
    for image in np.flatnonzero(of_image >= 0).tolist():
        mask = int(of_image[image])
        mask_px, image_px = tuple(masks[1][mask].tolist()), tuple(images[1][image].tolist())
        pairs.append((masks[0].name(mask), mask_px, images[0].name(image), image_px))
    refuse_mask_sizes(pairs)
