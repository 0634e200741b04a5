"""``predict`` for whole images: each one predicted tile by tile, and written as soon as it is complete."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, DataError
from lit_data.inference import Progress, TiledPredictor
from lit_data.tasks.nets import choose_overlap_px, convert_net, open_predictor, prepare_net
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun
from lit_data.tasks.whole_images import ProbabilityMap, WholeImages
from lit_data.tasks.writer import BankWriter, Work

log = logging.getLogger(__name__)


class ImageBar:
    """Counts images and tiles, and shows them.

    Args:
        bar: What shows them; None shows nothing.
        clock: Seconds.
    """

    def __init__(self, bar: Bar | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bar, self._clock = bar, clock
        self._start_s, self._done = clock(), 0

    def advance(self) -> None:
        """An image is done."""
        self._done += 1
        rate = self._done / max(self._clock() - self._start_s, 1e-9)
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=self._done, rate=f"{rate:.2f} images/s"
            )

    def show(self, progress: Progress) -> None:
        """Tiles went through the net."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], tiles=f"{progress.tiles_per_s:.1f} tiles/s")


@contextmanager
def image_bar(total: int, *, enabled: bool) -> Iterator[ImageBar]:
    """A bar on stderr while images are predicted.

    Args:
        total: Images.
        enabled: False shows nothing.
    """
    if not enabled:
        yield ImageBar(None)
        return
    words = (TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[tiles]}"))
    columns = (
        TextColumn("predicting"),
        BarColumn(),
        MofNCompleteColumn(),
        *words,
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        bar.add_task("predicting", total=total, rate="", tiles="")
        yield ImageBar(bar)


_SLACK: Final = 1e-3  # of sums of weights and of half precision


class ImageWriter(BankWriter):
    """Writes what is said of whole images.

    Args:
        images: What is predicted.
        folder: Where to write.
        options: Threshold and the like.
    """

    def __init__(self, images: WholeImages, folder: Path, options: PredictOptions) -> None:
        super().__init__(images.bank, images.names)
        self.images, self.folder, self.options = images, folder, options


def predict_images(
    datamodule: BaseDataModule,
    model: L.LightningModule,
    writer: ImageWriter,
    run: PredictRun,
    options: PredictOptions,
) -> Predicted:
    """Predict all images that are not done yet, tile by tile.

    Each is written as soon as it is complete.

    Bad images are left out and listed, in ``bad.csv`` too; they do not stop the others.

    Args:
        datamodule: Whose images they are.
        model: Its `predict_step` returns a dict with ``probability`` [B, 1, H, W].
        writer: Has the images, and writes what is predicted.
        run: Where.
        options: How.

    Raises:
        ConfigError: The model returns something else, or options do not fit.
        BatchMemoryError: A single tile does not fit into memory.
        StoreError: Files cannot be written.
    """
    trainer, images = run.make_trainer([]), writer.images
    device = trainer.strategy.root_device
    work, converted = (
        Work(writer, run, options, range(_limit(trainer, len(images)))),
        dict[str, Any](),
    )
    if work.waiting or options.onnx is not None:
        net = prepare_net(model, datamodule, images, device)
        overlap_px = choose_overlap_px(
            net, images, options, device
        )  # int8 would hide how far a net sees
        net, converted = convert_net(net, images, options)
        predictor = open_predictor(net, images, options, device, overlap_px=overlap_px)
        small = [number for number in work.waiting if images.count_px(number) <= options.large_px]
        large = [number for number in work.waiting if images.count_px(number) > options.large_px]
        with image_bar(len(work.waiting), enabled=trainer.progress_bar_callback is not None) as bar:
            _predict_small(predictor, work, images, small, bar)
            _predict_large(predictor, work, images, large, bar, run.folder)
    metrics, bad = work.finish()
    return Predicted({**metrics, **converted}, bad)


def _limit(trainer: L.Trainer, count: int) -> int:
    """How many images ``trainer.limit_predict_batches`` leaves, which counts images here."""
    limit = trainer.limit_predict_batches
    return min(limit, count) if isinstance(limit, int) else int(limit * count)


def _predict_small(
    predictor: TiledPredictor,
    work: Work,
    images: WholeImages,
    numbers: Sequence[int],
    bar: ImageBar,
) -> None:
    def note(place: int, error: DataError) -> None:
        work.bad[numbers[place]] = str(error)
        bar.advance()

    loads = [partial(images.load, number) for number in numbers]
    before_s = time.perf_counter()
    for place, values in predictor.predict(loads, on_bad=note, on_progress=bar.show):
        found = ProbabilityMap.of(images.restore(numbers[place], values.numpy()))
        _check_probability(found.values.min(), found.values.max())
        work.write(numbers[place], found, (now_s := time.perf_counter()) - before_s)
        before_s = now_s
        bar.advance()


def _predict_large(
    predictor: TiledPredictor,
    work: Work,
    images: WholeImages,
    numbers: Sequence[int],
    bar: ImageBar,
    folder: Path,
) -> None:
    for number in numbers:
        before_s = time.perf_counter()
        with _temporary(folder / ".large.npy") as path:
            try:
                values = predictor.predict_to_file(
                    images.load(number), path, dtype="uint16", on_progress=bar.show
                )
            except DataError as error:
                work.bad[number] = str(error)
            else:
                found = ProbabilityMap.of(images.restore(number, values))
                work.write(number, found, time.perf_counter() - before_s)
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
