"""`StepRecord`: the samples of each training batch, their digests, and the loss, in a few bytes a step."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lit_data.callbacks.events import choose_folder
from lit_data.callbacks.sample_digest import SampleDigest
from lit_data.errors import StoreError
from lit_data.files import replacing, write_json
from lit_data.lightning_internals import count_batches
from lit_data.loading import MicroBatchLoader
from lit_data.types import PathText

log = logging.getLogger(__name__)

ORDER_FILE = "steps.json"
STEP_FILE = "steps.bin"
DIGEST_FILE = "digests.bin"
STEP = np.dtype(
    [
        ("epoch", "<u4"),
        ("position", "<u8"),
        ("samples", "<u4"),
        ("ranks", "<u2"),
        ("loss", "<f4"),
    ]
)
"""Row of ``steps.bin``, whose number is that of the batch: position and samples are those of all
ranks in the epoch's order; no samples stand for a batch that was not recorded, NaN for no loss."""
DIGEST = np.dtype([("step", "<u4"), ("digest", "<u8")])
"""Row of ``digests.bin``: the batch of a sample, and the first 8 bytes of its SHA-256."""

_DIGEST_SHIFT = 192  # of 256 bits
WAITING = 50  # steps between two writes, as a loss on a device has to be waited for


class StepRecord(Callback):
    """Writes down the samples of each training batch, so that it can be made again.

    Two files grow in the folder: ``steps.bin`` by 22 bytes a batch, and ``digests.bin`` by 12
    bytes a sample, as long as a `SampleDigest` beside this callback hashes them. ``steps.json``
    has the properties of the order, and who drew the defects. The commands ``replay``, ``why`` and ``spike`` read them.
    Losses are read from the device every 50 batches, and before a checkpoint is saved, so a run
    that is killed and goes on from one has all rows. Only the first rank writes: digests and losses
    are its own.

    With another loader than `MicroBatchLoader` nothing is written. A disk that is full ends the
    record and not the run.

    Args:
        path: Folder; by default ``trainer.log_dir``, without loggers ``trainer.default_root_dir``.
            Never the working folder: nothing is written there.
    """

    def __init__(self, path: PathText | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._folder: Path | None = None
        self._digest: SampleDigest | None = None
        self._row = np.zeros((), STEP)  # of the batch under way
        self._rows: list[NDArray[np.void]] = []
        self._losses: list[Tensor] = []
        self._digests: list[tuple[int, int]] = []
        self._first = 0  # batches before those rows

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = choose_folder(trainer, self.path)
        loader = trainer.train_dataloader
        if folder is None or not trainer.is_global_zero:
            return
        if not isinstance(loader, MicroBatchLoader):
            log.info("no %s: the batches are of a %s", STEP_FILE, type(loader).__name__)
            return
        self._first = count_batches(trainer)
        self._folder = folder
        try:
            self._begin(loader, trainer)
        except (OSError, StoreError) as error:
            self._give_up(error)
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by its callback connector
            if isinstance(callback, SampleDigest):
                self._digest = callback
                callback.listener = self._note_digests

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._folder is None:
            return
        self._row = np.zeros((), STEP)
        loader = trainer.train_dataloader
        located = loader.locate(batch_idx) if isinstance(loader, MicroBatchLoader) else None
        if located is not None:
            self._row["epoch"], self._row["position"], self._row["samples"] = located
            self._row["ranks"] = trainer.world_size

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._folder is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        value = torch.tensor(math.nan)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # A copy, as a module may change the tensor in place; nothing waits for the device.
            value = loss.detach().to(torch.float32, copy=True).reshape(())
        self._rows.append(self._row)
        self._losses.append(value)
        if len(self._rows) >= WAITING:
            self._write()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        try:
            self._write()
        except RuntimeError as error:  # the device may be broken
            log.debug("the last rows of %s are lost", STEP_FILE, exc_info=error)

    @override
    def state_dict(self) -> dict[str, Any]:
        self._write()  # a run that goes on from the checkpoint counts on from these rows
        return {}

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._digest is not None:
            self._digest.listener = None
        self._folder = self._digest = None

    def _begin(self, loader: MicroBatchLoader, trainer: Trainer) -> None:
        """Write what decides the samples beside the configuration, and cut off what a killed run wrote further on."""
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        order = loader.order
        datamodule = getattr(trainer, "datamodule", None)
        describe = getattr(datamodule, "describe_loaders", None)
        choices: Mapping[str, Any] = describe() if describe else {}
        facts = {
            "length": order.length,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "window_bytes": order.window_bytes,
            "device": trainer.strategy.root_device.type,
            "backend": choices.get("defects", {}).get("backend"),  # which `auto` has measured
        }
        write_json(self._folder / ORDER_FILE, facts)
        steps_path, digests_path = self._folder / STEP_FILE, self._folder / DIGEST_FILE
        digests = _read_rows(digests_path, DIGEST)
        earlier = digests[digests["step"] < self._first]
        steps = _read_rows(steps_path, STEP)[: self._first]
        # A run that goes on in another folder has no rows of the batches before.
        missing = np.zeros(self._first - len(steps), STEP)
        with replacing(steps_path) as file:
            file.write(steps.tobytes() + missing.tobytes())
        with replacing(digests_path) as file:
            file.write(earlier.tobytes())

    def _note_digests(self, step: int, digests: Sequence[int]) -> None:
        self._digests += [(step, digest) for digest in shorten_digests(digests)]

    def _write(self) -> None:
        if self._folder is None:
            return
        if self._digest is not None:
            self._digest.read()  # those that are on their way from the device
        rows, losses, digests = self._rows, self._losses, self._digests
        self._rows, self._losses, self._digests = [], [], []
        try:
            if rows:
                table = np.stack(rows)
                table["loss"] = torch.stack([loss.to(losses[-1].device) for loss in losses]).cpu()
                _append(self._folder / STEP_FILE, table)
            if digests:
                _append(self._folder / DIGEST_FILE, np.array(digests, DIGEST))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log.warning("%s ends here: %s", STEP_FILE, error)
        self._folder = None


def _append(path: Path, rows: NDArray[np.void]) -> None:
    with path.open("ab") as file:
        file.write(rows.tobytes())


def shorten_digests(digests: Sequence[int]) -> list[int]:
    """Return of each SHA-256 its first 8 bytes."""
    return [digest >> _DIGEST_SHIFT for digest in digests]


def parse_rows(content: bytes, kind: np.dtype[np.void]) -> NDArray[np.void]:
    """Return the whole rows of a file: the last one may be cut short in a killed run."""
    return np.frombuffer(content[: len(content) - len(content) % kind.itemsize], kind)


def _read_rows(path: Path, kind: np.dtype[np.void]) -> NDArray[np.void]:
    return parse_rows(path.read_bytes() if path.exists() else b"", kind)
