"""Detectors of torchvision: a net, and the module that trains, scores and runs them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from lit_data.augment.external import seeded
from lit_data.core.checks import check_choice, check_count
from lit_data.core.errors import ConfigError
from lit_data.core.types import Batch, PathText
from lit_data.models.layers import count_outputs, keep_statistics
from lit_data.models.pretrained.libraries import (
    building,
    check_options,
    fetching,
    open_library,
)
from lit_data.models.pretrained.nets import backbone_weights, start_by_name
from lit_data.models.schedule import OptimizerFactory, Schedule
from lit_data.models.weights import load_weights_file, split_weights
from lit_data.wings.detection.model.boxes import Objects
from lit_data.wings.detection.model.module import MOST_KEPT, DetectionModule
from lit_data.wings.detection.model.scores import SIZE_LIMITS_PX
from lit_data.wings.detection.model.targets import read_truths
from lit_inspect.boxes import LEAST_SCORE

_LEAST_SIDE_PX = 1e-3  # torchvision raises an error for boxes without area
_LONGEST = 2  # times the shorter side, as far as images are scaled


class TorchvisionDetector(nn.Module):
    """Faster R-CNN, FCOS, RetinaNet or SSD of torchvision, called like torchvision's own models.

    Images in 0..1 are normalized inside with the mean and deviation of ImageNet. All layers are
    trained. Batch normalization is of one kind with any weights, so that checkpoints fit.
    `freeze_norm` keeps its statistics fixed, as torchvision does with pretrained backbones, because
    batches of detectors are small.

    Args:
        classes: Number of classes of the data, without the background, or their names; None stands
            for 1.
        model_name: Such as ``fasterrcnn_resnet50_fpn``, ``fcos_resnet50_fpn``,
            ``retinanet_resnet50_fpn_v2``, ``ssdlite320_mobilenet_v3_large``.
        weights: ``coco`` for all but the head, ``imagenet`` for the backbone; None for random
            weights; or a file, see `load_weights_file`.
        size_px: Shorter side that images are scaled to; None keeps their size. SSD scales to its
            own size.
        freeze_norm: `auto` freezes if there are weights.
        options: Further arguments of the model, such as ``rpn_post_nms_top_n_train``.

    Raises:
        ConfigError: The package is missing, a name is unknown, an option is refused, or the weights
            cannot be downloaded.
        DataError: The file is not a file of weights.
        StoreError: The weights do not fit.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = None,
        *,
        model_name: str = "fasterrcnn_resnet50_fpn",
        weights: PathText | None = None,
        size_px: int | None = None,
        freeze_norm: Literal["auto"] | bool = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        classes = count_outputs(classes)
        check_count("classes", classes, 1)
        library = open_library("torchvision")
        models = library.models
        known = [
            name
            for name in models.list_models(module=models.detection)
            if not name.startswith(("mask", "key"))
        ]
        check_choice("model_name", model_name, known)
        name, file = split_weights(weights, ("imagenet", "coco"))
        arguments = {"num_classes": classes + 1, **check_options(options)}
        with building(model_name):
            net = models.get_model(model_name, weights=None, weights_backbone=None, **arguments)
        if name == "imagenet":
            with fetching(name, model_name):
                net = models.get_model(
                    model_name, weights_backbone=backbone_weights(models, model_name), **arguments
                )
        _unify_norms(net.requires_grad_(True), library.ops.FrozenBatchNorm2d)
        if name == "coco":
            start_by_name(net, models.get_model_weights(model_name).DEFAULT, name, model_name)
        self.net = net
        self.classes = classes
        self._size_px = size_px
        self._freezes_norm = weights is not None if freeze_norm == "auto" else freeze_norm
        if size_px is not None:
            check_count("size_px", size_px, 1)
            if net.transform.fixed_size is not None:
                raise ConfigError(
                    f"size_px={size_px}: {model_name} scales to {net.transform.fixed_size[0]} px: "
                    "null"
                )
            net.transform.min_size = (size_px,)
            net.transform.max_size = _LONGEST * size_px
        load_weights_file(self, file)

    @override
    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> Any:
        """Return the losses by name in training, and objects in evaluation; see torchvision.

        Args:
            images: Each [3, H, W] float32 in 0..1.
            targets: For each image ``boxes`` [N, 4] corners in px and ``labels`` [N] from 1; in
                training only.
        """
        if self._freezes_norm:
            keep_statistics(self)
        transform: Any = self.net.transform
        if self._size_px is None and transform.fixed_size is None and len(images):
            sides = [side for image in images for side in image.shape[-2:]]
            transform.min_size = (min(sides),)
            transform.max_size = max(sides)
        return self.net(list(images), targets)


def _unify_norms(net: nn.Module, frozen: type[nn.Module]) -> None:
    """Replace torchvision's frozen batch normalization by the ordinary one, with the same statistics."""
    for parent in net.modules():
        for name, layer in parent.named_children():
            if isinstance(layer, frozen):
                old: Any = layer
                norm = nn.BatchNorm2d(len(old.weight), eps=old.eps)
                norm.load_state_dict(layer.state_dict(), strict=False)
                setattr(parent, name, norm)


