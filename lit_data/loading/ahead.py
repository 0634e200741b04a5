"""What a dataset is asked and told before a pass: its files, and the samples that come."""

from collections.abc import Callable
from functools import partial

from lit_data.loading.assembly import EpochProgress
from lit_data.loading.order import EpochOrder
from lit_data.types import LookAhead, RowWriter


def check_sources(rows: RowWriter) -> None:
    """Find files that were cut short before this process reads past their end and is killed."""
    check: Callable[[], None] | None = getattr(rows, "check_sources", None)
    if check is not None:
        check()


def look_ahead(rows: RowWriter, order: EpochOrder, progress: EpochProgress) -> LookAhead:
    """Let a dataset that fetches its samples know which ones come.

    Args:
        rows: The dataset, with ``look_ahead`` if it fetches.
        order: Order of the epoch.
        progress: Where in it the pass begins.
    """
    begin: Callable[..., LookAhead | None] | None = getattr(rows, "look_ahead", None)
    if begin is None:
        return _NothingAhead()
    # A function, because the order of a large set takes long and is seldom needed; bound to the
    # numbers of now, as progress goes on.
    position, epoch = progress.position, progress.epoch
    rest = partial(order.indices, position, order.length - position, epoch)
    return begin(rest, epoch) or _NothingAhead()


class _NothingAhead:
    """`LookAhead` of a dataset whose data are here."""

    def advance(self, samples: int) -> None: ...

    def close(self) -> None: ...
