"""What each kind of data looks like: who draws it, and who writes what a model says of it."""

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

import lightning as L
from typing_extensions import override

from lit_data.commands.detection_pictures import draw_augmented_boxes, draw_box_samples, draw_found_boxes
from lit_data.commands.detection_predict import BoxWriter
from lit_data.commands.gan_pictures import draw_augmented_images, draw_image_samples
from lit_data.commands.gan_predict import generate
from lit_data.commands.gan_views import draw_generated
from lit_data.commands.patch_pictures import draw_patch_predictions, draw_patch_samples
from lit_data.commands.patch_predict import MapFiles
from lit_data.commands.plain_pictures import draw_plain_samples
from lit_data.commands.predict_images import predict_images
from lit_data.commands.predict_options import Predicted, PredictOptions, PredictRun
from lit_data.commands.previews import draw_augmented
from lit_data.commands.result import write_table
from lit_data.commands.volume_pictures import draw_reconstructions, draw_volume_samples
from lit_data.commands.volume_predict import VolumeWriter
from lit_data.commands.watermark_pictures import draw_augmented_marks, draw_mark_predictions, draw_mark_samples
from lit_data.commands.watermark_predict import MarkFiles
from lit_data.commands.whole_images import open_stripe_images, open_watermark_images
from lit_data.datamodules import CTDataModule, DetectionDataModule, GANDataModule, StripeDataModule, WatermarkDataModule
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.types import Batch, Stage

log = logging.getLogger(__name__)

Data = TypeVar("Data", bound=BaseDataModule)


class View(Generic[Data]):
    """How samples of a datamodule are drawn, and predictions of them written.

    Args:
        datamodule: A prepared and opened datamodule.
    """

    predicts: ClassVar[str]
    """What `method` must return, in words."""
    method: ClassVar[str] = "predict_step"
    """What a module needs for its predictions to be drawn."""
    candidates: ClassVar[int] = 64
    """Samples that those of a picture are chosen from."""

    def __init__(self, datamodule: Data) -> None:
        self.datamodule = datamodule

    def can_draw(self, model: L.LightningModule) -> bool:
        """Whether a model has the method that `draw_predictions` asks for."""
        found = getattr(model, self.method, None)
        return found is not None and getattr(found, "__func__", found) is not getattr(
            L.LightningModule, self.method, None
        )

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
    def predict(self, model: L.LightningModule, run: PredictRun, options: PredictOptions) -> Predicted:
        """Predict all there is, and write what comes of it into the folder of the run."""


class PatchView(View[BaseDataModule]):
    """Target, references and mask, with defects circled; the view of what has no other."""

    predicts = "dict with `probability`"

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        if not isinstance(self.datamodule, StripeDataModule):
            return draw_plain_samples(batch, path, title, count=count)
        return draw_patch_samples(self.datamodule, planned, batch, path, title, stage=stage, count=count)

    @override
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        return draw_patch_predictions(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage) -> None:
        draw_augmented(self.datamodule, planned, path, stage=stage, count=len(shown))

    @override
    def predict(self, model: L.LightningModule, run: PredictRun, options: PredictOptions) -> Predicted:
        if not isinstance(self.datamodule, StripeDataModule):
            raise ConfigError(f"predict cannot read the images of a {type(self.datamodule).__name__}")
        options.refuse("maps of defects", "clean", "count")
        if self.datamodule.source_files.layout == "single":
            log.warning(
                "layout=single: target and references are one image, so what is really in it is in all three and not "
                "found; the maps show false alarms only"
            )
        images = open_stripe_images(self.datamodule)
        files = MapFiles(images, run.folder, options)
        return predict_images(self.datamodule, model, images, files, run, options)


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
    def predict(self, model: L.LightningModule, run: PredictRun, options: PredictOptions) -> Predicted:
        options.refuse("images with boxes", "clean", "count", "resume", "quantise", "onnx")
        writer = BoxWriter(self.datamodule, run.folder, threshold=options.threshold, min_area_px=options.min_area_px)
        return _predict_batches(self.datamodule, model, run, writer, self.datamodule.bank.skipped)


