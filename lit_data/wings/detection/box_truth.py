"""`BoxTruth`: decides by boxes which images show a defect."""

from collections.abc import Sequence

import numpy as np

from lit_data.annotations.labels import LabelTable
from lit_data.core.types import Array
from lit_inspect.verdicts import GOOD

_SEVERAL = "several"


class BoxTruth:
    """Truth of images with boxes, see `KnowsTruth`: an image with a box shows a defect.

    It is unknown for an image with ignored regions only. If no image has a box, the truth of all
    images is unknown.

    Args:
        labels: Boxes of all images.

    Attributes:
        image_kinds: Class of the boxes of each image, or ``several``; ``good`` without a box.
    """

    def __init__(self, labels: LabelTable) -> None:
        self.image_kinds: Sequence[str] = []
        self._has_defect: list[bool | None] = []
        if not labels.object_count:
            self._has_defect = [None] * len(labels.ends)
            return
        kinds = []
        for number in range(len(labels.ends)):
            classes = labels.of(number)[:, 0].astype(np.int64)
            names = sorted({labels.classes[kind] for kind in classes[classes >= 0].tolist()})
            is_unknown = len(classes) > 0 and not names
            self._has_defect.append(None if is_unknown else bool(names))
            kind = names[0] if len(names) == 1 else _SEVERAL
            kinds.append(kind if names else "" if is_unknown else GOOD)
        self.image_kinds = kinds

    def has_defect(self, number: int, /) -> bool | None:
        """Return True if an image shows a defect; None if it is unknown."""
        return self._has_defect[number]

    def read_mask(self, number: int, /) -> Array | None:
        """Return None, because boxes say nothing about single pixels."""
        return None

    def describe_doubt(self) -> str:
        """Return why the truth of images is unknown, and what to do; empty if it is known."""
        if self.image_kinds:
            return ""
        return (
            "no image has a box, so it is unknown which images show a defect: give images with "
            "labels, and good ones without a box"
        )
