"""What there is to say about images with boxes."""

from collections.abc import Callable

from typing_extensions import override

from lit_data.datamodules.inspection import Inspection
from lit_data.types import Batch


class DetectionInspection(Inspection):
    """See `Inspection`.

    Args:
        finish: Finishes planned samples without augmenting them; none where nothing is augmented.
    """

    def __init__(self, finish: Callable[[Batch], Batch] | None) -> None:
        self._finish = finish

    @override
    def draw(self, batch: Batch) -> Batch | None:
        return self._finish(batch) if self._finish else None