class VolumeView(View[CTDataModule]):
    """Volumes: central slices, and their occupied voxels seen from outside."""

    predicts = "reconstructions"
    candidates = 8

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_volume_samples(self.datamodule, batch, path, title, count=count)

    @override
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        return draw_reconstructions(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage) -> None:
        """Volumes have no augmentation."""

    @override
    def predict(self, model: L.LightningModule, run: PredictRun, options: PredictOptions) -> Predicted:
        options.refuse("volumes", "clean", "count", "resume", "quantise", "onnx")
        writer = VolumeWriter(self.datamodule, run.folder, threshold=options.threshold)
        return _predict_batches(self.datamodule, model, run, writer, self.datamodule.volumes.bank.skipped)


class MarkView(PatchView):
    """Images with the masks of their watermarks."""

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_mark_samples(batch, path, title, count=count)

    @override
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        return draw_mark_predictions(self.datamodule, model, batch, path, title, count=count)

    @override
    def draw_augmented(self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage) -> None:
        draw_augmented_marks(self.datamodule, planned, shown, path, stage=stage)

    @override
    def predict(self, model: L.LightningModule, run: PredictRun, options: PredictOptions) -> Predicted:
        options.refuse("masks of watermarks", "count")
        images = open_watermark_images(cast(WatermarkDataModule, self.datamodule))
        files = MarkFiles(images, run.folder, options)
        return predict_images(self.datamodule, model, images, files, run, options)


class GANView(View[GANDataModule]):
    """Images and objects to learn from, and generated ones."""

    predicts = "images"
    method = "sample_images"

    @override
    def draw_samples(
        self, planned: Batch, batch: Batch, path: Path, title: str, *, stage: Stage, count: int
    ) -> list[int]:
        return draw_image_samples(self.datamodule, batch, path, title, stage=stage, count=count)

    @override
    def draw_predictions(self, model: L.LightningModule, batch: Batch, path: Path, title: str, *, count: int) -> bool:
        draw_generated(model, batch, self.datamodule.poses, path, title, count=count)
        return True

    @override
    def draw_augmented(self, planned: Batch, shown: Sequence[int], path: Path, *, stage: Stage) -> None:
        draw_augmented_images(self.datamodule, planned, shown, path, stage=stage)

    @override
    def predict(self, model: L.LightningModule, run: PredictRun, options: PredictOptions) -> Predicted:
        options.refuse("generated images", "clean", "resume", "quantise", "onnx")
        return generate(self.datamodule, model, run, options)


def open_view(datamodule: BaseDataModule) -> View[Any]:
    """The view of a datamodule, by its class."""
    return next(
        (view(datamodule) for kind, view in _VIEWS.items() if isinstance(datamodule, kind)), PatchView(datamodule)
    )


def _predict_batches(
    datamodule: BaseDataModule,
    model: L.LightningModule,
    run: PredictRun,
    writer: BoxWriter | VolumeWriter,
    bad: Sequence[tuple[str, str]],
) -> Predicted:
    """Predict batch by batch with a Trainer, for what is not cut into tiles."""
    run.folder.mkdir(parents=True, exist_ok=True)
    run.make_trainer([writer]).predict(model, datamodule=datamodule, return_predictions=False)
    write_table(run.folder / "bad.csv", ("image", "reason"), [{"image": path, "reason": why} for path, why in bad])
    return Predicted({**writer.finish(), "predict/images_bad": len(bad)}, bad)


_VIEWS: Final[Mapping[type[BaseDataModule], type[View[Any]]]] = {
    CTDataModule: VolumeView,
    DetectionDataModule: BoxView,
    GANDataModule: GANView,
    WatermarkDataModule: MarkView,
}
