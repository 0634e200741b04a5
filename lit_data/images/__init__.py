"""Pixels: strict readers for image files, and banks of decoded images that every worker shares.

Importing this imports no image library; each reader imports its own when it is first used.
"""

from lit_data.images.bank import DecodedFiles, ImageBank
from lit_data.images.decoders import DecodedSource, Decoder, ImageDecoder, ImageSource, MaskDecoder
from lit_data.images.discovery import find_images, match_by_stem
from lit_data.images.header_scan import find_faults
from lit_data.images.masks import MaskOptions, read_mask
from lit_data.images.read_options import ReadOptions
from lit_data.images.readers import read_image
from lit_data.images.store.pixels import StoreOptions
from lit_data.images.store.store import DecodedStore

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
    "StoreOptions",
    "find_faults",
    "find_images",
    "match_by_stem",
    "read_image",
    "read_mask",
]
