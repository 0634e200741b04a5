"""``replay``: make a training batch of a run again, from what its folder says."""

import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from lightning.fabric.utilities.apply_func import move_data_to_device
from numpy.typing import NDArray
from torch import Tensor

from lit_data.callbacks.sample_digest import hash_samples
from lit_data.callbacks.step_record import (
    DIGEST,
    DIGEST_FILE,
    ORDER_FILE,
    STEP,
    STEP_FILE,
    parse_rows,
    shorten_digests,
)
from lit_data.commands.build import build_datamodule
from lit_data.commands.configuration.compose import check_run
from lit_data.commands.configuration.names import allow_packages
from lit_data.commands.configuration.suggest import Parser
from lit_data.commands.configuration.tree import open_hydra
from lit_data.commands.remote_runs import RECORDS, fetching_runs
from lit_data.commands.reports.untrusted import as_dict, open_inside, read_text
from lit_data.commands.rerun import read_run
from lit_data.commands.terminal import quieten
from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import format_batch
from lit_data.errors import ConfigError, DataError, first_line, show_path
from lit_data.files import explaining, replacing, try_writing, write_table
from lit_data.io.plain import parse_json
from lit_data.io.remote.options import is_remote
from lit_data.tasks import find_task
from lit_data.testing import QUIET
from lit_data.types import Array, Batch, Ints

log = logging.getLogger(__name__)

_HELP = """\
usage: python -m lit_data replay RUN step=N [rank=R] [out=FOLDER] [key=value ...] [--package NAME]

Makes the batch of a training step again, with its defects and augmentation, and compares it with
the digests of the run. Steps count training batches from 0; of several ranks the first is shown.
Writes step-N.png, step-N.npz (every tensor that the model got, `before.*` without augmentation),
step-N-augment.png and step-N.csv (its synthetic defects) into RUN/replay. Other words are
overrides, such as data.root=FOLDER where the images have moved. RUN may be at an address; then
out= is needed."""
SCOPE = replace(
    RECORDS, patterns=(*RECORDS.patterns, ORDER_FILE, STEP_FILE, DIGEST_FILE, "*.csv", "*.json")
)
"""Files of a run that are read."""
_MOST_BYTES = 2**31  # 97 million steps
_MOST_DIGITS = 15
_SHOWN = 16
_CURE = "give out=FOLDER"


