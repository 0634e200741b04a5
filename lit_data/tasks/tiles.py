"""``predict`` for whole images: each is predicted tile by tile and written once it is complete."""

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
    """Progress bar that counts images and tiles.

    Args:
        bar: Bar of Rich, with one task; None shows nothing.
        clock: Seconds.
    """

    def __init__(self, bar: Bar | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bar = bar
        self._clock = clock
        self._start_s = clock()
        self._images = 0

    def advance(self) -> None:
        """Count an image that is done."""
        self._images += 1
        if self._bar is None:
            return
        rate = self._images / max(self._clock() - self._start_s, 1e-9)
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=self._images, rate=f"{rate:.2f} images/s")

    def show(self, progress: Progress) -> None:
        """Show the rate of tiles through the net."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], tiles=f"{progress.tiles_per_s:.1f} tiles/s")


@contextmanager
def image_bar(total: int, *, enabled: bool) -> Iterator[ImageBar]:
    """Open a bar on stderr while images are predicted.

    Args:
        total: Images.
        enabled: False shows nothing.
    """
    if not enabled:
        yield ImageBar(None)
        return
    columns = (
        TextColumn("predicting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[tiles]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        bar.add_task("predicting", total=total, rate="", tiles="")
        yield ImageBar(bar)


_SLACK: Final = 1e-3  # of sums of weights and of half precision


class ImageWriter(BankWriter):
    """Writes predictions of whole images.

    Args:
        images: What is predicted.
        folder: Where to write.
        options: Threshold and the like.
    """

    def __init__(self, images: WholeImages, folder: Path, options: PredictOptions) -> None:
        super().__init__(images.bank, images.names)
        self.images = images
        self.folder = folder
        self.options = options


def predict_images(
    datamodule: BaseDataModule,
    model: L.LightningModule,
    writer: ImageWriter,
    run: PredictRun,
    options: PredictOptions,
) -> Predicted:
    """Predict all images that are not done yet, tile by tile.

    Each is written as soon as it is complete. Bad images are left out and listed, in ``bad.csv``
    too; they do not stop the others.

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
    trainer = run.make_trainer([])
    device = trainer.strategy.root_device
    images = writer.images
    work = Work(writer, run, options, range(_limit(trainer, len(images))))
    net_metrics: dict[str, Any] = {}
    if work.waiting or options.onnx is not None:
        net = prepare_net(model, datamodule, images, device)
        # Measured before the conversion, as rounding to int8 hides how far a net sees.
        overlap_px = choose_overlap_px(net, images, options, device)
        net, net_metrics = convert_net(net, images, options)
        predictor = open_predictor(net, images, options, device, overlap_px=overlap_px)
        small = [number for number in work.waiting if images.count_px(number) <= options.large_px]
        large = [number for number in work.waiting if images.count_px(number) > options.large_px]
        has_bar = trainer.progress_bar_callback is not None
        with image_bar(len(work.waiting), enabled=has_bar) as bar:
            _predict_small(predictor, work, images, small, bar)
            _predict_large(predictor, work, images, large, bar, run.folder)
    metrics, bad = work.finish()
    return Predicted({**metrics, **net_metrics}, bad)


def _limit(trainer: L.Trainer, count: int) -> int:
    """Return the images that ``trainer.limit_predict_batches`` leaves; it counts images here."""
    limit = trainer.limit_predict_batches
    return min(limit, count) if isinstance(limit, int) else int(limit * count)


def _predict_small(
    predictor: TiledPredictor,
    work: Work,
    images: WholeImages,
    numbers: Sequence[int],
    bar: ImageBar,
) -> None:
    def note_bad(position: int, error: DataError) -> None:
        work.bad[numbers[position]] = str(error)
        bar.advance()

    loads = [partial(images.load, number) for number in numbers]
    before_s = time.perf_counter()
    for position, values in predictor.predict(loads, on_bad=note_bad, on_progress=bar.show):
        number = numbers[position]
        answer = ProbabilityMap.of(images.restore(number, values.numpy()))
        _check_probability(answer.values.min(), answer.values.max())
        now_s = time.perf_counter()  # writing counts for the image after this one
        work.write(number, answer, now_s - before_s)
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
    """Predict images one at a time, each through a file in the place of an array."""
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
                answer = ProbabilityMap.of(images.restore(number, values))
                work.write(number, answer, time.perf_counter() - before_s)
        bar.advance()


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Remove a file when its work has ended, also if that failed."""
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _check_probability(least: np.floating[Any], largest: np.floating[Any]) -> None:
    if np.isnan(least):
        raise ConfigError(
            "predict_step returned NaN: the model overflows on this image. Set "
            "trainer.precision=32-true if it is lower, or take the checkpoint of an earlier epoch"
        )
    if not (least >= -_SLACK and largest <= 1 + _SLACK):
        raise ConfigError(
            f"probability goes from {least:.4g} to {largest:.4g}: predict_step must return values "
            "in 0..1, so logits go through sigmoid first"
        )
