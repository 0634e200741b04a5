"""``predict``: batch by batch with a Trainer, and whole images tile by tile."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_data.batch_form import count_samples, cut_evenly, slice_batch
from lit_data.callbacks import AdaptiveBatchSize
from lit_data.callbacks.adaptive.merge import Merger
from lit_data.callbacks.wrapping import wrap
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError, DataError
from lit_data.inference import TiledPredictor
from lit_data.inference.forward import InferenceThreads
from lit_data.io.progress import ProgressBar
from lit_data.tasks.answers import check_probabilities
from lit_data.tasks.maps import ImageWriter, ProbabilityMap, WholeImages
from lit_data.tasks.nets import (
    ProbabilityNet,
    choose_overlap_px,
    open_predictor,
)
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun
from lit_data.tasks.writer import PredictionWriter, Work


def predict_batches(
    datamodule: BaseDataModule,
    model: LightningModule,
    writer: PredictionWriter,
    run: PredictRun,
    options: PredictOptions,
) -> Predicted:
    """Predict all inputs that are not done yet.

    A batch that does not fit into memory is cut into micro-batches.

    Args:
        datamodule: Its predict stage has the samples of each input of the writer, mostly one.
        model: With its weights.
        writer: Reads and writes what `predict_step` returns.
        run: Where.
        options: How: `batch_size` in the place of that of the loader, `min_batch_size`,
            `max_batch_size`, `threads`.

    Raises:
        ConfigError: The model returns something else.
        BatchMemoryError: `min_batch_size` samples do not fit into memory.
        StoreError: Files cannot be written.
    """
    # Shares of whole batches, so that each batch is the one that a process alone would predict.
    block = options.batch_size or datamodule.batch_size
    work = Work(writer, run, options, range(len(writer.names)), block=block)
    if not work.waiting:
        return work.finish()
    adaptive = AdaptiveBatchSize(min_size=options.min_batch_size, max_size=options.max_batch_size)
    trainer = run.trainer
    if run.share.count > 1 and trainer.limit_predict_batches != 1.0:
        raise ConfigError(
            f"trainer.limit_predict_batches={trainer.limit_predict_batches} is for a prediction in "
            "one process: leave it out"
        )
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by its callback connector
    callbacks += [_Writes(work), adaptive]
    with ExitStack() as resources:
        if options.threads is not None and options.threads > 1:
            threads = resources.enter_context(closing(InferenceThreads(options.threads)))
            # Wrapped before the trainer starts, so that each thread gets a part of what fits.
            step = partial(_predict_in_threads, threads, datamodule)
            # The stack restores the step of the strategy before the threads end.
            resources.callback(wrap(trainer.strategy, "predict_step", step))
        samples: list[int] = []
        for number in work.waiting:
            samples += writer.samples(number)
        resources.enter_context(datamodule.predicting(samples, options.batch_size))
        trainer.predict(model, datamodule=datamodule, return_predictions=False)
    return work.finish()


class _Writes(Callback):
    """Hands the answers for the samples of each input to a writer."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._numbers = iter(work.waiting)  # answers come in their order
        self._number = 0
        self._answers: list[Any] = []  # of the samples of that input

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        answers = self._work.writer.read(outputs, batch)
        if answers is None:
            raise ConfigError(
                f"predict_step of {type(pl_module).__name__} must return "
                f"{self._work.writer.expects}; it returned a {type(outputs).__name__}"
            )
        samples = count_samples(batch)
        if len(answers) != samples:
            raise ConfigError(
                f"predict_step of {type(pl_module).__name__} returned {len(answers)} answers for "
                f"{samples} samples"
            )
        for answer in answers:
            self._add(answer)

    def _add(self, answer: Any) -> None:  # noqa: ANN401 - what the writer takes
        writer = self._work.writer
        if not self._answers:
            self._number = next(self._numbers)
        self._answers.append(answer)
        if len(self._answers) == len(writer.samples(self._number)):
            joined = writer.join(self._number, self._answers)
            self._answers = []
            self._work.write(self._number, joined)


