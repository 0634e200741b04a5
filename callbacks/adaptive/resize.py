"""Move the loader's batch size itself, and the learning rate with it if that is wanted."""

import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.optim import Optimizer

from lit_data.callbacks.adaptive.active_batch import Hand
from lit_data.callbacks.adaptive.replay import Replay
from lit_data.callbacks.events import Event, announce
from lit_data.checks import check_choice, check_share
from lit_data.errors import ConfigError
from lit_data.types import ResizableLoader

log = logging.getLogger(__name__)


LearningRate = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True, slots=True)
class ResizeRules:
    """When the batch size moves.

    Attributes:
        grow_below: Share of the memory below which it may grow.
        shrink_above: Share of the memory above which it shrinks.
        min_success: Share of the last batches that must have gone through at once before it grows.
        window: How many last batches.
        learning_rate: How the learning rate follows the batch size: `none`, `linear`, or its square
            root (`sqrt`).

    Raises:
        ConfigError: A value is out of range.
    """

    grow_below: float = 0.7
    shrink_above: float = 0.9
    min_success: float = 0.95
    window: int = 20
    learning_rate: LearningRate = "none"

    def __post_init__(self) -> None:
        check_choice("learning_rate", self.learning_rate, get_args(LearningRate))
        check_share("grow_below", self.grow_below)
        check_share("shrink_above", self.shrink_above)
        check_share("min_success", self.min_success)
        if self.grow_below >= self.shrink_above:
            raise ConfigError(
                f"grow_below={self.grow_below} must be below shrink_above={self.shrink_above}, or sizes swing"
            )


class Resizing:
    """Sets the loader's batch size between batches.

    Args:
        loader: The training loader.
        rules: When.
        replay: Has the searches.

    Attributes:
        base: The batch size that the learning rate belongs to.

    Raises:
        ConfigError: The loader's batch size cannot change within an epoch, or several ranks would
            change theirs apart.
    """

    def __init__(self, loader: object, rules: ResizeRules, replay: Replay) -> None:
        if not isinstance(loader, ResizableLoader) or not loader.resizable:
            raise ConfigError(
                "AdaptiveBatchSize(mode='resize') needs a loader whose batch_size can change within an epoch, and this "
                f"one is a {type(loader).__name__}: set data.loader.resizable=true with a lit_data loader, or use "
                "mode='split', which works with any"
            )
        if replay.trainer.world_size > 1:
            raise ConfigError(
                f"AdaptiveBatchSize(mode='resize') works on one device and this run has {replay.trainer.world_size} "
                "ranks, whose loaders must agree on each batch: use mode='split'"
            )
        self.loader, self.rules, self.replay = loader, rules, replay
        self.base = loader.batch_size
        self._successes: deque[bool] = deque(maxlen=rules.window)
        self._sizes = {loader.batch_size}
        self._rates: list[tuple[dict[str, Any], Any]] = []
        self._handles = [
            handle
            for optimizer in replay.trainer.optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._scale_rates),
                optimizer.register_step_post_hook(self._restore_rates),
            )
        ]

    @property
    def success_rate(self) -> float:
        """Share of the last batches that went through at once."""
        return sum(self._successes) / len(self._successes) if self._successes else 1.0

    @property
    def rate_factor(self) -> float:
        """What the learning rate is multiplied with in the step under way."""
        hand = self.replay.hand
        size = (
            hand.samples
            if hand is not None and hand.samples in self._sizes
            else self.loader.batch_size
        )
        ratio = size / self.base
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.rules.learning_rate]

    def set(self, size: int) -> None:
        """Use a batch size between the limits from the next assembled batch on, and tell all callbacks of it."""
        limits, before = self.replay.limits, self.loader.batch_size
        size = max(limits.smallest, min(size, limits.largest or size))
        if size != before:
            log.info("batch size %d instead of %d", size, before)
            self.loader.batch_size = size
            self._sizes.add(size)
            text = f"the loader's batches have {size} samples instead of {before}"
            announce(
                self.replay.trainer, Event("batch_size", text, {"size": float(size), "pieces": 1.0})
            )

    def follow(self, hand: Hand) -> None:
        """Decide after a step: down after memory ran out or became scarce, up while there is room."""
        search, after = hand.search, self.replay.limits.grow_after
        search.size = min(search.size, self.loader.batch_size)
        self._successes.append(hand.pieces == 1)
        if hand.fixed_bytes is not None:
            reading = self.replay.gauge.read()
            if reading.used_fraction > self.rules.shrink_above:
                search.recede(hand.largest, self.rules.shrink_above * reading.limit_bytes)
            elif after is not None and search.clean >= after:
                search.clean = 0
                has_room = reading.used_fraction < self.rules.grow_below
                if (
                    not search.take_back()
                    and has_room
                    and self.success_rate > self.rules.min_success
                ):
                    search.enlarge(self.rules.shrink_above * reading.limit_bytes)
        self.set(search.size)

    def close(self) -> None:
        """Leave the optimizers as they were, also if one was stopped on its way."""
        self._restore_rates()
        for handle in self._handles:
            handle.remove()

    def _scale_rates(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Only while the optimizer steps, so that no scheduler ever sees it."""
        self._restore_rates()
        factor = self.rate_factor
        if factor != 1:
            self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
            for group, rate in self._rates:
                group["lr"] = rate * factor

    def _restore_rates(self, *_: object) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []
