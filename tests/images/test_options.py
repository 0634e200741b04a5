"""Options of reading that are out of range."""

import math
from typing import Any

import pytest

from lit_data.core.addresses import RemoteOptions
from lit_data.images.masks import MaskOptions
from lit_data.images.read_options import ReadOptions
from lit_data.images.scaling import FittedDecoder
from lit_data.images.store.pixels import StoreOptions
from tests.helpers.options import assert_refused

WRONG: list[tuple[type, dict[str, Any]]] = [
    (ReadOptions, {"alpha": "keep"}),
    (ReadOptions, {"exif": True}),
    (ReadOptions, {"palette": "rgb"}),
    (ReadOptions, {"equal_channels": ""}),
    (ReadOptions, {"gray_to_rgb": "false"}),
    (ReadOptions, {"cv2_order": 1}),
    (ReadOptions, {"invert": "yes"}),
    (ReadOptions, {"max_pixels": 0}),
    (ReadOptions, {"max_image_bytes": 1e9}),
    (ReadOptions, {"page": -1}),
    (ReadOptions, {"page": True}),
    (ReadOptions, {"nan_fill": math.nan}),
    (ReadOptions, {"gray_to_rgb": True, "equal_channels": "collapse"}),
    (MaskOptions, {"classes": 1}),
    (MaskOptions, {"classes": 257}),
    (MaskOptions, {"classes": "2"}),
    (MaskOptions, {"scale": "0-255"}),
    (MaskOptions, {"classes": 3, "scale": "0_255"}),
    (MaskOptions, {"page": -1}),
    (MaskOptions, {"palette": "error"}),
    (MaskOptions, {"alpha": "keep"}),
    (FittedDecoder, {"size_px": [0, 5]}),
    (FittedDecoder, {"size_px": (8, 8), "tiles": 0}),
    (FittedDecoder, {"size_px": (8, 8), "fit": "crop"}),
    (FittedDecoder, {"size_px": (8, 8), "padding": "mirror"}),
    (RemoteOptions, {"connections": 0}),
    (RemoteOptions, {"connections": 257}),
    (RemoteOptions, {"connections": True}),
    (RemoteOptions, {"retries": -1}),
    (RemoteOptions, {"backoff_s": 0}),
    (RemoteOptions, {"timeout_s": math.inf}),
    (RemoteOptions, {"max_bytes": 0}),
    (RemoteOptions, {"checksums": "yes"}),
    (RemoteOptions, {"anon": 1}),
    (RemoteOptions, {"offline": "maybe"}),
    (RemoteOptions, {"endpoint_url": "host:9000"}),
    (StoreOptions, {"band_px": 0}),
    (StoreOptions, {"band_px": 48}),
    (StoreOptions, {"band_px": 512}),
    (StoreOptions, {"band_px": True}),
]


@pytest.mark.parametrize(("make", "options"), WRONG, ids=str)
def test_an_option_out_of_range_is_refused(make: type, options: dict[str, Any]) -> None:
    assert_refused(make, options)
