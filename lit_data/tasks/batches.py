"""``predict`` batch by batch with a Trainer, for what is not cut into tiles."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from lit_data.batch_form import count_samples, cut_evenly, slice_batch
from lit_data.callbacks import AdaptiveBatchSize
from lit_data.callbacks.adaptive.active_batch import merge_outputs
from lit_data.callbacks.wrapping import wrap
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.inference.cpu_parallel import InferenceThreads
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun
from lit_data.tasks.writer import PredictionWriter, Work


def predict_batches(
    datamodule: BaseDataModule,
    model: L.LightningModule,
    writer: PredictionWriter,
    run: PredictRun,
    options: PredictOptions,
) -> Predicted:
    """Predict all inputs that are not done yet.

    A batch that does not fit into memory is cut into micro-batches.

    Args:
        datamodule: Its predict stage has one sample for each input of the writer.
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
    work = Work(writer, run, options, range(len(writer.names)))
    if work.waiting:
        adaptive = AdaptiveBatchSize(
            min_size=options.min_batch_size, max_size=options.max_batch_size
        )
        trainer = run.make_trainer(
            [_Writes(work), _InThreads(options.threads or 1, datamodule), adaptive]
        )
        with datamodule.predicting(work.waiting, options.batch_size):
            trainer.predict(model, datamodule=datamodule, return_predictions=False)
    return work.finish()


class _Writes(L.Callback):
    """Hands the answer for each sample to a writer."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._written = 0  # answers, so that the next one belongs to this input of those waiting
        self._before_s = time.perf_counter()

    @override
    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
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
        if samples is not None and len(answers) != samples:
            raise ConfigError(
                f"predict_step of {type(pl_module).__name__} returned {len(answers)} answers for "
                f"{samples} samples"
            )
        for answer in answers:
            now_s = time.perf_counter()
            number = self._work.waiting[self._written]
            self._work.write(number, answer, now_s - self._before_s)
            self._written += 1
            self._before_s = now_s


class _InThreads(L.Callback):
    """Runs `predict_step` on micro-batches side by side, see `lit_data.inference.cpu_parallel`."""

    def __init__(self, count: int, datamodule: BaseDataModule) -> None:
        self._count = count
        self._datamodule = datamodule
        self._resources = ExitStack()

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._count > 1:
            threads = InferenceThreads(self._count)
            self._resources.callback(threads.close)
            # Leaving the stack restores the step of the strategy before the threads end.
            restore_step = wrap(trainer.strategy, "predict_step", partial(self._step, threads))
            self._resources.callback(restore_step)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._resources.close()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._resources.close()

    def _step(
        self,
        threads: InferenceThreads,
        call: Callable[..., Any],
        batch: Any,  # noqa: ANN401 - any form
        *args: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        samples = count_samples(batch)
        if not samples or samples < 2:
            return call(batch, *args)
        ranges = cut_evenly(samples, -(-samples // min(threads.count, samples)))
        cut = getattr(self._datamodule, "slice_batch", None)
        if cut is None:
            cut = partial(slice_batch, samples=samples)
        # All micro-batches are submitted before the first answer is awaited.
        futures = []
        for start, stop in ranges:
            micro_batch = cut(batch, start, stop)
            futures.append(threads.submit(partial(_without_gradient, call, micro_batch, *args)))
        outputs = [future.result() for future in futures]
        return merge_outputs(outputs, [stop - start for start, stop in ranges])


def _without_gradient(call: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - any step
    """Call a step in inference mode, which holds for one thread and so is entered in each."""
    with torch.inference_mode():
        return call(*args)
