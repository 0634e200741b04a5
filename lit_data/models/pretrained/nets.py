"""Segmenters and classifiers of segmentation_models_pytorch, timm and torchvision, for our modules."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.checks import check_choice, check_counts
from lit_data.core.errors import ConfigError
from lit_data.core.types import PathText
from lit_data.models.layers import count_outputs
from lit_data.models.pretrained.libraries import (
    IMAGENET,
    Normalize,
    NormalizedNet,
    building,
    check_options,
    fetching,
    open_library,
)
from lit_data.models.segmentation.nets import prior_logits
from lit_data.models.weights import fit_channels, load_weights_file, split_weights, take_weights

_HALVINGS_PX = 32  # what encoders of five stages divide sides by
_PAN_PX = 128  # whose pyramid halves three times more, from a sixteenth on


class SegmenterNet(NormalizedNet):
    """A net that returns logits of each pixel; untrained, they give the expected fractions.

    Args:
        net: See `NormalizedNet`.
        classes: Logits of each pixel, see `prior_logits`.
        prior: Expected fraction of each class; of all names together.
        options: Of `NormalizedNet`.
    """

    def __init__(
        self,
        net: nn.Module,
        classes: int | Sequence[str] | None,
        prior: float,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(net, **options)
        # Beside the bias of the head, which each architecture keeps elsewhere.
        self.bias = nn.Parameter(prior_logits(classes, prior))

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, K, H, W] of images [B, C, H, W] float32 in 0..1; any H and W."""
        return super().forward(images) + self.bias[:, None, None]


class SmpNet(SegmenterNet):
    """Any architecture and encoder of segmentation_models_pytorch.

    Args:
        classes: Logits of each pixel: how many; or names of classes, of which each has one and the
            background one more.
        architecture: ``unet``, ``unetplusplus``, ``fpn``, ``deeplabv3plus``, ``segformer``, ... as
            its `create_model`.
        encoder_name: Such as ``resnet34``; ``tu-NAME`` is a net of timm.
        weights: Name of weights of the encoder, ``imagenet`` for most; None starts at random; a
            file, see `load_weights_file`.
        channels: Of the images.
        prior: Expected fraction of each class, the output of the untrained net; of all names
            together.
        normalize: See `Normalize`.
        options: Further arguments of the architecture, such as ``decoder_channels``.

    Raises:
        ConfigError: The package is missing, a name is unknown, an option refused, or the weights
            cannot be fetched.
        DataError: The file of weights is none.
        StoreError: It fits not.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = 1,
        *,
        architecture: str = "unet",
        encoder_name: str = "resnet34",
        weights: PathText | None = None,
        channels: int = 3,
        prior: float = 0.1,
        normalize: Normalize = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        count = len(prior_logits(classes, prior))
        check_counts(classes=count, channels=channels)
        library = open_library("segmentation_models_pytorch")
        timm = open_library("timm")
        known = library.encoders.encoders
        if encoder_name in known:
            names = tuple(known[encoder_name]["pretrained_settings"])
        elif timm.is_model(encoder_name.removeprefix("tu-")) and encoder_name.startswith("tu-"):
            names = ("imagenet",)
        else:
            raise ConfigError(
                f"encoder_name={encoder_name!r} is unknown: choose one of "
                f"{', '.join(list(known)[:8])}, ... as "
                "segmentation_models_pytorch.encoders.get_encoder_names() lists them, or tu-NAME "
                "of timm"
            )
        name, file = split_weights(weights, names)
        shape = {"in_channels": channels, "classes": count, **check_options(options)}
        check_choice("architecture", architecture, [*library.MODEL_ARCHITECTURES_MAPPING])
        trained: Mapping[str, Any] = IMAGENET
        with building(f"{architecture} with {encoder_name}"):  # before any server is asked
            net = library.create_model(architecture, encoder_name, None, **shape)
        if name is not None:
            with fetching(name, encoder_name):
                net = library.create_model(
                    architecture, encoder_name, name if encoder_name in known else True, **shape
                )
                trained = library.encoders.get_preprocessing_params(encoder_name, name)
        multiple_px = _PAN_PX if architecture == "pan" else _HALVINGS_PX
        layout = {"trained": trained, "channels": channels, "multiple_px": multiple_px}
        super().__init__(net, classes, prior, normalize=normalize, **layout)
        load_weights_file(self, file)


class TorchvisionSegmenter(SegmenterNet):
    """DeepLab, FCN or LR-ASPP of torchvision.

    Args:
        classes: Logits of each pixel: how many; or names of classes, of which each has one and the
            background one more.
        model_name: Such as ``deeplabv3_resnet50``, ``fcn_resnet50``, ``lraspp_mobilenet_v3_large``.
        weights: ``imagenet`` for the backbone, ``coco`` for all but the head; None starts at
            random; a file, see `load_weights_file`.
        channels: Of the images.
        prior: Expected fraction of each class, the output of the untrained net; of all names
            together.
        normalize: See `Normalize`.
        options: Further arguments of the model.

    Raises:
        ConfigError: The package is missing, a name is unknown, an option refused, or the weights
            cannot be fetched.
        DataError: The file of weights is none.
        StoreError: It fits not.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = 1,
        *,
        model_name: str = "deeplabv3_resnet50",
        weights: PathText | None = None,
        channels: int = 3,
        prior: float = 0.1,
        normalize: Normalize = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        count = len(prior_logits(classes, prior))
        check_counts(classes=count, channels=channels)
        models = open_library("torchvision").models
        check_choice("model_name", model_name, models.list_models(module=models.segmentation))
        name, file = split_weights(weights, ("imagenet", "coco"))
        arguments = check_options(options)
        with building(model_name):
            net = models.get_model(
                model_name, weights=None, weights_backbone=None, num_classes=count, **arguments
            )
        if name is not None:
            trained = models.get_model_weights(model_name).DEFAULT
            start_by_name(
                net,
                backbone_weights(models, model_name) if name == "imagenet" else trained,
                name,
                model_name,
            )
        widen_first_layer(net, channels)
        super().__init__(
            net, classes, prior, normalize=normalize, trained=IMAGENET, channels=channels
        )
        load_weights_file(self, file)


