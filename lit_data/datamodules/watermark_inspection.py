"""What there is to say about watermark samples."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from lit_data.datamodules.inspection import Inspection
from lit_data.datamodules.watermark_transform import WatermarkTransform
from lit_data.datasets.watermarks import WatermarkDataset
from lit_data.synthesis.values import ValueRange
from lit_data.types import Batch, Stage

_BYTES = ValueRange(0.0, 255.0, whole=True)


class WatermarkInspection(Inspection):
    """See `Inspection`.

    Args:
        dataset: The patches of the stage.
        transformation: What is done with them.
        stage: Which stage.
    """

    def __init__(self, dataset: WatermarkDataset, transformation: WatermarkTransform, stage: Stage) -> None:
        self._dataset, self._transformation, self._stage = dataset, transformation, stage

    @override
    def describe_plan(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
        return self._transformation.describe_plan(batch, rows, self._dataset)

    @override
    def draw(self, batch: Batch) -> Batch | None:
        return self._transformation.draw(batch) if self._stage in self._transformation.augment else None

    @override
    def whole_values(self) -> tuple[str, ValueRange] | None:
        return None if self._stage in self._transformation.augment else ("uint8", _BYTES)