@dataclass(frozen=True)
class Record:
    """Steps that a run has written down; see `lit_data.callbacks.StepRecord`.

    Attributes:
        order: Properties of the order of samples, the device, and who drew defects.
        steps: Rows of `STEP`.
        digests: Rows of `DIGEST`.
    """

    order: Mapping[str, Any]
    steps: NDArray[np.void]
    digests: NDArray[np.void]

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read the files of a run folder, which may be anybody's.

        Raises:
            DataError: They are missing or damaged.
        """
        try:
            order = as_dict(parse_json(read_text(folder, folder / ORDER_FILE)))
            steps = _read_rows(folder, STEP_FILE, STEP)
            digests = _read_rows(folder, DIGEST_FILE, DIGEST)
        except FileNotFoundError as error:
            raise DataError(
                f"{show_path(folder)} has no {Path(error.filename).name}: it is no folder of a fit with "
                "callbacks.steps, or its training has not begun"
            ) from error
        except (OSError, ValueError, DataError) as error:
            raise DataError(
                f"{show_path(folder)} does not say which samples it trained: {first_line(error)}"
            ) from error
        return cls(order, steps, digests)

    def digests_of(self, step: int) -> NDArray[np.uint64]:
        """Return the digests of the samples of a step; empty where they were not hashed."""
        digests: NDArray[np.uint64] = self.digests["digest"][self.digests["step"] == step]
        return digests

    def find_step(self, step: int) -> NDArray[np.void]:
        """Return the row of a step.

        Raises:
            ConfigError: The run has no such step.
        """
        recorded = np.flatnonzero(self.steps["samples"])
        if not 0 <= step < len(self.steps) or not self.steps["samples"][step]:
            steps = f"steps {recorded[0]} to {recorded[-1]}" if len(recorded) else "no step"
            raise ConfigError(
                f"step={step} is not recorded: the run has {steps}; those before a resume stand in "
                "the folder that it went on from"
            )
        row: NDArray[np.void] = self.steps[step]
        return row


def _read_rows(folder: Path, name: str, kind: np.dtype[np.void]) -> NDArray[np.void]:
    with open_inside(folder, folder / name, most_bytes=_MOST_BYTES) as file:
        return parse_rows(file.read(), kind)


@dataclass(frozen=True)
class ReplayedBatch:
    """A training batch that was made again.

    Attributes:
        step: Number of the batch in its run.
        planned: As it left the host.
        batch: As it came out of the augmentation, a dict of tensors on its device.
        names: File and place of each sample.
        differing: Rows whose digests are not those of the run; None where it hashed none of them.
    """

    step: int
    planned: Batch
    batch: Batch
    names: Sequence[str]
    differing: Sequence[int] | None

    @property
    def verdict(self) -> str:
        """One line on the digests."""
        if self.differing is None:
            return f"step {self.step}: the run hashed none of its samples, so nothing is compared"
        count = len(self.names)
        if not self.differing:
            return f"step {self.step}: equal to the byte in all {count} samples"
        return (
            f"step {self.step}: {len(self.differing)} of {count} samples differ from those that were "
            f"trained, the first is {self.names[self.differing[0]]}: its file, the code, the device, "
            "or a hook of the module"
        )


class Replay:
    """Training batches of a run, made again one by one.

    Args:
        datamodule: Of the configuration of the run, opened.
        record: What the run has written down.

    Raises:
        DataError: The data give another order than they did.
    """

    def __init__(self, datamodule: BaseDataModule, record: Record) -> None:
        self.datamodule, self.record = datamodule, record
        self._loader = datamodule.make_loader("train")
        order = self._loader.order
        for name in ("length", "seed", "shuffle", "window_bytes"):
            recorded, current = record.order.get(name), getattr(order, name)
            if recorded != current:
                raise DataError(
                    f"the run trained an order of samples with {name}={recorded}, and its data now give "
                    f"{current}: files came or went, or typed options differ"
                )

    @cached_property
    def device(self) -> torch.device:
        """The device of the run, if this machine has one of its kind; else the CPU."""
        had_cuda = self.record.order.get("device") == "cuda"
        return torch.device("cuda" if had_cuda and torch.cuda.is_available() else "cpu")

    def make(self, step: int, rank: int = 0) -> ReplayedBatch:
        """Make the batch of a step again.

        Args:
            step: Training batches before it.
            rank: Of several, the one whose batch it is; digests are those of rank 0.

        Raises:
            ConfigError: The run has no such step or rank.
            DataError: The record and the data do not fit.
        """
        row = self.record.find_step(step)
        ranks, position, samples = int(row["ranks"]), int(row["position"]), int(row["samples"])
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank={rank} is not one of the step's ranks: 0 to {ranks - 1}")
        if position + samples > self._loader.order.length:
            raise DataError(f"{STEP_FILE} is damaged: step {step} goes beyond the epoch")
        positions = np.arange(position + rank, position + samples, ranks, dtype=np.int64)
        data = self.datamodule
        planned = data.plan_batch(self._loader.read(positions, int(row["epoch"])), "train")
        batch = self._finish(planned)
        recorded = self.record.digests_of(step)
        differing = None
        if rank == 0 and len(recorded) == len(positions):
            formatted = format_batch(batch, data.batch_format, data.channel_names)
            digests = shorten_digests(hash_samples(formatted, len(positions)))
            differing = np.flatnonzero(np.array(digests, np.uint64) != recorded).tolist()
        return ReplayedBatch(step, planned, batch, self._name(planned, positions, row), differing)

    def write(self, replayed: ReplayedBatch, folder: Path) -> Path:
        """Write a batch as a picture and as arrays; return the path of the picture.

        Raises:
            StoreError: A file cannot be written.
        """
        name = f"step-{replayed.step:06d}"
        with explaining(folder, _CURE):
            folder.mkdir(parents=True, exist_ok=True)
            try_writing(folder)  # refuses one that is there and read-only
        task, visuals = find_task(self.datamodule), self.datamodule.inspect("train")
        planned = replayed.planned
        on_host = move_data_to_device(replayed.batch, torch.device("cpu"))
        path = folder / f"{name}.png"
        rows = task.draw_samples(
            planned, on_host, path, f"step {replayed.step}", stage="train", count=_SHOWN
        )
        task.draw_augmented(planned, rows, folder / f"{name}-augment.png", stage="train")
        arrays = _list_arrays(on_host)
        arrays |= {
            f"before.{key}": array
            for key, array in _list_arrays(visuals.draw(planned) or {}).items()
        }
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]  # the stubs mean a flag
        target = folder / f"{name}.npz"
        with explaining(target, _CURE), replacing(target) as file:
            file.write(packed.getbuffer())
        plan = visuals.describe_plan(planned, range(len(replayed.names)))
        if plan:
            write_table(folder / f"{name}.csv", list(plan[0]), plan)
        return path

    def _finish(self, planned: Batch) -> Batch:
        # As in training, where neither gradients nor a lower precision reach the augmentation.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            moved = move_data_to_device(planned, self.device)
            return self.datamodule.finish_batch(moved, "train")

    def _name(self, batch: Batch, positions: Ints, row: NDArray[np.void]) -> list[str]:
        """Return file and place of each sample, as far as the batch or the dataset says them."""
        bank, source = self.datamodule.bank, self.datamodule.source
        images, corners = batch.get("image_index"), batch.get("position")
        indices = self._loader.order.at(positions, int(row["epoch"])).tolist()
        if bank is None or source is None or images is None:
            describe = getattr(self._loader.dataset, "describe_sample", "sample {}".format)
            return [describe(index) for index in indices]
        names = []
        for number, image in enumerate(images.tolist()):
            name = show_path(source.name(bank.name(image)))
            if corners is not None:
                y, x = corners[number].tolist()
                name += f", patch at (y {y}, x {x}) px"
            names.append(name)
        return names


def _list_arrays(batch: Batch) -> dict[str, Array]:
    arrays = {}
    for key, value in batch.items():
        if isinstance(value, Tensor):
            # NumPy has no bfloat16.
            tensor = value.float() if value.dtype is torch.bfloat16 else value
            arrays[key] = tensor.numpy()
    return arrays


@contextmanager
def opening(
    run: str, folder: Path, typed: Sequence[str] = (), packages: Sequence[str] = ()
) -> Iterator[Replay]:
    """Open the data of a run, as it had them.

    Args:
        run: Its folder or address, as typed.
        folder: Its folder here.
        typed: Overrides that replace those of the run.
        packages: Packages whose classes the configuration may name.

    Raises:
        LitDataError: The folder is none of a training, its configuration is refused, or its data
            are bad.
    """
    record = Record.read(folder)
    on_run = read_run("replay", run, typed)
    words = list(on_run.overrides)
    backend = record.order.get("backend")
    if backend in ("cpu", "device"):
        words.append(f"data.backend={backend}")  # which the run has measured
    with open_hydra(on_run.config_dir) as hydra, allow_packages(packages):
        cfg, _ = check_run(hydra, "fit", words, packages=packages, read=on_run.read)
        datamodule = build_datamodule(cfg)
        quieten()
        datamodule.trainer = Trainer(  # datasets ask theirs for its epochs, and if it overfits
            **QUIET,
            max_epochs=cfg.trainer.get("max_epochs"),
            overfit_batches=cfg.trainer.get("overfit_batches", 0.0),
        )
        datamodule.setup("fit")
        yield Replay(datamodule, record)


@dataclass(frozen=True)
class Request:
    """Words behind ``replay`` or ``spike``.

    Attributes:
        run: Folder or address.
        numbers: Whole numbers of the command's own options.
        out: Where to write; None for the folder of the run.
        overrides: All other words.
        packages: Packages whose classes the configuration may name.
    """

    run: str
    numbers: Mapping[str, Any]
    out: Path | None
    overrides: Sequence[str]
    packages: Sequence[str]

    @classmethod
    def parse(
        cls, command: str, words: Sequence[str], numbers: Mapping[str, Any], text: str
    ) -> "Request | None":
        """Read the words; None where help was asked for and printed.

        Args:
            command: The word on the command line.
            words: Those behind it.
            numbers: Options and what they are by default; None where one must be typed.
            text: The help.

        Raises:
            ConfigError: A word is missing or wrong.
        """
        parser = Parser(command)
        options = parser.read(words)
        if options.help:
            print(text)
            return None
        if not options.words:
            raise ConfigError(f"{command} needs the folder of a run. See {command} --help.")
        run, *rest = options.words
        values = dict(numbers)
        out, overrides = None, []
        for word in rest:
            key, _, value = word.partition("=")
            if key == "out":
                out = Path(value).absolute()
            elif key in numbers:
                values[key] = _read_number(key, value)
            else:
                overrides.append(word)
        if out is None and is_remote(run):
            raise ConfigError(f"{run} is at an address: give out=FOLDER for the files")
        for key, number in values.items():
            if number is None:
                raise ConfigError(f"{command} needs {key}=N. See {command} --help.")
        return cls(run, values, out, overrides, options.package)

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[Replay, Path]]:
        """Open the run; give it with the folder to write into.

        Args:
            name: Of that folder in the run's.
        """
        with fetching_runs([self.run], SCOPE) as (run_folder,):
            folder = run_folder.absolute()
            with opening(self.run, folder, self.overrides, self.packages) as replay:
                yield replay, self.out or folder / name


def _read_number(key: str, text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigError(f"{key}={text:.40} is no number: give a whole one from 0 to 10^15")
    return int(text)


def main(words: Sequence[str]) -> None:
    """Make a batch again and write it.

    Args:
        words: Those behind ``replay``.

    Raises:
        LitDataError: There is no such run or step, or its data are bad.
    """
    request = Request.parse("replay", words, {"step": None, "rank": 0}, _HELP)
    if request is None:
        return
    with request.open("replay") as (replay, folder):
        replayed = replay.make(request.numbers["step"], request.numbers["rank"])
        path = replay.write(replayed, folder)
    print(replayed.verdict, file=sys.stderr)
    print(path)
