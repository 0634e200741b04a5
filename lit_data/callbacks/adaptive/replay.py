"""Repetition of a step, in ever smaller micro-batches, until it fits into memory.

`AdaptiveBatchSize` wraps methods of Lightning, which a training batch goes through in this order::

    strategy.batch_to_device      Replay.receive                keeps the batch, moves it whole or leaves it here
    loop._optimizer_step          TrainingSteps.optimizer_step  names an error of the optimizer itself
      loop._make_closure          TrainingSteps.make_closure    gives the closure that is repeated:
        closure                   Replay.run                    attempt, undo, shrink; attempt, undo, shrink; ...
      optimizer.step              (once, on the gradient of all micro-batches)
    on_train_batch_end            Replay.finish, Replay.grow    ends the batch, and tries a larger size

and one of an evaluation in this one::

    strategy.batch_to_device      Replay.receive
    strategy.validation_step      EvaluationSteps.step          calls Replay.run, Replay.finish and Replay.grow

(``test_step`` and ``predict_step`` likewise). With manual optimization, a module's ``add_gradients`` replaces the
closure: `ManualSteps.add_gradients`.
"""

import gc
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from lightning import LightningModule, Trainer

from lit_data.callbacks.adaptive.active_batch import ActiveBatch, describe_shapes
from lit_data.callbacks.adaptive.delivery import Delivery
from lit_data.callbacks.adaptive.merge import Merger, list_places
from lit_data.callbacks.adaptive.snapshot import Restore, StepSnapshot, renew, save_random_state
from lit_data.callbacks.adaptive.whole_batch import has_transfer_hooks
from lit_data.callbacks.device_memory import MemoryGauge, MemoryReading
from lit_data.callbacks.events import Event, announce
from lit_data.callbacks.loader_facts import LoaderFacts, find_method, read_loader
from lit_data.core.batch_form import HINT, batch_tensors, count_plain, count_samples, slice_batch
from lit_data.core.errors import BatchMemoryError, ConfigError
from lit_data.core.lightning_internals import number_batch, results_of
from lit_data.core.out_of_memory import is_out_of_memory, make_memory_error, repeat
from lit_data.core.size_search import SizeLimits, SizeSearch
from lit_inspect.counts import counted

log = logging.getLogger(__name__)

