"""Writers of arrays as image files that read back to the same values."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lit_data.core.files import explaining, replacing
from lit_data.core.types import Array, Size
from lit_inspect.files import encode_png


def write_image(path: Path, pixels: Array) -> str:
    """Write one image losslessly: PNG for uint8 and uint16 of one or three channels, else TIFF.

    Args:
        path: Path without a suffix.
        pixels: [C, H, W].

    Returns:
        The name of the file, with its suffix.
    """
    last = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    if pixels.dtype in (np.uint8, np.uint16) and len(pixels) in (1, 3):
        target = path.with_name(path.name + ".png")
        write_png(target, last)
        return target.name
    return _write_tiff(path.with_name(path.name + ".tif"), last)


def _write_tiff(path: Path, pixels: Array) -> str:
    import tifffile

    photometric = "rgb" if pixels.shape[-1] == 3 else "minisblack"
    squeezed = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    tifffile.imwrite(
        path,
        squeezed,
        photometric=photometric,
        compression="zlib",
        metadata=None,
        software="lit_data",
    )
    return path.name


def write_png(path: Path, pixels: Array) -> None:
    """Write a PNG, optimized for speed rather than size.

    The pixels are [H, W], [H, W, 1] or [H, W, 3] (R, G, B), uint8 or uint16.

    Raises:
        StoreError: The file cannot be written.
    """
    write_png_parts(path, (pixels.shape[0], pixels.shape[1]), [pixels])


def write_png_parts(path: Path, shape: Size, parts: Iterable[Array]) -> None:
    """Write a PNG part by part; a failed write leaves no file.

    Args:
        path: Path of the file; its folder is created.
        shape: (height, width) px.
        parts: Rows from the top, [h, W], [h, W, 1] or [h, W, 3] (R, G, B), uint8 or uint16.

    Raises:
        StoreError: The file cannot be written.
    """
    with explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, sync=False) as file:
            encode_png(file, shape, parts)
