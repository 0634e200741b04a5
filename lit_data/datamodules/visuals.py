"""`Visuals`: plans and previews of samples, for pictures and exports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lit_data.core.types import Batch
from lit_data.core.value_range import ValueRange
from lit_data.synthesis import DefectPlan
from lit_data.synthesis.renderer import Annotations


@dataclass(frozen=True, slots=True)
class FamilyPreview:
    """True defects of one family, one in each patch.

    Attributes:
        name: Name of the family.
        before: [n, H, W] float32 in 0..1, the target without its defect.
        after: [n, H, W] float32 in 0..1, the target with its defect.
        mask: [n, H, W] float32 in {0, 1}.
        severity: [n] float32, mean change in standard deviations of the noise; 0 if nothing is
            visible.
        centre: [n, 2] float32, (y, x) of the defect.
    """

    name: str
    before: Tensor
    after: Tensor
    mask: Tensor
    severity: Tensor
    centre: Tensor


class Visuals:
    """Plans and previews of the samples of one stage of a datamodule; this base has none.

    Batches are planned and on the host; see `BaseDataModule.plan_batch`.

    Args:
        finish_plain: Function that finishes planned samples without augmentation; None if nothing
            is augmented.
    """

    def __init__(self, finish_plain: Callable[[Batch], Batch] | None = None) -> None:
        self._finish_plain = finish_plain

    def annotate(self, batch: Batch) -> tuple[DefectPlan, Annotations] | None:
        """Return a batch's synthetic defects and their places in finished samples; None without any."""
        return None

    def describe_plan(self, batch: Batch, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the plan of some samples of a batch, one dict for each synthetic defect."""
        return []

    def draw(self, batch: Batch) -> Batch | None:
        """Return finished samples before augmentation; None if nothing is augmented."""
        return self._finish_plain(batch) if self._finish_plain else None

    def preview_families(self, batch: Batch) -> list[FamilyPreview]:
        """Draw each family of the synthesis separately on the samples of a batch."""
        return []

    def whole_values(self) -> tuple[str, ValueRange] | None:
        """Return dtype and value range in which finished samples are integers; None if they are not."""
        return None