class TorchvisionDetectionModule(DetectionModule):
    """Trains any detector of torchvision with its own losses, and scores it like `DetectionModule`.

    It takes the batches of `DetectionModule`, and logs ``train/loss``, the sum, and ``train/NAME``
    for each of its parts in each step. In training it also logs ``val/loss``, for which each
    validation batch goes through the net again. After validation and test it logs ``map50`` and
    ``map``, prefixed with ``val/`` or ``test/``. Training skips boxes that are thinner than a
    thousandth of a pixel.

    Args:
        net: `TorchvisionDetector`, or your own net with the same interface: lists of images and
            targets in; a dict of losses in training, a list of dicts with ``boxes``, ``labels``
            from 1 and ``scores`` in evaluation.
        optimizer: Makes the optimizer from the parameters; AdamW by default.
        schedule: Learning rate over the run, see `learning_rate_factor`; `none` leaves it as the
            optimizer has it.
        score_threshold: See `DetectionModule`.
        iou_threshold: Of two objects of a class with a larger IoU, the one with the higher score
            stays.
        size_limits_px: See `DetectionModule`.

    Raises:
        ConfigError: The schedule is unknown, or a threshold is not a fraction; later, if the
            dataset has more classes than the net, or the net returns no losses in training.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule = "one_cycle",
        score_threshold: float | None = None,
        iou_threshold: float = 0.5,
        size_limits_px: Sequence[float] = SIZE_LIMITS_PX,
    ) -> None:
        super().__init__(
            net,
            optimizer=optimizer or partial(torch.optim.AdamW, lr=3e-4, weight_decay=5e-2),
            schedule=schedule,
            score_threshold=score_threshold,
            iou_threshold=iou_threshold,
            size_limits_px=size_limits_px,
        )
        for part in net.modules():
            if hasattr(part, "detections_per_img"):  # the heads of all kinds call them so
                head: Any = part
                head.score_thresh = LEAST_SCORE
                head.nms_thresh = iou_threshold
                head.detections_per_img = MOST_KEPT

    @override
    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:  # type: ignore[override]  # as torchvision's answer
        """Return ``boxes``, ``labels`` from 1 and ``scores`` of each of the images [B, 3, H, W]."""
        objects: list[dict[str, Tensor]] = self.net(list(images))
        return objects

    @override
    def find_loss(self, batch: Batch) -> Tensor:
        losses = self._find_losses(batch)
        self.log_dict(
            {f"train/{name}": loss.detach() for name, loss in losses.items()},
            batch_size=len(batch["image"]),
        )
        return _add(losses)

    @override
    def _compare(self, predictions: Any, batch: Batch) -> Tensor:
        """Return the loss from another pass, because torchvision's predictions do not include it."""
        # The loss samples its places at random: here the same ones in each validation.
        with _asked_for_losses(self.net), seeded(0, self.device):
            return _add(self._find_losses(batch))

    def _find_losses(self, batch: Batch) -> Mapping[str, Tensor]:
        losses = self.net(list(batch["image"]), read_targets(batch))
        if not isinstance(losses, Mapping) or not losses:
            raise ConfigError(
                f"the net gives a {type(losses).__name__} in training, not a dict of losses"
            )
        return losses

    @override
    def read_objects(
        self, predictions: Any, images: Tensor, score_threshold: float
    ) -> list[Objects]:
        objects = []
        for answer in predictions:
            order = answer["scores"].argsort(descending=True, stable=True)
            boxes, scores, labels = (answer[key][order] for key in ("boxes", "scores", "labels"))
            # FCOS and RetinaNet score label 0 too, which no target has.
            is_object = (scores > score_threshold) & (labels > 0)
            objects.append(
                {
                    "boxes": boxes[is_object].float(),
                    "scores": scores[is_object].float(),
                    "classes": labels[is_object] - 1,
                }
            )
        return objects


@contextmanager
def _asked_for_losses(net: nn.Module) -> Iterator[None]:
    """Put a net into training mode, except layers that would drop values or learn from them."""
    modes = {part: part.training for part in net.modules()}
    for part in modes:
        part.training = not isinstance(part, _NormBase | _DropoutNd)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _add(losses: Mapping[str, Tensor]) -> Tensor:
    total: Tensor = torch.stack([loss.float() for loss in losses.values()]).sum()
    return total


def read_targets(batch: Batch) -> list[dict[str, Tensor]]:
    """Return the targets of torchvision's detectors.

    Args:
        batch: Batch as for `DetectionModule`.

    Returns:
        For each image ``boxes`` [N, 4] float32 (left, top, right, bottom) in px and ``labels`` [N]
        int64 from 1; boxes without area are skipped.
    """
    truths = read_truths(batch)
    targets = []
    for row in range(len(batch["image"])):
        objects = truths.of(row)
        has_area = (objects.boxes[:, 2:] - objects.boxes[:, :2] > _LEAST_SIDE_PX).all(1)
        labels = objects.classes[has_area] + 1
        targets.append({"boxes": objects.boxes[has_area], "labels": labels})
    return targets
