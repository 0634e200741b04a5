"""Decoded pixels on the device: batches are transferred as numbers, and patches are cut on the device."""

import warnings
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.filesize import decimal
from torch import Tensor

from lit_data.core.devices import constant
from lit_data.core.errors import ConfigError
from lit_data.core.progress import track
from lit_data.core.types import Batch, Size
from lit_data.datasets.patches import PatchDataset
from lit_data.images.bank import ImageBank
from lit_data.images.store.store import DecodedStore

CHUNK_BYTES = 2**26
_KEPT_SHARE = 0.25
"""Fraction of the free memory that remains for the model, its gradients and the batches."""


class DeviceBank:
    """Images of a store on one device, as one flat tensor.

    On the host, the pixel file is mapped, so that it takes no additional memory there.

    Args:
        store: Decoded images.
        device: Device that they are copied to.

    Raises:
        ConfigError: The images do not fit on the device.
        StoreError: The pixel file is missing.
    """

    def __init__(self, store: DecodedStore, device: torch.device) -> None:
        self._dtype: torch.dtype = getattr(torch, store.dtype.name)
        areas_px = store.heights_px * store.widths_px
        firsts = (np.cumsum(areas_px) - areas_px) * store.channels
        # A validation may come first, and tensors from inference mode cannot be used in training.
        with torch.inference_mode(mode=False):
            pixels = _map_pixels(store)
            self._pixels = pixels if device.type == "cpu" else upload(pixels, device)
            self._images = torch.from_numpy(
                np.stack([firsts, store.heights_px, store.widths_px])
            ).to(device)
            self._channels = torch.arange(store.channels, device=device)

    def cut(self, images: Tensor, positions: Tensor, patch_px: Size) -> Tensor:
        """Cut patches; beyond its edges, an image is mirrored without its edge row.

        Args:
            images: [B] int64, numbers of images, on the device.
            positions: [B, 2] int64, (y, x) of each patch, on the device.
            patch_px: (h, w) of all patches.

        Returns:
            [B, C, h, w], dtype of the store.
        """
        firsts, heights_px, widths_px = self._images[:, images, None]
        rows = _mirror(positions[:, :1], patch_px[0], heights_px)
        columns = _mirror(positions[:, 1:], patch_px[1], widths_px)
        planes = firsts + self._channels * heights_px * widths_px
        lines = planes[:, :, None] + (rows * widths_px)[:, None]
        return self._pixels[lines[..., None] + columns[:, None, None]].view(self._dtype)


class DevicePatches:
    """Source of pixels for batches of `PatchDataset(..., pixels=False)`, on the device of the batch.

    A store is copied to a device for the first batch that needs it there, and stays. A pickled
    copy starts without any.
    """

    def __init__(self) -> None:
        self._banks: dict[tuple[Path, torch.device], DeviceBank] = {}

    def __reduce__(self) -> tuple[type["DevicePatches"], tuple[()]]:
        return type(self), ()

    def fill(self, batch: Batch, dataset: PatchDataset) -> Batch:
        """Add ``image``, and ``mask`` if the dataset has masks, equal to those with ``pixels=True``.

        Args:
            batch: A batch of the dataset.
            dataset: Dataset that reads from stores.

        Raises:
            ConfigError: The pixels do not fit on the device, or are not in a store.
        """
        positions = batch["position"] - constant(
            dataset.margin_px, batch["position"].device, torch.int64
        )
        patch_px = dataset.read_px
        images = self._find(dataset.bank, positions.device)
        filled = batch | {"image": images.cut(batch["image_index"], positions, patch_px)}
        if dataset.masks is not None:
            masks = self._find(dataset.masks, positions.device)
            filled["mask"] = masks.cut(batch["mask_index"], positions, patch_px)
        return filled

    def _find(self, bank: ImageBank, device: torch.device) -> DeviceBank:
        if not isinstance(bank, DecodedStore):
            raise ConfigError(
                f"only a decoded store can go to the device, this is {type(bank).__name__}"
            )
        key = (bank.path, device)
        if key not in self._banks:
            self._banks[key] = DeviceBank(bank, device)
        return self._banks[key]


def find_free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes; devices other than CUDA share that of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def upload(pixels: Tensor, device: torch.device) -> Tensor:
    """Copy pixels to a device in pieces, so that the host never has a second copy.

    Args:
        pixels: [N] values.
        device: Device to copy to.

    Raises:
        ConfigError: The pixels do not fit if a quarter of the free memory remains for training.
    """
    needed_bytes, free_bytes = pixels.nbytes, find_free_bytes(device)
    if needed_bytes > free_bytes * (1 - _KEPT_SHARE):
        raise ConfigError(
            f"data.cache=device needs {decimal(needed_bytes)} for the decoded pixels on "
            f"{device}, but {decimal(free_bytes)} is free, a quarter of it reserved for "
            "training: set data.cache=store"
        )
    copy = torch.empty_like(pixels, device=device)
    step = CHUNK_BYTES // pixels.itemsize
    starts = range(0, len(pixels), step)
    for start in track(starts, "pixels to the device", len(starts)):
        copy[start : start + step].copy_(pixels[start : start + step])
    return copy


def _map_pixels(store: DecodedStore) -> Tensor:
    """Return all pixels of a store: [N], a view of its file that must not be written to."""
    # CUDA has few kernels for uint16; the bits are moved as int16.
    pixels = store.pixels.view(np.int16) if store.dtype.name == "uint16" else store.pixels
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(pixels)


def _mirror(starts: Tensor, length_px: int, limits_px: Tensor) -> Tensor:
    index, last = starts + torch.arange(length_px, device=starts.device), limits_px - 1
    return (last - (last - index.abs()).abs()).clamp(min=0)
