"""Pixels: strict readers for image files, and banks of decoded images that every worker shares.

Importing this imports no image library; each reader imports its own when it is first used.
"""

from lit_data.io.bank import ImageBank
from lit_data.io.checking import find_faults
from lit_data.io.decoders import DecodedSource, Decoder, ImageDecoder, ImageSource, MaskDecoder
from lit_data.io.discovery import find_images, match_by_stem, resolve_listed
from lit_data.io.files import DecodedFiles
from lit_data.io.masks import MaskOptions, read_mask
from lit_data.io.npz import read_npz
from lit_data.io.options import ReadOptions
from lit_data.io.readers import read_image
from lit_data.io.store import DecodedStore

__all__ = [
    "DecodedFiles",
    "DecodedSource",
    "DecodedStore",
    "Decoder",
    "ImageBank",
    "ImageDecoder",
    "ImageSource",
    "MaskDecoder",
    "MaskOptions",
    "ReadOptions",
    "find_faults",
    "find_images",
    "match_by_stem",
    "read_image",
    "read_mask",
    "read_npz",
    "resolve_listed",
]
