"""The progress bar of ``predict``: images done, images per second, time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lit_data.inference import Progress


class ImageBar:
    """Counts images and tiles, and shows them.

    Args:
        bar: What shows them; None shows nothing.
        clock: Seconds.
    """

    def __init__(self, bar: Bar | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bar, self._clock = bar, clock
        self._start_s, self._done = clock(), 0

    def advance(self) -> None:
        """An image is done."""
        self._done += 1
        rate = self._done / max(self._clock() - self._start_s, 1e-9)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, rate=f"{rate:.2f} images/s")

    def show(self, progress: Progress) -> None:
        """Tiles went through the net."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], tiles=f"{progress.tiles_per_s:.1f} tiles/s")


@contextmanager
def image_bar(total: int, *, enabled: bool) -> Iterator[ImageBar]:
    """A bar on stderr while images are predicted.

    Args:
        total: Images.
        enabled: False shows nothing.
    """
    if not enabled:
        yield ImageBar(None)
        return
    words = (TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[tiles]}"))
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), *words, TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        bar.add_task("predicting", total=total, rate="", tiles="")
        yield ImageBar(bar)
