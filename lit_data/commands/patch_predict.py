"""``predict`` for patches: a probability map of every image, and a table of its defects."""

import csv
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import lightning as L
import numpy as np
from typing_extensions import override

from lit_data.commands.patch_pictures import draw_maps
from lit_data.datamodules import StripeDataModule
from lit_data.errors import ConfigError
from lit_data.inference import Defect, PatchStitcher, find_defects
from lit_data.io.readers import read_image

log = logging.getLogger(__name__)

_SHOWN: Final = 6
COLUMNS: Final = ("image", "y", "x", "area_px", "score", "height_px", "width_px")


class MapWriter(L.Callback):
    """Stitches predicted patches and writes each image as soon as it is complete.

    Into the folder go ``maps/<image>.png`` (16 bit, 65535 is probability 1), ``defects.csv`` and ``predictions.png``
    with the images that hold the surest defects.

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
