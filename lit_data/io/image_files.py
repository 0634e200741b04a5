"""Write arrays as image files that read back to the same values."""

from pathlib import Path

import numpy as np

from lit_data.types import Array


def write_image(path: Path, pixels: Array) -> str:
    """Write one image without loss: PNG for uint8 and uint16 of one or three channels, else TIFF.

    Args:
        path: Without a suffix.
        pixels: [C, H, W].

    Returns:
        The name of the file, with its suffix.
    """
    last = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    if pixels.dtype in (np.uint8, np.uint16) and len(pixels) in (1, 3):
        return write_png(path.with_name(path.name + ".png"), last)
    return _write_tiff(path.with_name(path.name + ".tif"), last)


def write_png(path: Path, pixels: Array) -> str:
    """Write a PNG, quickly rather than small.

    Args:
        path: With its suffix.
        pixels: [H, W, 1] or [H, W, 3] (R, G, B), uint8 or uint16.

    Returns:
        The name of the file.
    """
    import cv2

    # OpenCV wants B, G, R. Encoded in memory, because imwrite turns a full disk into a return value without a reason.
    path.write_bytes(cv2.imencode(".png", pixels[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])[1].tobytes())
    return path.name


def _write_tiff(path: Path, pixels: Array) -> str:
    import tifffile

    photometric = "rgb" if pixels.shape[-1] == 3 else "minisblack"
    squeezed = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    tifffile.imwrite(path, squeezed, photometric=photometric, compression="zlib", metadata=None, software="lit_data")
    return path.name
