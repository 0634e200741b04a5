"""``predict`` for whole images: each one predicted tile by tile, and written as soon as it is complete."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import lightning as L
import numpy as np

from lit_data.commands.predict_bar import ImageBar, image_bar
from lit_data.commands.predict_convert import convert_net
from lit_data.commands.predict_files import ProbabilityMap
from lit_data.commands.predict_journal import Entry, Journal
from lit_data.commands.predict_net import choose_overlap_px, open_predictor, prepare_net
from lit_data.commands.predict_options import Predicted, PredictOptions, PredictRun
from lit_data.commands.result import write_table
from lit_data.commands.whole_images import WholeImages
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, DataError
from lit_data.inference import TiledPredictor

log = logging.getLogger(__name__)

_SLACK: Final = 1e-3  # of sums of weights and of half precision


class Written(NamedTuple):
    """What was written of one image.

    Attributes:
        files: Paths.
        rows: Of the table.
        score: How sure the model is of what it found.
    """

    files: Sequence[Path]
    rows: Sequence[Mapping[str, Any]]
    score: float


class ImageFiles(Protocol):
    """Writes what a model says of images."""

    def write(self, number: int, probability: ProbabilityMap, seconds: float) -> Written:
        """Write one image; `seconds` is the time since the one before."""
        ...

    def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Write tables and pictures of all images; return the numbers for summary.json."""
        ...


@dataclass(frozen=True, slots=True)
class _Work:
    images: WholeImages
    files: ImageFiles
    journal: Journal
    stamps: Mapping[int, Sequence[int]]  # from before the images were read
    bad: dict[int, str]

    def write(self, number: int, probability: ProbabilityMap, seconds: float) -> None:
        written, name = self.files.write(number, probability, seconds), self.images.names[number]
        measured = self.journal.measure(written.files)
        stamp = self.stamps[number]
        self.journal.add(Entry(image=name, stamp=stamp, files=measured, rows=written.rows, score=written.score))


def predict_images(
    datamodule: BaseDataModule,
    model: L.LightningModule,
    images: WholeImages,
    files: ImageFiles,
    run: PredictRun,
    options: PredictOptions,
) -> Predicted:
    """Predict all images that are not done yet.

    Bad images are left out and listed, in ``bad.csv`` too; they do not stop the others.

    Args:
        datamodule: Whose images they are.
        model: Its `predict_step` returns a dict with ``probability`` [B, 1, H, W].
        images: What to predict.
        files: Writes what is predicted.
        run: Where.
        options: How.

    Raises:
        ConfigError: The model returns something else, or options do not fit.
        BatchMemoryError: A single tile does not fit into memory.
        StoreError: Files cannot be written.
    """
    trainer = run.make_trainer([])
    device = trainer.strategy.root_device
    identity = {**run.identity, "predict": options.identity()}
    chosen = range(_limit(trainer, len(images)))
    stamps = {number: images.stamp(number) for number in chosen}
    work = _Work(images, files, Journal(run.folder, identity, resume=options.resume), stamps, {})
    waiting, converted = _find_waiting(work, chosen), dict[str, Any]()
    if waiting or options.onnx is not None:
        net = prepare_net(model, datamodule, images, device)
        overlap_px = choose_overlap_px(net, images, options, device)  # int8 would hide how far a net sees
        net, converted = convert_net(net, images, options)
        predictor = open_predictor(net, images, options, device, overlap_px=overlap_px)
        with image_bar(len(waiting), enabled=trainer.progress_bar_callback is not None) as bar:
            _predict_small(predictor, work, [n for n in waiting if images.count_px(n) <= options.large_px], bar)
            _predict_large(
                predictor, work, [n for n in waiting if images.count_px(n) > options.large_px], bar, run.folder
            )
    entries = work.journal.entries([images.names[number] for number in chosen])
    bad = [*images.bank.skipped, *((images.bank.name(number), reason) for number, reason in sorted(work.bad.items()))]
    write_table(run.folder / "bad.csv", ("image", "reason"), [{"image": path, "reason": why} for path, why in bad])
    kept = {"predict/images_kept": len(chosen) - len(waiting), "predict/images_bad": len(bad)}
    return Predicted({**files.finish(entries), **kept, **converted}, bad)


def _limit(trainer: L.Trainer, count: int) -> int:
    """How many images ``trainer.limit_predict_batches`` leaves, which counts images here."""
    limit = trainer.limit_predict_batches
    return min(limit, count) if isinstance(limit, int) else int(limit * count)


def _find_waiting(work: _Work, chosen: Sequence[int]) -> list[int]:
    waiting = [n for n in chosen if not work.journal.holds(work.images.names[n], work.stamps[n])]
    for number in waiting:
        work.journal.drop(work.images.names[number])
    if len(waiting) < len(chosen):
        log.info("%d of %d images are done already", len(chosen) - len(waiting), len(chosen))
    return waiting


def _predict_small(predictor: TiledPredictor, work: _Work, numbers: Sequence[int], bar: ImageBar) -> None:
    def note(place: int, error: DataError) -> None:
        work.bad[numbers[place]] = str(error)
        bar.advance()

    loads = [partial(work.images.load, number) for number in numbers]
    before_s = time.perf_counter()
    for place, values in predictor.predict(loads, on_bad=note, on_progress=bar.show):
        probability = values[0].numpy()
        _check_probability(probability.min(), probability.max())
        work.write(numbers[place], ProbabilityMap(probability), (now_s := time.perf_counter()) - before_s)
        before_s = now_s
        bar.advance()


def _predict_large(predictor: TiledPredictor, work: _Work, numbers: Sequence[int], bar: ImageBar, folder: Path) -> None:
    for number in numbers:
        before_s = time.perf_counter()
        with _temporary(folder / ".large.npy") as path:
            try:
                values = predictor.predict_to_file(work.images.load(number), path, dtype="uint16", on_progress=bar.show)
            except DataError as error:
                work.bad[number] = str(error)
            else:
                work.write(number, ProbabilityMap(values[0]), time.perf_counter() - before_s)
        bar.advance()


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _check_probability(least: np.floating[Any], largest: np.floating[Any]) -> None:
    if np.isnan(least):
        raise ConfigError(
            "predict_step returned NaN: the model overflows on this image. Set trainer.precision=32-true if it is "
            "lower, or take the checkpoint of an earlier epoch"
        )
    if not (least >= -_SLACK and largest <= 1 + _SLACK):
        raise ConfigError(
            f"probability goes from {least:.4g} to {largest:.4g}: predict_step must return values in 0..1, so logits "
            "go through sigmoid first"
        )
