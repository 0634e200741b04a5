"""Run a step again, in smaller pieces, until it fits."""

import gc
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import lightning as L
import torch

from lit_data.batch_form import HINT, batch_tensors, count_plain, count_samples, slice_batch
from lit_data.callbacks.adaptive.active_batch import Hand, describe_shapes, kind_of
from lit_data.callbacks.adaptive.batch_size_search import SizeSearch
from lit_data.callbacks.adaptive.snapshot import TransferSnapshot
from lit_data.callbacks.device_memory import MemoryGauge, MemoryReading
from lit_data.callbacks.events import Event, announce
from lit_data.callbacks.loader_facts import LoaderFacts, read_loader
from lit_data.checks import check_count, check_share
from lit_data.errors import BatchMemoryError, ConfigError
from lit_data.lightning_internals import number_batch
from lit_data.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)


_ASKED: Final = re.compile(
    r"(?:tried to allocate|allocate) ([\d.]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE
)


def describe_no_room(hand: Hand, size: int, text: str, reading: MemoryReading) -> str:
    """The smallest piece does not fit.

    Args:
        hand: The batch.
        size: Samples of the piece.
        text: Of the error.
        reading: Memory after the failed attempt was released.
    """
    found = _ASKED.search(text)
    free = max(0, reading.limit_bytes - reading.allocated_bytes)
    indices: Any = hand.host.get("index") if isinstance(hand.host, Mapping) else None
    named = f" (sample {int(indices[0])})" if indices is not None and len(indices) else ""
    many = "one sample" if size == 1 else f"the smallest piece of {size} samples"
    return (
        f"batch {hand.index}{named}: {many} of {describe_shapes(hand.host, hand.samples)} does not fit into memory: "
        f"asked for {found.group(1) if found else 'an unknown amount'}, {free / 2**30:.2f} of "
        f"{reading.limit_bytes / 2**30:.2f} GiB free ({text}). Use a smaller patch or model, mixed precision (AMP), "
        "GradientCheckpointing, or free the device of other programs"
    )


def describe_batch_norm(hand: Hand) -> str:
    """Single samples would fit, but batch norm has nothing to normalise in them."""
    return (
        f"batch {hand.index}: {hand.search.fails} samples at once do not fit into memory, and batch norm cannot train "
        "on one: use a smaller patch or model, mixed precision (AMP), GradientCheckpointing, or a norm that does not "
        "depend on the batch (GroupNorm)"
    )


