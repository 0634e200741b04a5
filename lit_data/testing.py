"""For tests of your own datasets, datamodules and modules; lit_data's tests use it too.

`check_dataset` and `check_datamodule` hold what the loader and the commands rely on; `write_images`
makes a set of a few files; `LimitedMemory` lets any module run out of memory; `run_on_ranks` calls
a function on several ranks.
"""

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from torch import multiprocessing
from typing_extensions import override

from lit_data.callbacks.loader_facts import count_batch
from lit_data.callbacks.wrapping import wrap
from lit_data.core.batch_form import HINT, batch_tensors, count_samples
from lit_data.core.errors import ConfigError
from lit_data.core.types import RowWriter, Size, Stage, read_rows
from lit_data.datamodules.base import BaseDataModule
from lit_data.images.writing import write_image
from lit_data.loading import LoaderOptions, MicroBatchLoader

QUIET: Mapping[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Options of a Trainer that prints and writes nothing."""


def check_dataset(dataset: RowWriter, *, epochs: Sequence[int] = (0, 1), samples: int = 8) -> None:
    """Check what the loader relies on in a dataset that writes rows (`lit_data.core.types.RowWriter`).

    Each sample is the same to the byte whatever is written beside it, however often it is asked
    for, in this process and in a copy that a worker gets; every key of `fields` is written, and
    nothing beside the rows of the batch.

    Args:
        dataset: Of at least one sample.
        epochs: Epochs that are looked at.
        samples: How many samples are, spread over the dataset.

    Raises:
        AssertionError: Something does not hold; the message says what, with the sample.
    """
    assert len(dataset) > 0, "the dataset holds no samples"
    numbers = np.unique(np.linspace(0, len(dataset) - 1, samples).astype(np.int64))
    copied: RowWriter = pickle.loads(pickle.dumps(dataset))
    for epoch in epochs:
        together = read_rows(dataset, numbers, epoch)
        for row, number in enumerate(numbers.tolist()):
            what = f"sample {number} of epoch {epoch}"
            alone = read_rows(dataset, np.array([number]), epoch)
            other = read_rows(copied, np.array([number]), epoch)
            for key in together:
                expected = together[key][row]
                assert np.array_equal(expected, alone[key][0], equal_nan=_is_float(expected)), (
                    f"{what}: {key} differs between a batch and the sample alone; only (index, "
                    "epoch) may decide"
                )
                assert np.array_equal(expected, other[key][0], equal_nan=_is_float(expected)), (
                    f"{what}: {key} differs in a copy, as workers get one"
                )


def check_datamodule(
    datamodule: BaseDataModule, stages: Sequence[Stage] = ("train", "val", "test", "predict")
) -> None:
    """Check a datamodule: its sources, the dataset of each stage, and its batches.

    A batch is planned and finished twice.

    Raises:
        AssertionError: A batch lacks keys, or is another one the second time.
    """
    datamodule.prepare_data()
    datamodule.setup("fit")
    for stage in stages:
        dataset = datamodule.dataset(stage)
        if not len(dataset):
            continue
        check_dataset(dataset)
        first, second = (_finish(datamodule, stage) for _ in range(2))
        missing = sorted(set(first) - set(datamodule.batch_keys)) if datamodule.batch_keys else []
        assert not missing, f"{stage}: finish_batch gives {missing}, which batch_keys does not name"
        assert count_samples(first), (
            f"{stage}: the parts of a finished batch have different lengths"
        )
        for one, other in zip(batch_tensors(first), batch_tensors(second), strict=True):
            same = torch.allclose(one.double(), other.double(), equal_nan=True)
            assert same, f"{stage}: the same batch comes out differently a second time"


def write_images(
    folder: Path,
    count: int,
    size_px: Size = (64, 64),
    *,
    channels: int = 3,
    dtype: str = "uint8",
) -> list[Path]:
    """Write a few images of noise, ``00.png``, ``01.png``, ...; TIFF where PNG has no such pixels.

    Returns:
        Their paths.
    """
    rng, paths = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        unit = rng.random((channels, *size_px), np.float32)
        pixels = unit if dtype == "float32" else (unit * np.iinfo(dtype).max).astype(dtype)
        paths.append(folder / write_image(folder / f"{number:02d}", pixels))
    return paths


class LimitedMemory(Callback):
    """Lets steps run out of memory that get more than so many samples at once, on any device.

    Args:
        most: Samples that fit.

    Attributes:
        sizes: Samples of each step that went through.
        errors: How often memory ran out.
    """

    def __init__(self, most: int) -> None:
        self.most, self.sizes, self.errors = most, list[int](), 0
        self._undo: list[Callable[[], None]] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            self._undo.append(wrap(pl_module, name, partial(self._limit, trainer)))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        while self._undo:
            self._undo.pop()()

    def _limit(self, trainer: Trainer, step: Callable[..., Any], batch: Any, *args: Any) -> Any:  # noqa: ANN401 - any step
        samples = count_batch(trainer, batch)
        if not samples:
            raise ConfigError(
                f"LimitedMemory cannot tell how many samples a {type(batch).__name__} holds: {HINT}, "
                "and count_samples(batch)"
            )
        if samples > self.most:
            self.errors += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {samples} samples, {self.most} fit (injected)"
            )
        self.sizes.append(samples)
        return step(batch, *args)


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:  # noqa: ANN401
    """Call ``function(rank, *args)`` in a process for each rank, connected by gloo on the CPU.

    Args:
        function: At module level, as processes import it.
        world_size: How many ranks.
        args: Plain values that can be pickled.

    Returns:
        What each rank returned, by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _run_rank, (function, world_size, folder, args), nprocs=world_size, start_method="spawn"
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _run_rank(
    rank: int, function: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1"}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(rank, *args)))
    finally:
        dist.destroy_process_group()


def _finish(datamodule: BaseDataModule, stage: Stage) -> dict[str, Any]:
    options = LoaderOptions(batch_size=4, worker_kind="inline", seed=datamodule.loader.seed)
    loader = MicroBatchLoader(datamodule.dataset(stage), options)
    batch = loader.read(np.arange(min(4, len(datamodule.dataset(stage)))), 0)
    return dict(datamodule.transform(batch, stage))


def _is_float(values: np.ndarray[Any, Any]) -> bool:
    return bool(values.dtype.kind == "f")
