"""`AdaptiveBatchSize`: no run ends because a batch was too large."""

import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lit_data.callbacks.adaptive.active_batch import Hand
from lit_data.callbacks.adaptive.batch_size_search import SizeSearch
from lit_data.callbacks.adaptive.manual import AfterStep, ManualSteps
from lit_data.callbacks.adaptive.ranks import Ranks, find_ranks
from lit_data.callbacks.adaptive.replay import Replay, SizeLimits
from lit_data.callbacks.adaptive.resize import LearningRate, ResizeRules, Resizing
from lit_data.callbacks.adaptive.training import EvaluationSteps, TrainingSteps
from lit_data.callbacks.device_memory import open_gauge
from lit_data.callbacks.events import is_logging_step, log_metrics
from lit_data.callbacks.wrapping import wrap
from lit_data.checks import check_choice
from lit_data.errors import ConfigError
from lit_data.lightning_internals import (
    CLOSURE,
    OPTIMIZER_STEP,
    automatic_loop,
    check_version,
    manual_loop,
)
from lit_data.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)


Mode = Literal["split", "resize"]


class AdaptiveBatchSize(L.Callback):
    """Replays a batch that runs out of memory in halves, and grows again while memory and speed
    allow it.

    In training, an out-of-memory error in transfer, augmentation, forward, backward or the first
    optimizer step undoes what the step did to gradients, buffers, metrics, logged values, plain
    attributes of the LightningModule and random generators, and runs it again in smaller pieces.
    The gradient is the mean over the samples, as for the whole batch (the loss must be a mean over
    its samples), and the optimizer steps once, so ``global_step``, schedule and learning rate are
    those of a run that never failed. Batch norm sees pieces. Validation, test and prediction are
    split likewise, their outputs joined in order.

    Batches may be of any form that `lit_data.batch_form` can read: stacked tensors, lists with one
    entry for each sample, dicts with ``batch_idx``, dataclasses. One that could be read in two ways
    is refused where it has to be split; ``slice_batch(batch, start, stop)`` of the LightningModule
    or its datamodule, with ``count_samples(batch)`` where that is unclear too, cuts any other.

    A module with manual optimisation runs each piece as a ``training_step`` of its own, and steps
    its optimizers as often; a warning says so when it happens first. On several ranks (DDP), each
    finishes its gradient alone, then they meet; hooks that communicate within a step, such as
    ``self.log(..., on_step=True, sync_dist=True)``, would not find each other and are not
    supported.

    Logged with the Trainer's ``log_every_n_steps``:

    - ``batch/size``: samples that went through the model at once;
    - ``batch/pieces``: pieces of the last batch;
    - ``batch/ooms``: out-of-memory errors so far;
    - ``batch/skipped``: pieces given up so far (manual optimisation);
    - ``batch/success_rate``: share of the last batches that went through at once (`resize`);
    - ``batch/lr_factor``: what the learning rate is multiplied with (`resize`).

    Args:
        mode: `split` cuts batches and leaves the effective batch alone; `resize` moves the loader's
            batch size, and splits only what is too large already.
        initial_size: Samples at once to begin with; by default the whole batch.
        min_size: Fewest samples at once, in `resize` the smallest batch.
        max_size: Most samples at once, in `resize` the largest batch.
        grow_after: Steps without an error before a larger size is tried; none never grows (`split`
            only).
        target_memory: In `split`, share of the memory up to which the predicted peak of a larger
            size may reach.
        after_step: Manual optimisation, memory runs out after an optimizer stepped: `raise`, or
            `skip` the piece.
        grow_below: In `resize`, share of the memory below which the batch may grow.
        shrink_above: In `resize`, share of the memory above which the batch shrinks.
        min_success: In `resize`, share of the last 20 batches that must have gone through at once
            before it grows.
        learning_rate: In `resize`, how it follows the batch size: `none`, `linear` or `sqrt`.

    Raises:
        ConfigError: A value is out of range; in `setup` and later: this Lightning, strategy or
            loader cannot be used.
        BatchMemoryError: `min_size` samples do not fit.
    """

    def __init__(
        self,
        mode: Mode = "split",
        *,
        initial_size: int | None = None,
        min_size: int = 1,
        max_size: int | None = None,
        grow_after: int | None = 100,
        target_memory: float = 0.9,
        after_step: AfterStep = "raise",
        grow_below: float = 0.7,
        shrink_above: float = 0.9,
        min_success: float = 0.95,
        learning_rate: LearningRate = "none",
    ) -> None:
        check_choice("mode", mode, get_args(Mode))
        check_choice("after_step", after_step, get_args(AfterStep))
        if mode == "resize" and grow_after is None:
            raise ConfigError(
                "grow_after=None with mode='resize': memory is looked at every grow_after steps, so give one"
            )
        self.mode, self.after_step = mode, after_step
        self.limits = SizeLimits(initial_size, min_size, max_size, grow_after, target_memory)
        self.rules = ResizeRules(grow_below, shrink_above, min_success, learning_rate=learning_rate)
        self._resumed: dict[str, Any] = {}
        self._replay: Replay | None = None
        self._ranks: Ranks | None = None
        self._manual: ManualSteps | None = None
        self._resizing: Resizing | None = None
        self._last: Hand | None = None
        self._usual = self._most = 0
        self._retries = self._ooms = self._thrashed = 0
        self._undo: list[Callable[[], None]] = []

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        check_version()

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size > 1 and not pl_module.automatic_optimization:
            log.warning(
                "AdaptiveBatchSize leaves manual optimisation on several ranks alone: errors pass through"
            )
            return
        replay = self._install(trainer, pl_module)
        self._ranks = find_ranks(trainer, pl_module)
        if self._ranks is not None:
            self._undo.append(self._ranks.close)
        if pl_module.automatic_optimization:
            steps, loop = TrainingSteps(replay, self._ranks), automatic_loop(trainer)
            self._undo.append(wrap(loop, CLOSURE, steps.make_closure))
            self._undo.append(wrap(loop, OPTIMIZER_STEP, steps.optimizer_step))
        else:
            self._manual = ManualSteps(replay, self.after_step)
            self._manual.skipped = self._resumed.get("skipped", 0)
            self._undo += [
                wrap(manual_loop(trainer), "advance", self._manual.advance),
                self._manual.close,
            ]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.mode == "resize" and self._replay is not None:
            self._resizing = Resizing(trainer.train_dataloader, self.rules, self._replay)
            self._undo.append(self._resizing.close)
            self._resizing.base = self._resumed.get("base", self._resizing.base)
            self._resizing.set(self._resumed.get("batch_size", self._resizing.loader.batch_size))

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        hand = self._replay.finish() if self._replay is not None else None
        if hand is None or self._replay is None:
            return
        self._last = hand
        self._usual = (
            hand.largest if hand.samples >= self._most else self._usual
        )  # not of a last, short batch
        self._most = 0 if self._resizing is not None else max(self._most, hand.samples)
        self._watch_allocator(hand)
        if self._resizing is not None:
            self._resizing.follow(hand)
        else:
            self._replay.grow(hand)
        hand.host = hand.whole = hand.restore_random = None
        if is_logging_step(trainer, batch_idx):
            log_metrics(trainer, self._metrics(hand))

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._install(trainer, pl_module)

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install(trainer, pl_module)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self._replay is not None and self._replay.unclear and is_out_of_memory(exception):
            exception.add_note(self._replay.unclear)
        self._uninstall()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._uninstall()

    @override
    def state_dict(self) -> dict[str, Any]:
        replay = self._replay
        if replay is None:
            return dict(self._resumed)
        state: dict[str, Any] = {
            "ooms": replay.ooms,
            "skipped": self._manual.skipped
            if self._manual is not None
            else self._resumed.get("skipped", 0),
            "searches": {key: search.to_plain() for key, search in replay.searches.items()},
        }
        if self._resizing is not None:
            state |= {"base": self._resizing.base, "batch_size": self._resizing.loader.batch_size}
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for plain in state_dict.get("searches", {}).values():
            SizeSearch.from_plain(
                plain
            )  # raises here, where it is known that the checkpoint is at fault
        counts = {
            name: state_dict[name]
            for name in ("ooms", "skipped", "base", "batch_size")
            if name in state_dict
        }
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise ValueError(f"the state of AdaptiveBatchSize holds {counts}")
        self._resumed = state_dict

    def summary(self) -> dict[str, float | int | str]:
        """``batch/ooms``, ``batch/skipped`` and, after training, ``batch/size``: samples at once in full batches."""
        state = self.state_dict()
        counts = {"batch/ooms": state.get("ooms", 0), "batch/skipped": state.get("skipped", 0)}
        return counts | ({"batch/size": self._usual} if self._usual else {})

    def _install(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Replay:
        if self._replay is not None and self._undo:
            return self._replay
        gauge = open_gauge(trainer.strategy.root_device)
        replay = self._replay = Replay(
            trainer, pl_module, self.limits, gauge, ooms=self._resumed.get("ooms", 0)
        )
        for key, plain in self._resumed.get("searches", {}).items():
            replay.searches[key] = SizeSearch.from_plain(plain)
        evaluation, strategy = EvaluationSteps(replay), trainer.strategy
        self._undo.append(wrap(strategy, "batch_to_device", replay.take))
        for name in ("validation_step", "test_step", "predict_step"):
            self._undo.append(wrap(strategy, name, evaluation.step))
        return replay

    def _uninstall(self) -> None:
        self._resumed = self.state_dict()
        while self._undo:
            self._undo.pop()()
        self._replay = self._manual = self._resizing = self._ranks = None

    def _watch_allocator(self, hand: Hand) -> None:
        """Count steps in which the allocator had to give memory back: two in a row are as bad as an error."""
        assert self._replay is not None
        retries, ooms = self._replay.gauge.count_retries(), self._replay.ooms
        has_thrashed = (
            retries > self._retries and ooms == self._ooms
        )  # an error has shrunk the size already
        self._thrashed = self._thrashed + 1 if has_thrashed else 0
        self._retries, self._ooms = retries, ooms
        if self._thrashed == 2 and hand.largest > hand.search.min_size:
            self._thrashed = 0
            hand.search.fail(hand.largest, self._replay.gauge.read().limit_bytes)
            log.warning(
                "two steps running needed cached memory back: %d samples at once from now on",
                hand.size,
            )
            self._replay.tell(hand)

    def _metrics(self, hand: Hand) -> dict[str, float]:
        assert self._replay is not None
        metrics = {"size": hand.largest, "pieces": hand.pieces, "ooms": self._replay.ooms}
        found: dict[str, float] = {f"batch/{key}": float(value) for key, value in metrics.items()}
        if self._manual is not None:
            found["batch/skipped"] = float(self._manual.skipped)
        if self._resizing is not None:
            found["batch/success_rate"] = self._resizing.success_rate
            found["batch/lr_factor"] = self._resizing.rate_factor
        return found
