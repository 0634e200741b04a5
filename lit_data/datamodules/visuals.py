"""What there is to say about samples, beside the samples: for pictures and exports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lit_data.synthesis import DefectPlan
from lit_data.synthesis.touches import Annotations
from lit_data.synthesis.values import ValueRange
from lit_data.types import Batch


@dataclass(frozen=True, slots=True)
class FamilyPreview:
    """True defects of one family, one in each patch.

    Attributes:
        name: Of the family.
        before: [n, H, W] float32 in 0..1, the target without its defect.
        after: [n, H, W] float32 in 0..1, the target with it.
        mask: [n, H, W] float32 in {0, 1}.
        severity: [n] float32, mean change in standard deviations of the noise; 0 where nothing can
            be seen.
        centre: [n, 2] float32, (y, x) of the defect.
    """

    name: str
    before: Tensor
    after: Tensor
    mask: Tensor
    severity: Tensor
    centre: Tensor


class Visuals:
    """The samples of one stage of a datamodule; this base has nothing to say.

    Batches are planned ones on the host, see `BaseDataModule.plan_batch`.
    """

    def annotate(self, batch: Batch) -> tuple[DefectPlan, Annotations] | None:
        """The defects drawn in a batch and where they show in finished samples; none if none are drawn."""
        return None

    def describe_plan(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """What was planned for some samples of a batch, one dict for each thing that is drawn."""
        return []

    def draw(self, batch: Batch) -> Batch | None:
        """Finished samples as they are before augmentation; none where nothing is augmented."""
        return None

    def preview_families(self, batch: Batch) -> list[FamilyPreview]:
        """Each family of the synthesis on its own, on the samples of a batch."""
        return []

    def whole_values(self) -> tuple[str, ValueRange] | None:
        """Dtype and value range in which finished samples are whole numbers; none where they are not."""
        return None
