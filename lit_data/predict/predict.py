"""``predict``: batch by batch with a Trainer, and whole images tile by tile."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_data.callbacks.adaptive.active_batch import Cut, describe_shapes
from lit_data.callbacks.adaptive.merge import Merger
from lit_data.callbacks.wrapping import wrap
from lit_data.core.batch_form import count_samples, slice_batch
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.out_of_memory import read_failure
from lit_data.core.progress import ProgressBar
from lit_data.datamodules.base import BaseDataModule
from lit_data.predict.answers import check_probabilities
from lit_data.predict.forward import InferenceThreads
from lit_data.predict.maps import ImageWriter, ProbabilityMap, WholeImages
from lit_data.predict.nets import ProbabilityNet, choose_overlap_px, open_predictor
from lit_data.predict.options import Predicted, PredictOptions, PredictRun
from lit_data.predict.predictor import TiledPredictor
from lit_data.predict.runner import BatchSize, BatchSizes, Runner
from lit_data.predict.writer import PredictionWriter, Work
from lit_inspect.counts import counted


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
    chosen = range(len(writer.names)) if run.chosen is None else run.chosen
    work = Work(writer, run, options, chosen, block=block)
    if not work.waiting:
        return work.finish()
    trainer = run.trainer
    if run.share.count > 1 and trainer.limit_predict_batches != 1.0:
        raise ConfigError(
            f"trainer.limit_predict_batches={trainer.limit_predict_batches} works in one process "
            "only: remove it"
        )
    samples: list[int] = []
    for number in work.waiting:
        samples += writer.samples(number)
    with ExitStack() as resources:
        threads = resources.enter_context(closing(InferenceThreads(options.threads or 1)))
        most = options.max_batch_size
        start = BatchSize(most or sys.maxsize, options.min_batch_size, most)
        runner = Runner(BatchSizes(start), threads, trainer.strategy.root_device)
        steps = _Steps(runner, threads.count, (model, datamodule))
        # The stack restores the strategy before the threads end.
        resources.callback(wrap(trainer.strategy, "batch_to_device", steps.move))
        resources.callback(wrap(trainer.strategy, "predict_step", steps.predict))
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by its callback connector
        callbacks.append(_Writes(work))
        resources.enter_context(datamodule.predicting(samples, options.batch_size))
        trainer.predict(model, datamodule=datamodule, return_predictions=False)
    return work.finish()


class SampleBatch:
    """Batch of a loader on its way through the `predict_step` of a Trainer.

    Args:
        batch: On its device, or on the host where that has no room for all of it.
        cut: Returns samples of it, from a first one to the one behind the last.
        step: Called with samples, by an inference thread.
        threads: Number of these.
    """

    advice = (
        "use a smaller patch or model, trainer.precision=bf16-mixed, or stop other programs on "
        "the device"
    )

    def __init__(self, batch: Any, cut: Cut, step: Callable[[Any], Any], threads: int) -> None:  # noqa: ANN401 - any form
        self._batch = batch
        self._samples = count_samples(batch)
        self._cut = cut
        self._step = step
        self._threads = threads
        self._outputs: list[Any] = []
        self._counts: list[int] = []

    def __len__(self) -> int:
        return self._samples

    @cached_property
    def kind(self) -> str:
        """Shapes of a sample."""
        return describe_shapes(self._batch, self._samples)

    @property
    def most(self) -> int:
        """Samples at once, so that each thread has some."""
        return -(-self._samples // self._threads)

    def describe(self, samples: int) -> str:
        """Return the words for so many samples."""
        return f"{counted(samples, 'sample')} of {self.kind}"

    def predict(self, start: int, stop: int, size: int) -> Any:  # noqa: ANN401 - what a module returns
        """Return the outputs of a module for some samples."""
        is_all = stop - start == self._samples
        samples = self._batch if is_all else self._cut(self._batch, start, stop)
        if self._threads == 1:
            return self._step(samples)
        with torch.inference_mode():  # which holds for one thread
            return self._step(samples)

    def take(self, start: int, stop: int, values: Any) -> None:  # noqa: ANN401
        """Take the outputs for some samples."""
        self._outputs.append(values)
        self._counts.append(stop - start)

    def join(self) -> Any:  # noqa: ANN401
        """Return the outputs for the whole batch.

        Raises:
            ConfigError: They cannot be joined.
        """
        if len(self._outputs) == 1:
            return self._outputs[0]
        merger = Merger(self._counts)
        joined = merger.merge(self._outputs)
        cure = f"predict.batch_size={min(self._counts)}"
        if self._threads > 1:
            cure = "predict with threads=1"
        merger.refuse_losses(self._outputs[0], cure)
        return joined


class _Steps:
    """Stands around two methods of the strategy of a Trainer, whose loop then drives a `Runner`.

    Args:
        runner: Sends batches through the model.
        threads: Number of threads that call it.
        owners: The module and its datamodule, which may cut their batches themselves.
    """

    def __init__(self, runner: Runner, threads: int, owners: Sequence[object]) -> None:
        self._runner = runner
        self._threads = threads
        self._owners = owners
        self._too_large: set[tuple[int, str]] = set()
        self._move: Callable[[Any], Any] | None = None

    def move(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Around the transfer of a batch, which stays on the host if the device has no room for it."""
        self._move = None
        samples = count_samples(batch)
        signature = (samples, describe_shapes(batch, samples))
        if signature not in self._too_large:
            try:
                return call(batch, *args, **kwargs)
            except Exception as error:
                read_failure(error)
            self._too_large.add(signature)
            self._runner.release()
        self._move = lambda part: call(part, *args, **kwargs)
        return batch

    def predict(self, call: Callable[..., Any], batch: Any, *args: Any) -> Any:  # noqa: ANN401
        """Around `predict_step`: in micro-batches that memory holds, side by side in threads."""
        move = self._move

        def step(samples: Any) -> Any:  # noqa: ANN401
            return call(samples if move is None else move(samples), *args)

        fitted = SampleBatch(batch, self._find_cut(batch), step, self._threads)
        if not len(fitted):  # nobody can count, and so cut it
            return step(batch)
        self._runner.run(fitted)
        self._runner.collect()
        return fitted.join()

    def _find_cut(self, batch: Any) -> Cut:  # noqa: ANN401
        for owner in self._owners:
            cut = getattr(owner, "slice_batch", None)
            if callable(cut):
                return cut  # type: ignore[no-any-return]
        return partial(slice_batch, samples=count_samples(batch))


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
                f"predict_step of {type(pl_module).__name__} returned {counted(len(answers), 'answer')} "
                f"for {counted(samples, 'sample')}"
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
        predictor = _open_predictor(datamodule, model, images, options, device)
        small = [number for number in work.waiting if images.count_px(number) <= options.large_px]
        large = [number for number in work.waiting if images.count_px(number) > options.large_px]
        has_bar = trainer.progress_bar_callback is not None
        with _Bar("predicting", len(work.waiting), enabled=has_bar) as bar:
            _predict_small(predictor, work, images, small, bar)
            path = run.folder / f".large{run.share.suffix}.npy"
            _predict_large(predictor, work, images, large, bar, path)
    return work.finish()