T = TypeVar("T")
_GIB = 2**30
_ASKED = re.compile(r"(?:tried to allocate|allocate) ([\d.]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)
_NORM = re.compile("Expected more than 1 value per channel when training")


@dataclass
class Replay:
    """Keeps each batch as it arrives, and repeats steps that run out of memory.

    Attributes:
        trainer: Trainer that runs the steps.
        module: Module with the ``training_step``.
        limits: Limits of the sizes.
        gauge: Gauge of the device's memory.
        searches: Searches by stage and shapes.
        active: The batch of the current step.
        ooms: Number of out-of-memory errors so far.
        unclear: Reason why a batch could not be counted, if any.
    """

    trainer: Trainer
    module: LightningModule
    limits: SizeLimits
    gauge: MemoryGauge
    searches: dict[str, SizeSearch] = field(default_factory=dict)
    active: ActiveBatch | None = None
    ooms: int = 0
    unclear: str = ""
    _snapshot: StepSnapshot | None = None
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._delivery = Delivery(self.trainer, self.module, self.gauge)

    def receive(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Wrap the loop's transfer of a batch to the device.

        A batch that will be cut is also transferred as a whole, for hooks and for the step.
        """
        self.active = None
        facts = LoaderFacts()
        plain_samples = count_plain(batch)
        if not plain_samples:
            loader_number = kwargs.get("dataloader_idx", args[1] if len(args) > 1 else 0)
            facts = read_loader(self.trainer, loader_number)
        samples = self._count(batch, plain_samples, facts)
        if not samples:
            return call(batch, *args, **kwargs)
        cut = find_method(self.trainer, "slice_batch")
        if cut is None:
            cut = partial(slice_batch, samples=samples, stacked=facts.stacked)
        key = self._find_key(batch, samples)
        active = self.active = ActiveBatch(
            host=batch,
            samples=samples,
            index=number_batch(self.trainer),
            key=key,
            search=self.searches[key],
            move=lambda part: call(part, *args, **kwargs),
            cut=cut,
        )
        self._begin_measurement(active)
        if self.trainer.training and not self.module.automatic_optimization:
            # The module gets its batch whole, because only it knows how its losses belong together.
            active.is_manual = True
            active.largest = samples
            active.micro_batch_count = 1
            active.whole = active.move(batch)
        else:
            active.whole = self._deliver(active)
        return batch if active.whole is None else active.whole

    def save_state(self, active: ActiveBatch) -> Restore:
        """Keep what a step changes besides gradients, and return a function that restores it.

        This covers the batch, buffers, metrics, logged values and attributes of the module, and the
        global random generators.
        """
        restore_module = self._save_module(save_random_state(self.trainer.strategy.root_device))
        batch = self._delivery.keep(active)

        def restore() -> None:
            batch.restore()
            restore_module()

        return restore

    def run(self, active: ActiveBatch, attempt: Callable[[], T], undo: Restore) -> T:
        """Call `attempt` until it does not run out of memory.

        Args:
            active: The batch.
            attempt: Function that runs the step on the micro-batches of `active`.
            undo: Function that restores the state at the beginning of the step.

        Raises:
            BatchMemoryError: The smallest micro-batch does not fit.
        """

        def call() -> T:
            self._delivery.choose_cut(active, undo)
            return attempt()

        def shrink(text: str) -> None:
            undo()
            self.shrink(active, text)

        return repeat(call, shrink, partial(self.note, active=active))

    def join(self, outputs: Sequence[Any], counts: Sequence[int]) -> Any:  # noqa: ANN401 - what a step returns
        """Return the joined outputs of a step's micro-batches; see `Merger`.

        Args:
            outputs: Outputs, one for each micro-batch.
            counts: Number of samples in each micro-batch.

        Raises:
            ConfigError: The outputs are predictions, and a part of them would be lost.
        """
        merger = Merger(counts)
        joined = merger.merge(outputs)
        if self.trainer.predicting:
            merger.refuse_losses(outputs[0], f"use data.loader.batch_size={min(counts)}")
            self._tell_predicted(merger)
        elif merger.lost:
            stage = self.trainer.state.stage
            self._tell(
                f"{stage}: for {list_places(merger.lost)} hooks get the value of the last "
                "micro-batch"
            )
        return joined

    def note(self, error: Exception, active: ActiveBatch) -> str:
        """Announce an out-of-memory error to all callbacks, and raise any other error again.

        Returns:
            The first line of the error's text.

        Raises:
            BatchMemoryError: A micro-batch has a single sample, and batch norm cannot train on it.
        """
        if 1 in active.counts() and active.samples > 1 and _NORM.search(str(error)):
            raise make_memory_error(_describe_batch_norm(active)) from None
        if isinstance(error, BatchMemoryError) or not is_out_of_memory(error):
            raise error
        self.ooms += 1
        text = str(error).split("\n")[0]
        values = {"size": float(active.size), "index": float(active.index)}
        event = Event("oom", f"{counted(active.size, 'sample')} ran out of memory: {text}", values)
        announce(self.trainer, event, error)
        return text

    def shrink(self, active: ActiveBatch, text: str) -> None:
        """Continue with a smaller size, and release what the failed attempt left.

        Args:
            active: The batch.
            text: Text of the error.

        Raises:
            BatchMemoryError: There is no smaller size.
        """
        failed_size = active.size
        gc.collect()
        if self.trainer.strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()
        if active.is_measured:
            self.gauge.reset_peak()  # the peak of the failed attempt says nothing about smaller sizes
        reading = self.gauge.read()
        if failed_size <= active.search.min_size:
            raise make_memory_error(_describe_no_room(active, failed_size, text, reading))
        active.search.fail(failed_size, reading.limit_bytes)
        log.warning(
            "batch %d: %s at once ran out of memory; continuing with %d",
            active.index,
            counted(failed_size, "sample"),
            active.size,
        )
        self._announce_size(active)

    def finish(self) -> ActiveBatch | None:
        """End the step, and keep no reference to its batch.

        Returns:
            The batch, if its samples were counted.
        """
        active, self.active = self.active, None
        if active is None or not active.largest:
            return None
        active.search.succeed(active.largest, active.samples)
        return active

    def grow(self, active: ActiveBatch) -> None:
        """Try a larger size after enough clean steps, if the batch went through in several micro-batches."""
        search, grow_after = active.search, self.limits.grow_after
        if grow_after is None or search.clean < grow_after or active.micro_batch_count == 1:
            return
        size_before = active.size
        search.forget_failure(self.gauge.read().limit_bytes)
        search.grow()
        if active.size != size_before:
            self._announce_size(active)

    def _announce_size(self, active: ActiveBatch) -> None:
        counts = active.counts()
        samples = counted(counts[0], "sample goes", "samples go")
        text = f"{samples} through the model at once"
        values = {"size": float(counts[0]), "pieces": float(len(counts))}
        announce(self.trainer, Event("batch_size", text, values))

    def _count(self, batch: Any, plain_samples: int, facts: LoaderFacts) -> int:  # noqa: ANN401
        """Return the number of samples, from the module or its datamodule if one can count them.

        The result is 0 if there are none.

        Raises:
            ConfigError: The samples cannot be counted, and the batch has to be split.
        """
        count = find_method(self.trainer, "count_samples")
        if count is not None:
            samples = int(count(batch))
        else:
            samples = plain_samples or count_samples(batch, facts.sizes, stacked=facts.stacked)
        if samples:
            return samples
        lengths = sorted({len(tensor) for tensor in batch_tensors(batch)})
        if not lengths:
            return 0
        text = (
            f"AdaptiveBatchSize cannot tell how many samples a {type(batch).__name__} holds, whose "
            f"tensors have the lengths {', '.join(map(str, lengths))}: {HINT}, and "
            "count_samples(batch)"
        )
        if self.limits.initial is not None or self.limits.largest is not None:
            raise ConfigError(text)
        if not self.unclear:
            log.warning("%s; until then a batch that runs out of memory ends the run", text)
        self.unclear = text
        return 0

    def _deliver(self, active: ActiveBatch) -> Any:  # noqa: ANN401 - a batch
        """Transfer a batch to the device as a whole; None if its smallest micro-batch does not fit."""
        restore_random = save_random_state(self.trainer.strategy.root_device)
        # Changes that hooks make during the transfer are undone too.
        has_hooks = has_transfer_hooks(self.module)
        undo = self._save_module(restore_random) if has_hooks else restore_random
        on_host = False
        while True:
            try:
                batch = self._delivery.move(active, undo, on_host=on_host)
            except Exception as error:
                # The smallest size is tried again within the step, where other ranks learn of it.
                is_smallest = active.size <= active.search.min_size
                text = "" if is_smallest and is_out_of_memory(error) else self.note(error, active)
            else:
                active.restore_random = restore_random
                return batch
            undo()
            if is_smallest and on_host:
                return None
            if not is_smallest:
                self.shrink(active, text)
            on_host = True

    def _save_module(self, restore_random: Restore) -> Restore:
        """Keep the state of the module; the result restores it and the random generators."""
        snapshot = self._snapshot = renew(self._snapshot, self.module, results_of(self.trainer))

        def restore() -> None:
            snapshot.restore()
            self._tell_left_out(snapshot.left_out)
            restore_random()

        return restore

    def _tell_predicted(self, merger: Merger) -> None:
        """Log how predictions were joined if there was another way to join them."""
        if merger.guessed:
            self._tell(
                f"predict: numbers in {list_places(merger.guessed)} become means over the samples"
            )
        if merger.ambiguous:
            self._tell(
                f"predict: the samples of {list_places(merger.ambiguous)} are taken to lie in "
                "its first dimension, because another one has the same length"
            )

    def _tell_left_out(self, left_out: Mapping[str, str]) -> None:
        """Log the attributes of the module that a repeated step may have changed twice."""
        owner = type(self.module).__name__
        for name, reason in left_out.items():
            self._tell(
                f"the failed step changed {owner}.{name}, {reason}, and this cannot be undone"
            )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("AdaptiveBatchSize: %s", text)

    def _begin_measurement(self, active: ActiveBatch) -> None:
        """Begin a new peak if this step may be followed by a larger size."""
        grow_after = self.limits.grow_after
        if grow_after is not None and active.search.clean + 1 >= grow_after:
            self.gauge.reset_peak()
            active.is_measured = True

    def _find_key(self, batch: Any, samples: int) -> str:  # noqa: ANN401
        """Return the key of a search, and begin that search with its first batch."""
        stage = self.trainer.state.stage
        key = f"{stage.value if stage else ''}: {describe_shapes(batch, samples)}"
        if key not in self.searches:
            self.searches[key] = self.limits.begin_search()
        return key


def _describe_no_room(active: ActiveBatch, size: int, text: str, reading: MemoryReading) -> str:
    """Return the message that the smallest micro-batch does not fit.

    Args:
        active: The batch.
        size: Number of samples in the micro-batch.
        text: Text of the error.
        reading: Memory after the failed attempt was released.
    """
    asked = _ASKED.search(text)
    amount = asked.group(1) if asked else "an unknown amount"
    free_bytes = max(0, reading.limit_bytes - reading.allocated_bytes)
    indices: Any = active.host.get("index") if isinstance(active.host, Mapping) else None
    sample = f" (sample {int(indices[0])})" if indices is not None and len(indices) else ""
    samples = "one sample" if size == 1 else f"the smallest micro-batch of {size} samples"
    shapes = describe_shapes(active.host, active.samples)
    return (
        f"batch {active.index}{sample}: {samples} of {shapes} does not fit into memory: asked "
        f"for {amount}, {free_bytes / _GIB:.2f} of {reading.limit_bytes / _GIB:.2f} GiB free "
        f"({text}). Use a smaller patch or model, mixed precision (AMP), GradientCheckpointing, "
        "or stop other programs on the device"
    )


def _describe_batch_norm(active: ActiveBatch) -> str:
    """Return the message that batch norm cannot normalize a micro-batch of one sample."""
    counts = ", ".join(map(str, active.counts()))
    return (
        f"batch {active.index}: {active.samples} samples run in micro-batches of {counts}, "
        "because more do not fit into memory, and batch norm cannot train on one: use a "
        "data.loader.batch_size that leaves no single sample, a smaller patch or model, mixed "
        "precision (AMP), GradientCheckpointing, or a norm that does not depend on the batch "
        "(GroupNorm)"
    )
