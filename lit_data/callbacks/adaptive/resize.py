"""Changes the loader's batch size between batches, and on request the learning rate with it."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.optim import Optimizer

from lit_data.callbacks.adaptive.active_batch import ActiveBatch
from lit_data.callbacks.adaptive.replay import Replay
from lit_data.callbacks.events import Event, announce
from lit_data.core.checks import check_choice, check_share
from lit_data.core.errors import ConfigError
from lit_data.core.types import ResizableLoader
from lit_inspect.counts import counted

log = logging.getLogger(__name__)


LearningRate = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True, slots=True)
class ResizeRules:
    """Conditions under which the batch size changes.

    Attributes:
        grow_below: Fraction of the memory below which the size may grow.
        shrink_above: Fraction of the memory above which the size shrinks.
        min_success: Fraction of the last batches that must have gone through at once before the
            size grows.
        window: Number of those batches.
        learning_rate: Rule by which the learning rate follows the batch size: `none`, `linear`, or
            its square root (`sqrt`).

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
                f"grow_below={self.grow_below} must be below shrink_above={self.shrink_above}, "
                "or sizes oscillate"
            )


class Resizing:
    """Sets the loader's batch size between batches.

    Args:
        loader: The training loader.
        rules: Conditions for a change.
        replay: Replay with the searches.

    Attributes:
        base: Batch size that the learning rate was set for.

    Raises:
        ConfigError: The loader's batch size cannot change within an epoch, or several ranks would
            change theirs independently.
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
        self.loader = loader
        self.rules = rules
        self.replay = replay
        self.base = loader.batch_size
        self._successes: deque[bool] = deque(maxlen=rules.window)
        self._sizes = {loader.batch_size}
        self._rates: list[tuple[dict[str, Any], Any]] = []
        self._handles = []
        for optimizer in replay.trainer.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._scale_rates))
            self._handles.append(optimizer.register_step_post_hook(self._restore_rates))

    @property
    def success_rate(self) -> float:
        """Fraction of the last batches that went through at once."""
        return sum(self._successes) / len(self._successes) if self._successes else 1.0

    @property
    def rate_factor(self) -> float:
        """Factor of the learning rate in the current step."""
        size = self.loader.batch_size
        active = self.replay.active
        # Batches are fetched ahead, so this step's batch may have another size than the next one.
        # A size that was never set is that of the short batch at the end of an epoch.
        if active is not None and active.samples in self._sizes:
            size = active.samples
        ratio = size / self.base
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.rules.learning_rate]

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue with a checkpoint's batch size, unless the loader has been given another since.

        Args:
            state: ``base`` and ``batch_size`` of the checkpoint; empty at the beginning.
        """
        configured = self.loader.batch_size
        base, size = state.get("base", configured), state.get("batch_size", configured)
        if configured in (base, size):
            self.base = base
            self.set(size)
        else:
            log.info(
                "batch size %d as configured now, instead of %d of the checkpoint", configured, size
            )

    def set(self, size: int) -> None:
        """Use a batch size within the limits from the next assembled batch on, and announce it."""
        limits = self.replay.limits
        before = self.loader.batch_size
        size = max(limits.smallest, min(size, limits.largest or size))
        if size == before:
            return
        log.info("batch size %d instead of %d", size, before)
        self.loader.batch_size = size
        self._sizes.add(size)
        text = f"the loader's batches have {counted(size, 'sample')} instead of {before}"
        values = {"size": float(size), "pieces": 1.0}
        announce(self.replay.trainer, Event("batch_size", text, values))

    def follow(self, active: ActiveBatch) -> None:
        """Shrink the size if a step ran out of memory or nearly did, and grow it if there is room."""
        search = active.search
        search.size = min(search.size, self.loader.batch_size)
        self._successes.append(active.micro_batch_count == 1)
        if active.is_measured:
            self._judge(active)
        self.set(search.size)

    def close(self) -> None:
        """Restore the optimizers, even if one was stopped during its step."""
        self._restore_rates()
        for handle in self._handles:
            handle.remove()

    def _judge(self, active: ActiveBatch) -> None:
        """Change the size by the memory peak, which is measured after a number of clean steps."""
        search = active.search
        grow_after = self.replay.limits.grow_after
        reading = self.replay.gauge.read()
        search.forget_failure(reading.limit_bytes)
        if reading.used_fraction > self.rules.shrink_above:
            # Counts as a failure, because it would otherwise be tried again at once.
            if active.largest > search.min_size:
                search.fail(active.largest, reading.limit_bytes)
            return
        if grow_after is None or search.clean < grow_after:
            return
        search.clean = 0
        has_room = reading.used_fraction < self.rules.grow_below
        if has_room and self.success_rate > self.rules.min_success:
            search.grow()

    def _scale_rates(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Scale learning rates only while the optimizer steps, so that no scheduler ever sees it."""
        self._restore_rates()
        factor = self.rate_factor
        if factor == 1:
            return
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in self._rates:
            group["lr"] = rate * factor

    def _restore_rates(self, *_: object) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []
