"""`AdaptiveBatchSize`: recovery from batches that run out of memory."""

import logging
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Literal, get_args

from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lit_data.callbacks.adaptive.active_batch import ActiveBatch
from lit_data.callbacks.adaptive.ranks import find_ranks
from lit_data.callbacks.adaptive.replay import Replay
from lit_data.callbacks.adaptive.resize import LearningRate, ResizeRules, Resizing
from lit_data.callbacks.adaptive.steps import (
    EvaluationSteps,
    ManualSteps,
    MicroBatchModule,
    TrainingSteps,
)
from lit_data.callbacks.device_memory import open_gauge
from lit_data.callbacks.events import is_logging_step, log_metrics
from lit_data.callbacks.wrapping import CopiedCallback, wrap
from lit_data.core.checks import check_choice, check_saved_counts
from lit_data.core.errors import ConfigError
from lit_data.core.lightning_internals import CLOSURE, OPTIMIZER_STEP, automatic_loop, check_version
from lit_data.core.out_of_memory import is_out_of_memory
from lit_data.core.size_search import SizeLimits, SizeSearch

log = logging.getLogger(__name__)


Mode = Literal["split", "resize"]
_COUNTS = {"ooms", "base", "batch_size"}


class AdaptiveBatchSize(CopiedCallback):
    """Repeats a batch that ran out of memory in halves, and grows again after clean steps.

    After an out-of-memory error in transfer, augmentation, forward or backward, the callback undoes
    what the training step did to gradients, buffers, metrics, logged values, attributes of the
    LightningModule and random generators. It then repeats the step in smaller micro-batches. The
    gradient is the mean over the samples, as for the whole batch (the loss must be a mean over its
    samples), and the optimizer steps once, so ``global_step``, schedule and learning rate are the
    same as without the failure. Batch norm sees micro-batches. Validation, test and prediction
    batches are split in the same way, and their outputs are joined in order. Predictions that
    cannot be joined are refused; if several dimensions could be the samples, the first one is used.
    An error within the optimizer's own step ends the run.

    Attributes are those of the module, its parts and objects that it holds, including lists, dicts,
    sets, arrays and tensors. Iterators, and values too large to copy in each step, cannot be
    restored; the log says so once.

    Hooks of module and callbacks get each whole batch, on its device. Their changes reach the step,
    because micro-batches are slices of that batch. If a transfer hook returns a batch that cannot
    be split, each micro-batch is transferred again. A batch that leaves too little device memory
    for its step stays on the host, for hooks too; the log says so once.

    The size is halved after a failure. After clean steps it is doubled, or raised halfway to the
    size that failed, which is not used again unless more memory is available. A resumed run keeps
    the sizes it had found, within its own limits. A different `initial_size`, or in `resize` a
    different batch size of the loader, starts the search again.

    Batches may be of any form that `lit_data.core.batch_form` can read: stacked tensors, lists with one
    entry for each sample, dicts with ``batch_idx``, dataclasses. An ambiguous batch is refused if
    it has to be split; for any other form, write ``slice_batch(batch, start, stop)`` in the
    LightningModule or its datamodule, and ``count_samples(batch)`` if the number of samples is
    unclear.

    With manual optimization, only the module knows how its losses belong together. A module that
    splits its batches itself, as `GANModule` does, gets a smaller ``micro_batch_size`` (see
    `MicroBatchModule`); for any other module the error is raised with a note. On several ranks (DDP),
    each rank finishes its gradient alone before they synchronize; hooks that communicate within a
    step, such as ``self.log(..., on_step=True, sync_dist=True)``, are not supported.

    Logged with the Trainer's ``log_every_n_steps``:

    - ``batch/size``: samples that went through the model at once;
    - ``batch/pieces``: micro-batches of the last batch;
    - ``batch/ooms``: out-of-memory errors so far;
    - ``batch/success_rate``: fraction of the last batches that went through at once (`resize`);
    - ``batch/lr_factor``: factor of the learning rate (`resize`).

    Args:
        mode: `split` splits batches and keeps the effective batch size; `resize` changes the
            loader's batch size, and splits only batches that are already too large.
        initial_size: Number of samples at once at the start; by default the whole batch.
        min_size: Smallest number of samples at once; in `resize` the smallest batch.
        max_size: Largest number of samples at once; in `resize` the largest batch.
        grow_after: Steps without an error before a larger size is tried; None never tries one
            (`split` only).
        grow_below: In `resize`, fraction of the memory below which the batch may grow.
        shrink_above: In `resize`, fraction of the memory above which the batch shrinks.
        min_success: In `resize`, fraction of the last 20 batches that must have gone through at
            once before the batch grows.
        learning_rate: In `resize`, how the learning rate follows the batch size: `none`, `linear`
            or `sqrt`.

    Raises:
        ConfigError: A value is out of range; in `setup` and later: this Lightning, strategy or
            loader cannot be used, or predictions cannot be joined.
        BatchMemoryError: `min_size` samples do not fit, or the optimizer's step does not; a
            torch.OutOfMemoryError too.
    """

    of_run = MappingProxyType({"_undo": ExitStack, "_replay": type(None), "_resizing": type(None)})

    def __init__(
        self,
        mode: Mode = "split",
        *,
        initial_size: int | None = None,
        min_size: int = 1,
        max_size: int | None = None,
        grow_after: int | None = 100,
        grow_below: float = 0.7,
        shrink_above: float = 0.9,
        min_success: float = 0.95,
        learning_rate: LearningRate = "none",
    ) -> None:
        check_choice("mode", mode, get_args(Mode))
        if mode == "resize" and grow_after is None:
            raise ConfigError(
                "grow_after=None with mode='resize': memory is checked every grow_after steps, "
                "so set grow_after"
            )
        self.mode = mode
        self.limits = SizeLimits(initial_size, min_size, max_size, grow_after)
        self.rules = ResizeRules(grow_below, shrink_above, min_success, learning_rate=learning_rate)
        self._resumed: dict[str, Any] = {}
        self._replay: Replay | None = None
        self._resizing: Resizing | None = None
        self._size_of_last_batch = 0
        self._size_of_full_batches = 0
        self._samples_of_full_batches = 0
        self._undo = ExitStack()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_resumed": self.state_dict()}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_version()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_automatic = pl_module.automatic_optimization
        if trainer.world_size > 1 and not is_automatic:
            log.warning(
                "AdaptiveBatchSize does not handle manual optimization on several ranks: "
                "out-of-memory errors are raised"
            )
            return
        self._warn_of_whole_steps(pl_module)
        replay = self._install(trainer, pl_module)
        if is_automatic:
            ranks = find_ranks(trainer, pl_module)
            if ranks is not None:
                self._undo.callback(ranks.close)
            steps = TrainingSteps(replay, ranks)
            loop = automatic_loop(trainer)
            self._undo.callback(wrap(loop, CLOSURE, steps.make_closure))
            self._undo.callback(wrap(loop, OPTIMIZER_STEP, steps.optimizer_step))
        elif isinstance(pl_module, MicroBatchModule):
            manual = ManualSteps(replay, pl_module)
            self._undo.callback(manual.close)
            self._undo.callback(wrap(pl_module, "add_gradients", manual.add_gradients))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.mode == "resize" and self._replay is not None:
            resizing = self._resizing = Resizing(trainer.train_dataloader, self.rules, self._replay)
            self._undo.callback(resizing.close)
            resizing.go_on(self._resumed)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        active = self._replay.finish() if self._replay is not None else None
        if active is None or self._replay is None:
            return
        self._size_of_last_batch = active.largest
        self._note_full_batch(active)
        if self._resizing is not None:
            self._resizing.follow(active)
        else:
            self._replay.grow(active)
        active.release()
        if is_logging_step(trainer, batch_idx):
            log_metrics(trainer, self._metrics(active))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:  # not within a fit, which has it already
            self._install(trainer, pl_module)

    def _begin_run(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer, pl_module)

    on_test_start = on_predict_start = _begin_run

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._replay is not None and is_out_of_memory(exception):
            is_manual = trainer.training and not pl_module.automatic_optimization
            if self._replay.unclear:
                exception.add_note(self._replay.unclear)
            elif is_manual and not isinstance(pl_module, MicroBatchModule):
                exception.add_note(
                    f"AdaptiveBatchSize cannot repeat steps of {type(pl_module).__name__}, which "
                    "uses manual optimization: lower data.loader.batch_size, or let the module "
                    "accumulate its gradients in micro-batches, as GANModule does"
                )
            elif self._replay.active is None:
                exception.add_note(
                    "AdaptiveBatchSize repeats steps that are given their batch, and memory ran out "
                    "elsewhere: in a hook between them, or in a step that takes dataloader_iter"
                )
        self._uninstall()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._uninstall()

    @override
    def state_dict(self) -> dict[str, Any]:
        replay = self._replay
        if replay is None:
            return dict(self._resumed)
        searches = {key: search.to_plain() for key, search in replay.searches.items()}
        state: dict[str, Any] = {"ooms": replay.ooms, "searches": searches}
        state["initial_size"] = self.limits.initial
        if self._resizing is not None:
            state["base"] = self._resizing.base
            state["batch_size"] = self._resizing.loader.batch_size
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Checked here, where it is known that the checkpoint is at fault.
        for plain in state_dict.get("searches", {}).values():
            SizeSearch.from_plain(plain)
        check_saved_counts("AdaptiveBatchSize", state_dict, _COUNTS & state_dict.keys())
        self._resumed = state_dict

    def summary(self) -> dict[str, float | int | str]:
        """Return ``batch/ooms`` and, after training, ``batch/size``.

        The size is the number of samples at once in full batches.
        """
        summary: dict[str, float | int | str] = {"batch/ooms": self.state_dict().get("ooms", 0)}
        if self._size_of_full_batches:
            summary["batch/size"] = self._size_of_full_batches
        return summary

    def _warn_of_whole_steps(self, pl_module: LightningModule) -> None:
        """Say of which options nothing comes where training steps take no part of a batch."""
        reason = ""
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            reason = "takes its batches from dataloader_iter"
        elif not (pl_module.automatic_optimization or isinstance(pl_module, MicroBatchModule)):
            reason = "uses manual optimization"
        remark = ""
        options = {"initial_size": self.limits.initial, "max_size": self.limits.largest}
        for name, size in options.items():
            if size is not None:
                remark += f", {name}={size} has no effect"
        if reason and (remark or "dataloader_iter" in reason):
            log.warning(
                "AdaptiveBatchSize does not repeat training steps of %s, which %s: out-of-memory "
                "errors are raised%s",
                type(pl_module).__name__,
                reason,
                remark,
            )

    def leaves_on_host(self, batch: Any) -> bool:  # noqa: ANN401 - any form
        """Return True if only micro-batches of the current batch reach the device."""
        active = self._replay.active if self._replay is not None else None
        return active is not None and active.whole is None and active.host is batch

    def _install(self, trainer: Trainer, pl_module: LightningModule) -> Replay:
        if self._replay is not None:
            return self._replay
        strategy = trainer.strategy
        gauge = open_gauge(strategy.root_device)
        replay = Replay(trainer, pl_module, self.limits, gauge, ooms=self._resumed.get("ooms", 0))
        initial = self.limits.initial
        if self._resumed.get("initial_size", initial) == initial:
            for key, plain in self._resumed.get("searches", {}).items():
                replay.searches[key] = self.limits.go_on(SizeSearch.from_plain(plain))
        self._replay = replay
        evaluation = EvaluationSteps(replay)
        self._undo.callback(wrap(strategy, "batch_to_device", replay.receive))
        for name in ("validation_step", "test_step", "predict_step"):
            self._undo.callback(wrap(strategy, name, evaluation.step))
        return replay

    def _uninstall(self) -> None:
        self._resumed = self.state_dict()
        self._undo.close()
        self._replay = self._resizing = None

    def _note_full_batch(self, active: ActiveBatch) -> None:
        """Keep the size of full batches, and ignore the short one at the end of an epoch."""
        if active.samples >= self._samples_of_full_batches:
            self._size_of_full_batches = active.largest
        if self._resizing is None:  # which moves what a full batch is
            self._samples_of_full_batches = max(self._samples_of_full_batches, active.samples)

    def _metrics(self, active: ActiveBatch) -> dict[str, float]:
        assert self._replay is not None
        metrics = {
            "batch/size": float(active.largest),
            "batch/pieces": float(active.micro_batch_count),
            "batch/ooms": float(self._replay.ooms),
        }
        if self._resizing is not None:
            metrics["batch/success_rate"] = self._resizing.success_rate
            metrics["batch/lr_factor"] = self._resizing.rate_factor
        return metrics
