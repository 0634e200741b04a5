"""``predict``: a probability map and a table of defects for every image, or the objects found in it."""

import csv
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig
from typing_extensions import override

from lit_data.commands.detection_pictures import is_detection
from lit_data.commands.detection_predict import BoxWriter
from lit_data.commands.pictures import draw_maps
from lit_data.commands.session import build_datamodule, build_model, build_trainer, find_checkpoint, load_weights
from lit_data.datamodules import StripeDataModule
from lit_data.datamodules.base import BaseDataModule
from lit_data.errors import ConfigError
from lit_data.inference import Defect, PatchStitcher, find_defects
from lit_data.io.readers import read_image

log = logging.getLogger(__name__)

_SHOWN = 6
COLUMNS = ("image", "y", "x", "area_px", "score", "height_px", "width_px")


def run(cfg: DictConfig) -> dict[str, Any]:
    """Predict all images of the root.

    Writes into the run folder ``maps/<image>.png`` (16 bit, 65535 is probability 1), ``defects.csv`` and
    ``predictions.png`` with the images that hold the surest defects. For images with boxes see `BoxWriter`.

    Returns:
        Number of images, of images with defects or objects, and of defects or objects.
    """
    folder, checkpoint = Path(cfg.paths.run), find_checkpoint(cfg)
    datamodule, model = build_datamodule(cfg), build_model(cfg)
    datamodule.setup("predict")
    load_weights(model, checkpoint)
    writer = _open_writer(datamodule, folder, threshold=cfg.predict.threshold, min_area_px=cfg.predict.min_area_px)
    trainer = _build_trainer_of_one(cfg, callbacks=[writer], logger=False)
    trainer.predict(model, datamodule=datamodule, return_predictions=False)
    return writer.finish()


def _open_writer(
    datamodule: BaseDataModule, folder: Path, *, threshold: float, min_area_px: int
) -> "MapWriter | BoxWriter":
    """What writes the answers about the images of a datamodule."""
    if is_detection(datamodule):
        return BoxWriter(datamodule, folder, threshold=threshold, min_area_px=min_area_px)
    if not isinstance(datamodule, StripeDataModule):
        raise ConfigError(f"predict cannot stitch the patches of a {type(datamodule).__name__}")
    if datamodule.source_files.layout == "single":
        log.warning(
            "layout=single: target and references are one image, so what is really in it is in all three and not "
            "found; the maps show false alarms only"
        )
    return MapWriter(datamodule, folder, threshold=threshold, min_area_px=min_area_px)


def _build_trainer_of_one(cfg: DictConfig, **overrides: Any) -> L.Trainer:  # noqa: ANN401 - any Trainer argument
    """A Trainer of one process, because the patches of an image must meet in one, and images come in order.

    Raises:
        ConfigError: A launcher has started several.
    """
    trainer = build_trainer(cfg, **overrides)
    if not isinstance(trainer.strategy, ParallelStrategy):
        return trainer
    environment = trainer.strategy.cluster_environment
    if environment is not None and environment.creates_processes_externally and environment.world_size() > 1:
        raise ConfigError(
            f"predict runs in one process, and {environment.world_size()} were started: "
            "start it without torchrun or srun"
        )
    log.info("predict puts what it finds together in one process: only the first device is used")
    return build_trainer(cfg, devices=1, num_nodes=1, strategy="auto", **overrides)


class MapWriter(L.Callback):
    """Stitches predicted patches and writes each image as soon as it is complete.

    Args:
        datamodule: The images.
        folder: Where to write.
        threshold: Least probability of a defect's pixels.
        min_area_px: Smallest defect of the table.
    """

    def __init__(self, datamodule: StripeDataModule, folder: Path, *, threshold: float, min_area_px: int) -> None:
        self._bank = datamodule.bank
        self._names = datamodule.source_files.names(datamodule.bank)
        self._stitcher = PatchStitcher(datamodule.grid)
        self._folder, self._threshold, self._min_area_px = folder, threshold, min_area_px
        self._found: list[tuple[int, Sequence[Defect]]] = []

    @override
    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, dict) or not {"probability", "image_index", "position"} <= outputs.keys():
            raise ConfigError(
                f"predict_step of {type(pl_module).__name__} must return a dict with probability [B, 1, H, W], "
                "image_index [B] and position [B, 2]"
            )
        for number, probability in self._stitcher.add(
            outputs["probability"], outputs["image_index"], outputs["position"]
        ):
            _write_map(self._map_of(number), probability)
            defects = find_defects(probability, threshold=self._threshold, min_area_px=self._min_area_px)
            self._found.append((number, defects))

    def finish(self) -> dict[str, Any]:
        """Write the table.

        Returns:
            The numbers for summary.json.
        """
        path = self._folder / "defects.csv"
        with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.DictWriter(file, fieldnames=COLUMNS)
            writer.writeheader()
            for number, defects in self._found:
                writer.writerows({"image": self._names[number], **_round(defect)} for defect in defects)
        log.info("defects: %s", path)
        self._draw()
        return {
            "predict/images": len(self._found),
            "predict/images_with_defects": sum(bool(defects) for _, defects in self._found),
            "predict/defects": sum(len(defects) for _, defects in self._found),
        }

    def _draw(self) -> None:
        surest = sorted(self._found, key=lambda found: -max((defect.score for defect in found[1]), default=0))
        images = [
            (self._names[number], self._bank[number][0], read_image(self._map_of(number))[0] / 65535, defects)
            for number, defects in surest[:_SHOWN]
        ]
        draw_maps(images, self._folder / "predictions.png")

    def _map_of(self, number: int) -> Path:
        return self._folder / "maps" / f"{self._names[number]}.png"


def _write_map(path: Path, probability: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    # Encoded in memory, because imwrite turns a full disk into a return value without a reason.
    path.write_bytes(cv2.imencode(".png", np.rint(probability * 65535).astype(np.uint16))[1].tobytes())


def _round(defect: Defect) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(defect).items()}