T = TypeVar("T")
_NORM: Final = re.compile("Expected more than 1 value per channel when training")


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Between which sizes a search moves, and when.

    Attributes:
        initial: First size; none begins with whole batches.
        smallest: A batch is not cut into smaller pieces.
        largest: No piece is larger.
        grow_after: Clean steps before a larger size is tried; none never grows.
        target_memory: Share of the memory that the predicted peak of a larger size may reach.

    Raises:
        ConfigError: A value is out of range.
    """

    initial: int | None = None
    smallest: int = 1
    largest: int | None = None
    grow_after: int | None = 100
    target_memory: float = 0.9

    def __post_init__(self) -> None:
        for name, size in (
            ("initial_size", self.initial),
            ("min_size", self.smallest),
            ("max_size", self.largest),
            ("grow_after", self.grow_after),
        ):
            if size is not None:
                check_count(name, size, 1)
        check_share("target_memory", self.target_memory)
        if self.largest is not None and self.largest < self.smallest:
            raise ConfigError(f"max_size={self.largest} is below min_size={self.smallest}")


@dataclass
class Replay:
    """Takes batches in hand as they arrive, and replays steps that run out of memory.

    Attributes:
        trainer: Whose steps.
        module: Whose ``training_step``.
        limits: Of the sizes.
        gauge: Memory of the device.
        searches: By stage and shapes.
        hand: The batch of the step under way.
        ooms: Out-of-memory errors so far.
        unclear: Why a batch could not be counted, if one could not.
    """

    trainer: L.Trainer
    module: L.LightningModule
    limits: SizeLimits
    gauge: MemoryGauge
    searches: dict[str, SizeSearch] = field(default_factory=dict)
    hand: Hand | None = None
    ooms: int = 0
    unclear: str = ""
    _known: dict[Any, SizeSearch] = field(default_factory=dict)

    def take(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Around the transfer to the device: what will be split stays on the host until its pieces are needed."""
        self.hand = None
        plain, facts = count_plain(batch), LoaderFacts()
        if not plain:
            facts = read_loader(
                self.trainer, kwargs.get("dataloader_idx", args[1] if len(args) > 1 else 0)
            )
        samples = self._count(batch, plain, facts)
        if not samples:
            return call(batch, *args, **kwargs)
        hand = self.hand = Hand(
            host=batch,
            samples=samples,
            index=number_batch(self.trainer),
            search=self._search(batch, samples),
            move=lambda part: call(part, *args, **kwargs),
            cut=partial(self._cut, samples=samples, stacked=facts.stacked),
            restore_random=None,
            started_s=time.perf_counter(),
        )
        self._measure(hand)
        if hand.size < samples:
            return batch
        before = TransferSnapshot(self.module, self.trainer.strategy.root_device)
        hand.whole = self._move(hand)
        if hand.whole is None:
            before.restore()
            return batch
        before.finish()
        hand.restore_random = before.restore
        return hand.whole

    def run(self, hand: Hand, attempt: Callable[[], T], undo: Callable[[], None]) -> T:
        """Call `attempt` until it does not run out of memory.

        The next attempt begins after the ``except`` block, whose error holds the frames and tensors
        of the last one (pytorch/pytorch#18853).

        Args:
            hand: The batch.
            attempt: Runs the step on the pieces of `hand`.
            undo: Puts everything back to where the step began.

        Raises:
            BatchMemoryError: The smallest piece does not fit.
        """
        while True:
            try:
                return attempt()
            except Exception as error:
                text = self.note(error, hand)
            undo()
            self.shrink(hand, text)

    def note(self, error: Exception, hand: Hand) -> str:
        """The text of an out-of-memory error, which all callbacks are told of; any other error is
        raised again.

        Raises:
            BatchMemoryError: A single sample was left, and batch norm cannot train on it.
        """
        if hand.size == 1 < hand.samples and _NORM.search(str(error)):
            raise BatchMemoryError(describe_batch_norm(hand)) from None
        if isinstance(error, BatchMemoryError) or not is_out_of_memory(error):
            raise error
        self.ooms += 1
        text = str(error).split("\n")[0]
        values = {"size": float(hand.size), "index": float(hand.index)}
        announce(
            self.trainer,
            Event("oom", f"{hand.size} samples ran out of memory: {text}", values),
            error,
        )
        return text

    def shrink(self, hand: Hand, text: str, failed: int | None = None) -> None:
        """Go on with a smaller size, and give back what the failed attempt left.

        Args:
            hand: The batch.
            text: Of the error.
            failed: Samples that did not fit; by default those of its largest piece.

        Raises:
            BatchMemoryError: There is no smaller size.
        """
        failed = failed or hand.size
        hand.whole, hand.started_s = None, time.perf_counter()
        gc.collect()
        if self.trainer.strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()
        if hand.fixed_bytes is not None:
            self.gauge.reset_peak()
        if failed <= hand.search.min_size:
            raise BatchMemoryError(describe_no_room(hand, failed, text, self.gauge.read()))
        hand.search.fail(failed, self.gauge.read().limit_bytes)
        log.warning(
            "batch %d: %d samples at once ran out of memory; from here on %d",
            hand.index,
            failed,
            hand.size,
        )
        self.tell(hand)

    def finish(self) -> Hand | None:
        """The step is over: learn from it.

        Returns:
            The batch, which is let go.
        """
        hand, self.hand = self.hand, None
        if hand is None or not hand.largest:
            return None
        search = hand.search
        search.succeed(hand.largest, hand.samples, time.perf_counter() - hand.started_s)
        if hand.fixed_bytes is not None:
            search.learn(hand.largest, hand.fixed_bytes, self.gauge.read())
        return hand

    def grow(self, hand: Hand) -> bool:
        """Try a larger size if it is time to; whether the size changed."""
        search, after = hand.search, self.limits.grow_after
        if hand.fixed_bytes is None or after is None or search.clean < after:
            return False
        if hand.samples >= search.batch:
            search.clean = 0  # after a short batch the next one decides again
        memory_bytes = self.limits.target_memory * self.gauge.read().limit_bytes
        changed = search.take_back() or search.grow(hand.samples, memory_bytes)
        if changed:
            self.tell(hand)
        return changed

    def tell(self, hand: Hand) -> None:
        """Tell all callbacks of the size."""
        pieces = -(-hand.samples // hand.size)
        text = f"{hand.size} samples go through the model at once"
        announce(
            self.trainer,
            Event("batch_size", text, {"size": float(hand.size), "pieces": float(pieces)}),
        )

    def _count(self, batch: Any, plain: int, facts: LoaderFacts) -> int:  # noqa: ANN401
        """Samples of a batch, as the module or its datamodule counts them if one of them does; 0
        without any.

        Raises:
            ConfigError: They cannot be told, and the batch is to be split.
        """
        count = self._method("count_samples")
        samples = (
            int(count(batch))
            if count
            else plain or count_samples(batch, facts.sizes, stacked=facts.stacked)
        )
        if samples or not (lengths := sorted({len(tensor) for tensor in batch_tensors(batch)})):
            return samples
        text = (
            f"AdaptiveBatchSize cannot tell how many samples a {type(batch).__name__} holds, whose tensors have the "
            f"lengths {', '.join(map(str, lengths))}: {HINT}, and count_samples(batch)"
        )
        if self.limits.initial is not None or self.limits.largest is not None:
            raise ConfigError(text)
        if not self.unclear:
            log.warning("%s; until then a batch that runs out of memory ends the run", text)
        self.unclear = text
        return 0

    def _method(self, name: str) -> Callable[..., Any] | None:
        """A method that the module or its datamodule has for its own batches."""
        owners = (self.module, getattr(self.trainer, "datamodule", None))
        return next(
            (method for owner in owners if callable(method := getattr(owner, name, None))), None
        )

    def _move(self, hand: Hand) -> Any:  # noqa: ANN401 - a batch
        try:
            return hand.move(hand.host)
        except Exception as error:
            text = self.note(error, hand)
        if (
            hand.size > hand.search.min_size
        ):  # else the step tries again, where other ranks hear that it failed
            self.shrink(hand, text)
        return None

    def _measure(self, hand: Hand) -> None:
        """Begin to measure memory if this step may be followed by a larger size."""
        if self.limits.grow_after is not None and hand.search.clean + 1 >= self.limits.grow_after:
            self.gauge.reset_peak()
            hand.fixed_bytes = self.gauge.read().allocated_bytes

    def _search(self, batch: Any, samples: int) -> SizeSearch:  # noqa: ANN401
        quick = self.trainer.state.stage, kind_of(batch)
        found = self._known.get(quick) if quick[1] is not None else None
        if found is None:
            found = self._known[quick] = self._find_search(batch, samples)
        return found

    def _find_search(self, batch: Any, samples: int) -> SizeSearch:  # noqa: ANN401
        stage = self.trainer.state.stage
        key = f"{stage.value if stage else ''}: {describe_shapes(batch, samples)}"
        if key not in self.searches:
            smallest, largest = self.limits.smallest, self.limits.largest
            first = max(smallest, min(self.limits.initial or sys.maxsize, largest or sys.maxsize))
            self.searches[key] = SizeSearch(first, smallest, largest)
        return self.searches[key]

    def _cut(self, batch: Any, start: int, stop: int, *, samples: int, stacked: bool) -> Any:  # noqa: ANN401
        """A piece, as the module or its datamodule cuts it if one of them does."""
        cut = self._method("slice_batch")
        return (
            cut(batch, start, stop)
            if cut
            else slice_batch(batch, start, stop, samples, stacked=stacked)
        )
