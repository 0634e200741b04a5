"""The exported net of a detector."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.errors import ConfigError
from lit_data.core.types import Array
from lit_data.predict.net_facts import (
    NO_MAP,
    PROBES,
    UNUSED,
    NetFacts,
    list_verdicts,
    read_spread,
    to_input,
)
from lit_data.predict.options import ExportRequest, PredictOptions
from lit_data.wings.detection.datamodule import DetectionDataModule
from lit_data.wings.detection.model.module import DetectionModule
from lit_data.wings.detection.model.net import Predictions


class BoxNet(nn.Module):
    """Boxes and probabilities of a detector at all of its places, before suppression.

    Args:
        model: `DetectionModule`, or another one that returns `Predictions`.
        classes: Number of classes.
    """

    def __init__(self, model: LightningModule, classes: int) -> None:
        super().__init__()
        self.model = model
        self._classes = classes

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Find the boxes in images [B, C, h, w] float32 in 0..1.

        Returns:
            [B, P, 4 + classes]: (left, top, right, bottom) in fractions of the image, clipped to
            it,
            and the probability of each class.

        Raises:
            ConfigError: The module returns something else, or another number of classes.
        """
        predictions = self.model(images)
        is_known = isinstance(predictions, Predictions)
        if not is_known or predictions.logits.shape[2] != self._classes:
            raise ConfigError(
                f"{type(self.model).__name__} must give Predictions of {self._classes} classes, as "
                "lit_data.wings.detection.DetectorNet does, to be written as ONNX"
            )
        height, width = images.shape[2:]
        limits = predictions.boxes.new_tensor((width, height, width, height))
        fractions = (predictions.boxes / limits).clamp(0, 1)
        return torch.cat((fractions, predictions.logits.sigmoid()), 2)


def describe_boxes(data: DetectionDataModule, request: ExportRequest) -> NetFacts:
    """Describe the net of a detector for export.

    Args:
        data: Opened datamodule; some of its images become golden inputs.
        request: Model and options.

    Raises:
        ConfigError: The model is of another kind, or an option is not supported in files.
        DataError: No image can be read.
    """
    from lit_inspect.boxes import BoxRules
    from lit_inspect.rows import ArrayRows

    model, options = _check_detector(request.model), request.options
    options.refuse("an .inspect file", *UNUSED)
    rules = BoxRules(
        sample_px=data.source.size_px,
        stride_px=data.chosen_options.get("stride_px"),
        fill=data.fill,
        iou_threshold=model.iou_threshold,
    )
    net = BoxNet(model, len(data.classes)).eval()

    def cut_input(pixels: Array) -> Tensor:
        sample = next(rules.sample(ArrayRows(pixels)))
        return to_input(sample.pixels, data.values)

    def answer(pixels: Array, options: PredictOptions) -> Array:
        with torch.inference_mode():
            places: Array = net(cut_input(pixels))[0].numpy()
        return rules.thin(places)

    probes = [cut_input(pixels)[0] for pixels in read_spread(data.bank, data.source, PROBES)]
    with torch.inference_mode():
        net(probes[0][None])  # refuses an unsupported output before tracing
    return NetFacts(
        net=net,
        probes=probes,
        settings={
            **_list_boxes(options, data.classes),
            **list_verdicts(request),
            "boxes": asdict(rules),
        },
        scaling=None,
        values=data.values,
        options=options,
        bank=data.bank,
        source=data.source,
        answer=answer,
    )


def _check_detector(model: LightningModule) -> DetectionModule:
    if type(model).predict_step is not DetectionModule.predict_step:
        raise ConfigError(
            f"{type(model).__name__} cannot be exported: boxes need a "
            "lit_data.wings.detection.DetectionModule with its original predict_step"
        )
    assert isinstance(model, DetectionModule)
    if model.nms != "hard":
        raise ConfigError(
            f"model.nms={model.nms} cannot be used in an .inspect file, whose runtime supports "
            "hard: train with model.nms=hard"
        )
    return model


def _list_boxes(options: PredictOptions, classes: Sequence[str]) -> dict[str, Any]:
    return {
        **NO_MAP,
        "task": "boxes",
        "classes": list(classes),
        "threshold": options.least_score,
        "image_threshold": options.image_threshold,
        "min_area_px": options.min_area_px,
    }
