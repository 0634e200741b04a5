import kornia.augmentation as ka
import pytest

from lit_data.augment import (
    ExternalTransform,
    Geometry,
    StripeAugment,
    as_augmentation,
    stage_augmentations,
)
from lit_data.errors import ConfigError


def test_what_becomes_an_augmentation() -> None:
    stripe, flip = StripeAugment(), ka.RandomHorizontalFlip()
    assert as_augmentation(None) is None
    assert as_augmentation(stripe) is stripe
    foreign = as_augmentation(flip)
    assert isinstance(foreign, ExternalTransform)
    assert flip in foreign.module.modules()
    with pytest.raises(ConfigError, match="'stripe' is not an augmentation: give one of lit_data"):
        as_augmentation("stripe")


def test_one_augmentation_is_for_training() -> None:
    stripe = StripeAugment()
    assert stage_augmentations(stripe) == {"train": stripe}
    assert stage_augmentations(None) == {}


def test_each_stage_may_have_its_own() -> None:
    stripe, crop = StripeAugment(), Geometry(crop_px=8)
    assert stage_augmentations({"train": stripe, "val": crop, "test": None}) == {
        "train": stripe,
        "val": crop,
    }


@pytest.mark.parametrize(
    ("stage", "match"),
    [
        (
            "trian",
            r"augment has no stage 'trian': choose of train, val, test, predict\. Did you mean 'train'\?",
        ),
        ("predicts", r"Did you mean 'predict'\?"),
        (7, r"augment has no stage 7: choose of train, val, test, predict\.$"),
    ],
)
def test_unknown_stages(stage: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        stage_augmentations({stage: StripeAugment()})
