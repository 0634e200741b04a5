"""Claims about memory: the index, one sample, and the decoded images of several workers."""

import multiprocessing
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from operator import getitem
from typing import cast

import psutil

from lit_data.commands.benchmarks.pair import Pair
from lit_data.commands.benchmarks.reader_process import serve_reads
from lit_data.datamodules import StripeDataModule
from lit_data.datasets.stripe_baselines import ImprovedStripes, OriginalStripes, StripePatch
from lit_data.grid import PatchGrid
from lit_data.io.bank import ImageBank

_ANSWER_S = 300.0


def measure_index(datamodule: StripeDataModule) -> Pair:
    """Bytes of a list with a tuple for each patch, file names shared, and of the grid of the same images."""
    dataset = datamodule.dataset("train")
    patches = cast(OriginalStripes, datamodule.baseline_datasets("train")["original"]).patches
    grid = dataset.grid
    heights, widths = grid.heights_px[dataset.images], grid.widths_px[dataset.images]
    stride = grid.vertical.stride_px, grid.horizontal.stride_px
    usual = trace_bytes(lambda: [_copy(patch) for patch in patches])[0]
    ours = trace_bytes(lambda: PatchGrid(heights, widths, grid.patch_px, stride, grid.edges))[0]
    return Pair("bytes", usual, ours)


def measure_sample(datamodule: StripeDataModule) -> Pair:
    """Most bytes that one sample allocates: whole image first, or its patch first from an image that is decoded."""
    baselines = datamodule.baseline_datasets("train")
    improved = cast(ImprovedStripes, baselines["improved"])
    improved[0]
    usual, ours = (trace_bytes(partial(getitem, data, 0))[1] for data in (baselines["original"], improved))
    return Pair("bytes", usual, ours)


def measure_shared(datamodule: StripeDataModule, *, workers: int) -> Pair:
    """Bytes that workers add when each has read all images: each into a cache of its own, or from the store."""
    cached = replace(datamodule.source, cache="lru", cache_bytes=2**62).open_images()
    banks: Sequence[ImageBank] = (cached, datamodule.bank)
    return Pair("bytes", *(_read_in_workers(bank, workers) for bank in banks))


def trace_bytes(make: Callable[[], object]) -> tuple[int, int]:
    """Bytes that what is made holds, and the most that were allocated meanwhile; memory maps are not counted."""
    tracemalloc.start()
    try:
        kept = make()
        held, most = tracemalloc.get_traced_memory()
        del kept
        return held, most
    finally:
        tracemalloc.stop()


def _copy(patch: StripePatch) -> StripePatch:
    """With numbers of its own; Python shares those up to 256."""
    return StripePatch(patch.files, patch.mask_path, *(int(str(number)) for number in patch[2:]))


def _read_in_workers(bank: ImageBank, workers: int) -> int:
    """Memory of fresh processes after each has read all images, less that before."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes: list[Connection] = []
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=serve_reads, args=(there, bank), daemon=True)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(here.send, None)
            pipes.append(here)
        before = _ask(pipes, "open")
        after = _ask(pipes, "read")
    return after - before


def _ask(pipes: Sequence[Connection], word: str) -> int:
    """Let all processes do something, then sum up their memory."""
    for pipe in pipes:
        pipe.send(word)
    pids = [pipe.recv() for pipe in pipes if pipe.poll(_ANSWER_S)]
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
