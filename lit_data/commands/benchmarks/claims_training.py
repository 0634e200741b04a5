"""Claims about training: a usual DataLoader against ours, the same module and Trainer."""

from statistics import median
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_data.callbacks.memory.host_memory import read_tree
from lit_data.commands.benchmarks.headroom import time_training
from lit_data.commands.benchmarks.options import BenchmarkOptions
from lit_data.commands.benchmarks.pair import Pair
from lit_data.datamodules import StripeDataModule
from lit_data.loading.machine import count_cores


class _TreeMemory(L.Callback):
    """Memory of this process and its workers at the end of training, shared pages counted once."""

    def __init__(self) -> None:
        self.tree_bytes = 0

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        memory = read_tree()
        self.tree_bytes = memory.pss_bytes if memory else 0


def measure_training(cfg: DictConfig, options: BenchmarkOptions, datamodule: StripeDataModule) -> dict[str, Pair]:
    """Time of a sample, and memory at the end, in turn.

    The usual way decodes whole images in the workers of torch's DataLoader, as many as there are cores, and leaves
    augmentation out, which gives it an advantage.
    """
    sources: list[dict[str, Any]] = [
        {"train_dataloaders": _open_usual(datamodule), "val_dataloaders": []},
        {"datamodule": datamodule},
    ]
    times_us: list[list[float]] = [[], []]
    tree_bytes: list[list[int]] = [[], []]
    for _ in range(options.repeats):
        for number, source in enumerate(sources):
            memory = _TreeMemory()
            times_us[number].append(1e6 / time_training(cfg, options, memory, **source))
            tree_bytes[number].append(memory.tree_bytes)
    return {
        "training_time": Pair("us a sample", *(median(times) for times in times_us)),
        "training_memory": Pair("bytes", *(median(sizes) for sizes in tree_bytes)),
    }


def _open_usual(datamodule: StripeDataModule) -> DataLoader[Any]:
    original = datamodule.baseline_datasets("train")["original"]
    return DataLoader(
        original,
        batch_size=datamodule.loader.count_batch(1),
        shuffle=True,
        num_workers=count_cores(),
        pin_memory=torch.cuda.is_available(),
    )
