"""What each kind of data looks like: who draws it, and who writes what a model says of it."""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import lightning as L
from typing_extensions import override

from lit_data.commands.detection_pictures import draw_augmented_boxes, draw_box_samples, draw_found_boxes
from lit_data.commands.detection_predict import BoxWriter
from lit_data.commands.patch_pictures import draw_patch_predictions, draw_patch_samples
from lit_data.commands.patch_predict import MapWriter
from lit_data.commands.previews import draw_augmented
from lit_data.datamodules import DetectionDataModule, StripeDataModule
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.types import Batch, Stage

log = logging.getLogger(__name__)

Data = TypeVar("Data", bound=BaseDataModule)


class Writer(Protocol):
    """What a callback that writes predictions has beside its hooks."""

    def finish(self) -> dict[str, Any]:
        """End the files; return the numbers for summary.json."""
        ...


class View(Generic[Data]):
    """How samples of a datamodule are drawn, and predictions of them written.

    Args:
        datamodule: A prepared and opened datamodule.
    """

    predicts: ClassVar[str]
    """What `predict_step` must return, in words."""

    def __init__(self, datamodule: Data) -> None:
        self.datamodule = datamodule

    @abstractmethod
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        """Draw up to `count` samples of a finished batch and return which."""

    @abstractmethod
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        """Draw samples beside what a model makes of them; return whether it says something that can be drawn."""

    @abstractmethod
    def draw_augmented(self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage) -> None:
        """Draw samples before and after augmentation, if there is any."""

    @abstractmethod
    def open_writer(self, folder: Path, *, threshold: float, min_area_px: int) -> Writer:
        """What writes the predictions into a folder."""


class PatchView(View[BaseDataModule]):
    """Target, references and mask, with defects circled; the view of what has no other."""

    predicts = "dict with `probability`"

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_patch_samples(self.datamodule, planned, batch, path, title, stage=stage, count=count)

    @override
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        return draw_patch_predictions(model, batch, path, title, count=count)

    @override
    def draw_augmented(self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage) -> None:
        draw_augmented(self.datamodule, planned, path, stage=stage, count=len(shown))

    @override
    def open_writer(self, folder: Path, *, threshold: float, min_area_px: int) -> MapWriter:
        if not isinstance(self.datamodule, StripeDataModule):
            raise ConfigError(f"predict cannot stitch the patches of a {type(self.datamodule).__name__}")
        if self.datamodule.source_files.layout == "single":
            log.warning(
                "layout=single: target and references are one image, so what is really in it is in all three and not "
                "found; the maps show false alarms only"
            )
        return MapWriter(self.datamodule, folder, threshold=threshold, min_area_px=min_area_px)


class BoxView(View[DetectionDataModule]):
    """Images with their boxes."""

    predicts = "list of objects"

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_box_samples(self.datamodule, batch, path, title, count=count)

    @override
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        return draw_found_boxes(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage) -> None:
        draw_augmented_boxes(self.datamodule, planned, shown, path, stage=stage)

    @override
    def open_writer(self, folder: Path, *, threshold: float, min_area_px: int) -> BoxWriter:
        return BoxWriter(self.datamodule, folder, threshold=threshold, min_area_px=min_area_px)


def open_view(datamodule: BaseDataModule) -> View[Any]:
    """The view of a datamodule, by its class."""
    if isinstance(datamodule, DetectionDataModule):
        return BoxView(datamodule)
    return PatchView(datamodule)