def predict_few(
    datamodule: BaseDataModule,
    model: LightningModule,
    images: WholeImages,
    options: PredictOptions,
    numbers: Sequence[int],
) -> Iterator[tuple[int, ProbabilityMap]]:
    """Predict some images in memory, where the model is, and write nothing.

    Args:
        datamodule: Whose images they are.
        model: See `predict_images`.
        images: All of them.
        options: How.
        numbers: Of those that are predicted.

    Yields:
        The number of an image, and its map.

    Raises:
        ConfigError: See `predict_images`, as of `BatchMemoryError`.
    """
    predictor = _open_predictor(datamodule, model, images, options, model.device)
    loads = [partial(images.load, number) for number in numbers]
    for position, values in predictor.predict(loads):
        check_probabilities(values)
        number = numbers[position]
        yield number, ProbabilityMap.of(images.restore(number, values.numpy()))


def _open_predictor(
    datamodule: BaseDataModule,
    model: LightningModule,
    images: WholeImages,
    options: PredictOptions,
    device: torch.device,
) -> TiledPredictor:
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
    return open_predictor(net, images, options, device, overlap_px=overlap_px)


def _limit(trainer: Trainer, count: int) -> int:
    """Return the images that ``trainer.limit_predict_batches`` leaves; it counts images here."""
    limit = trainer.limit_predict_batches
    return min(limit, count) if isinstance(limit, int) else int(limit * count)


class _Bar(ProgressBar):
    """Counts images, and beside them the tiles that went through the net."""

    tiles = 0

    def count_tiles(self, count: int) -> None:
        self.tiles += count
        self.note = counted(self.tiles, "tile")
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
