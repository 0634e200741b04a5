"""Claims about a cache of decoded images: reads and time of an epoch."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np

from lit_data.commands.benchmarks.pair import Pair
from lit_data.datamodules import StripeDataModule
from lit_data.datasets import StripeDataset
from lit_data.io.files import DecodedFiles

_MOST_PATCHES: Final = 2000
_SHARE: Final = 0.25


def measure_reading(datamodule: StripeDataModule, repeats: int, *, shuffled: bool) -> dict[str, Pair]:
    """Images decoded and time for the first patches of an epoch, without a cache and with one of a quarter of all.

    Args:
        datamodule: An opened set.
        repeats: How often, in turn; the time is the median.
        shuffled: Patches in the order of training; otherwise image by image.
    """
    dataset = datamodule.dataset("train")
    images = _list_images(datamodule, dataset, shuffled=shuffled)
    pixels = dataset.bank.channels * int((dataset.bank.heights_px * dataset.bank.widths_px).sum())
    sizes = (0, int(_SHARE * pixels * dataset.bank.dtype.itemsize))
    reads: list[int] = []
    times_s: list[list[float]] = [[], []]
    for _ in range(repeats):
        reads = []
        for number, cache_bytes in enumerate(sizes):
            bank = replace(datamodule.source, cache="lru", cache_bytes=cache_bytes).open_images()
            assert isinstance(bank, DecodedFiles)
            began_s = time.perf_counter()
            for image in images:
                bank[image]
            times_s[number].append(time.perf_counter() - began_s)
            reads.append(bank.cache.misses)
    usual, ours = (1e6 * median(times) / len(images) for times in times_s)
    return {"cache_reads": Pair("images decoded", *reads), "cache_time": Pair("us a patch", usual, ours)}


def _list_images(datamodule: StripeDataModule, dataset: StripeDataset, *, shuffled: bool) -> Sequence[int]:
    """The image of each patch, in the order that they are read in."""
    positions = np.arange(min(len(dataset), _MOST_PATCHES))
    numbers = datamodule.make_loader("train").order.at(positions, 0) if shuffled else positions
    images: list[int] = [int(sample["image_index"]) for sample in dataset.__getitems__(numbers.tolist())]
    return images