class TimmNet(NormalizedNet):
    """Any classifier of timm.

    Args:
        classes: Names of the classes, or how many.
        model_name: As `timm.list_models` names them, also with a tag: ``resnet34``,
            ``convnext_tiny.in12k_ft_in1k``.
        weights: ``imagenet``: those that timm has under this name; None starts at random; a file,
            see `load_weights_file`.
        channels: Of the images.
        normalize: See `Normalize`.
        options: Further arguments of the model, such as ``drop_rate`` or, of transformers,
            ``img_size``.

    Raises:
        ConfigError: The package is missing, a name is unknown, an option refused, or the weights
            cannot be fetched.
        DataError: The file of weights is none.
        StoreError: It fits not.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = None,
        *,
        model_name: str = "resnet34",
        weights: PathText | None = None,
        channels: int = 3,
        normalize: Normalize = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        count = count_outputs(classes)
        check_counts(classes=count, channels=channels)
        timm = open_library("timm")
        # Hf-hub:NAME would read any server's file.
        if ":" in model_name or not timm.is_model(model_name):
            raise ConfigError(
                f"model_name={model_name!r} is unknown: choose a name of timm.list_models()"
            )
        name, file = split_weights(weights, ("imagenet",))
        shape = {"num_classes": count, "in_chans": channels, **check_options(options)}
        with building(model_name):  # before any server is asked
            net = timm.create_model(model_name, **shape)
        if name is not None:
            with fetching(name, model_name):
                net = timm.create_model(model_name, pretrained=True, **shape)
        trained = {key: net.pretrained_cfg.get(key) or value for key, value in IMAGENET.items()}
        super().__init__(net, normalize=normalize, trained=trained, channels=channels)
        load_weights_file(self, file)


class TorchvisionClassifier(NormalizedNet):
    """Any classifier of torchvision.

    Args:
        classes: Names of the classes, or how many.
        model_name: As `torchvision.models.list_models` names them, such as ``resnet18``,
            ``convnext_tiny``.
        weights: ``imagenet``; None starts at random; a file, see `load_weights_file`.
        channels: Of the images.
        normalize: See `Normalize`.
        options: Further arguments of the model, such as ``image_size`` of transformers.

    Raises:
        ConfigError: The package is missing, a name is unknown, an option refused, or the weights
            cannot be fetched.
        DataError: The file of weights is none.
        StoreError: It fits not.
    """

    def __init__(
        self,
        classes: int | Sequence[str] | None = None,
        *,
        model_name: str = "resnet18",
        weights: PathText | None = None,
        channels: int = 3,
        normalize: Normalize = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        count = count_outputs(classes)
        check_counts(classes=count, channels=channels)
        models = open_library("torchvision").models
        check_choice("model_name", model_name, models.list_models(module=models))
        name, file = split_weights(weights, ("imagenet",))
        with building(model_name):
            net = models.get_model(
                model_name, weights=None, num_classes=count, **check_options(options)
            )
        best = models.get_model_weights(model_name).DEFAULT
        if name is not None:
            start_by_name(net, best, name, model_name)
        widen_first_layer(net, channels)
        transforms = best.transforms()
        trained = {"mean": transforms.mean, "std": transforms.std}
        super().__init__(net, normalize=normalize, trained=trained, channels=channels)
        load_weights_file(self, file)


def backbone_weights(models: Any, model_name: str) -> Any:  # noqa: ANN401 - as above
    """Return torchvision's best ImageNet weights for the backbone of a net."""
    parts = ("mobilenet_v3_large", "resnet101", "resnet50", "vgg16")
    backbone = next(part for part in parts if part in model_name)
    return models.get_model_weights(backbone).DEFAULT


def start_by_name(net: nn.Module, weights: Any, name: str, model_name: str) -> None:  # noqa: ANN401 - as above
    """Load torchvision's weights into a net.

    Raises:
        ConfigError: They cannot be fetched.
    """
    with fetching(name, model_name):
        state = weights.get_state_dict(progress=False, check_hash=True)
    take_weights(net, state, f"weights={name}")


def widen_first_layer(net: nn.Module, channels: int) -> None:
    """Change the number of input channels of an RGB net's first convolution, see `fit_channels`."""
    for parent in net.modules():
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Conv2d) and layer.in_channels == 3:
                if channels != 3:
                    setattr(parent, name, _take_channels(layer, channels))
                return


def _take_channels(layer: nn.Conv2d, channels: int) -> nn.Conv2d:
    geometry: dict[str, Any] = {
        "kernel_size": layer.kernel_size,
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
    }
    other = nn.Conv2d(channels, layer.out_channels, bias=layer.bias is not None, **geometry)
    with torch.no_grad():
        other.weight.copy_(fit_channels(layer.weight, channels))
        if layer.bias is not None and other.bias is not None:
            other.bias.copy_(layer.bias)
    return other
