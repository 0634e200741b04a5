"""How far a prediction is."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """What was done so far.

    Attributes:
        images: Images handed out.
        tiles: Tiles that went through the net.
        seconds: Since the start.
    """

    images: int
    tiles: int
    seconds: float

    @property
    def images_per_s(self) -> float:
        """Images per second since the start."""
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def tiles_per_s(self) -> float:
        """Tiles per second since the start."""
        return self.tiles / self.seconds if self.seconds else 0.0


OnProgress = Callable[[Progress], None]


class Meter:
    """Counts, and tells a listener after each batch and each image.

    Args:
        listener: Who is told; none counts only.
        clock: Seconds, for tests.
    """

    def __init__(self, listener: OnProgress | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._listener, self._clock = listener, clock
        self._images = self._tiles = 0
        self._start_s = clock()

    def add_tiles(self, count: int) -> None:
        """So many tiles went through the net."""
        self._tiles += count
        self._tell()

    def add_image(self) -> None:
        """An image is complete."""
        self._images += 1
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(Progress(self._images, self._tiles, self._clock() - self._start_s))