def _predict_in_threads(
    threads: InferenceThreads,
    datamodule: BaseDataModule,
    call: Callable[..., Any],
    batch: Any,  # noqa: ANN401 - any form
    *args: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Run `predict_step` on micro-batches side by side.

    Raises:
        ConfigError: What it returned of them cannot be joined.
    """
    samples = count_samples(batch)
    if samples < 2:
        return call(batch, *args)
    ranges = cut_evenly(samples, -(-samples // min(threads.count, samples)))
    cut = getattr(datamodule, "slice_batch", None) or partial(slice_batch, samples=samples)
    # Inference mode holds for one thread, so each call enters it.
    # All micro-batches are submitted before the first answer is awaited.
    futures = []
    for start, stop in ranges:
        micro_batch = cut(batch, start, stop)
        futures.append(threads.submit(partial(torch.inference_mode()(call), micro_batch, *args)))
    outputs = [future.result() for future in futures]
    merger = Merger([stop - start for start, stop in ranges])
    joined = merger.merge(outputs)
    merger.refuse_losses(outputs[0], "predict with threads=1")
    return joined


def predict_images(
    datamodule: BaseDataModule,
    model: LightningModule,
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
    trainer = run.trainer
    device = trainer.strategy.root_device
    images = writer.images
    chosen = range(len(images)) if run.chosen is None else run.chosen
    work = Work(writer, run, options, chosen[: _limit(trainer, len(chosen))])
    if work.waiting:
        # Moved by itself: within another module Lightning's modules do not learn their device.
        model.to(device)
        net = ProbabilityNet(
            model,
            images.channels,
            datamodule.batch_format,
            datamodule.channel_names,
            len(images.classes),
        )
        overlap_px = choose_overlap_px(net, images, options, device)
        predictor = open_predictor(net, images, options, device, overlap_px=overlap_px)
        small = [number for number in work.waiting if images.count_px(number) <= options.large_px]
        large = [number for number in work.waiting if images.count_px(number) > options.large_px]
        has_bar = trainer.progress_bar_callback is not None
        with _Bar("predicting", len(work.waiting), enabled=has_bar) as bar:
            _predict_small(predictor, work, images, small, bar)
            path = run.folder / f".large{run.share.suffix}.npy"
            _predict_large(predictor, work, images, large, bar, path)
    return work.finish()


def _limit(trainer: Trainer, count: int) -> int:
    """Return the images that ``trainer.limit_predict_batches`` leaves; it counts images here."""
    limit = trainer.limit_predict_batches
    return min(limit, count) if isinstance(limit, int) else int(limit * count)


class _Bar(ProgressBar):
    """Counts images, and beside them the tiles that went through the net."""

    tiles = 0

    def count_tiles(self, count: int) -> None:
        self.tiles += count
        self.note = f"{self.tiles} tiles"
        self.advance(0)


def _predict_small(
    predictor: TiledPredictor,
    work: Work,
    images: WholeImages,
    numbers: Sequence[int],
    bar: _Bar,
) -> None:
    def note_bad(position: int, error: DataError) -> None:
        work.note_bad(numbers[position], str(error))
        bar.advance()

    loads = [partial(images.load, number) for number in numbers]
    work.restart_clock()
    for position, values in predictor.predict(loads, on_bad=note_bad, on_tiles=bar.count_tiles):
        number = numbers[position]
        answer = ProbabilityMap.of(images.restore(number, values.numpy()))
        check_probabilities(values)
        work.write(number, answer)
        bar.advance()


def _predict_large(
    predictor: TiledPredictor,
    work: Work,
    images: WholeImages,
    numbers: Sequence[int],
    bar: _Bar,
    path: Path,
) -> None:
    """Predict images one at a time, each through the file of a path in the place of an array."""
    for number in numbers:
        work.restart_clock()
        try:
            image = images.load(number)
            values = predictor.predict_to_file(
                image,
                path,
                dtype="uint16",
                on_tiles=bar.count_tiles,
                check=check_probabilities,
            )
        except DataError as error:
            work.note_bad(number, str(error))
        else:
            answer = ProbabilityMap.of(images.restore(number, values))
            work.write(number, answer)
        finally:
            path.unlink(missing_ok=True)
        bar.advance()
