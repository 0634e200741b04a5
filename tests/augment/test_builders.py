import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lit_data.augment import (
    Layers,
    StripeAugment,
    detection_augment,
    segmentation_augment,
    stripe_augment,
)

CONF = Path(__file__).resolve().parents[2] / "conf" / "augment"


def test_channels_of_segmentation_share_their_exposure() -> None:
    image = torch.rand(4, 1, 16, 16).expand(4, 3, 16, 16)
    augment = segmentation_augment(noise=0)
    result = augment(Layers(image), augment.draw(0, 0, np.arange(4), 3)).images
    assert torch.equal(result[:, 0], result[:, 2])


@pytest.mark.parametrize(
    ("name", "build"),
    [("stripe", StripeAugment), ("strong", stripe_augment), ("detection", detection_augment),
     ("segmentation", segmentation_augment)],
)  # fmt: skip
def test_files_hold_every_argument_with_its_default(name: str, build: type) -> None:
    given = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(given, dict)
    assert given.pop("_target_") == f"lit_data.augment.{build.__name__}"
    defaults = {
        key: parameter.default for key, parameter in inspect.signature(build).parameters.items()
    }
    if given.get("crop_px"):
        assert given["crop_px"] == "${data.patch_px}"  # the datamodule then reads a margin
        given["crop_px"] = defaults["crop_px"]
    assert given == {
        key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()
    }
