"""The options of ``predict``, in the configuration and in code."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pytest
from omegaconf import OmegaConf

from lit_data.app.configuration.targets import read_options
from lit_data.core.checks import list_options, read_arguments
from lit_data.core.errors import ConfigError
from lit_data.core.types import NEUTRAL
from lit_data.datamodules import InspectionDataModule
from lit_data.loading import LoaderOptions
from lit_data.predict import InspectionTask, LabelTask, StripeTask, Task
from lit_data.predict.options import PredictOptions, Use
from lit_data.wings.detection import BoxTask, DetectionDataModule
from lit_data.wings.gan import GenerateTask
from lit_data.wings.volumes import CTDataModule, VolumeTask
from lit_data.wings.watermarks import MarkTask

CONF = Path(__file__).resolve().parents[2] / "conf" / "predict.yaml"


def test_the_configuration_has_every_option_with_its_default() -> None:
    assert OmegaConf.to_container(OmegaConf.load(CONF).predict) == asdict(PredictOptions())
    lines = CONF.read_text().partition("predict:\n")[2].splitlines()
    assert all(re.search(r"# \w", line) for line in lines if line)


def test_what_changes_no_result_is_no_part_of_the_identity() -> None:
    one = PredictOptions(folder="a", resume=True, batch_size=3, readers=1, threads=2).identity()
    assert one == PredictOptions().identity()
    assert (
        one == PredictOptions(threshold=0.5).identity() != PredictOptions(threshold=0.4).identity()
    )
    assert one != PredictOptions(tile_px=256).identity()
    assert one != PredictOptions(image_threshold=0.5).identity()
    assert one.keys() >= {"threshold", "clean", "tile_px", "precision", "augment"}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"threshold": 1.5}, r"predict.threshold=1.5 must be between 0 and 1"),
        ({"image_threshold": -0.1}, r"predict.image_threshold=-0.1 must be between 0 and 1"),
        ({"image_score_fraction": 2}, r"predict.image_score_fraction=2 must be between 0 and 1"),
        ({"min_area_px": -1}, r"predict.min_area_px=-1.*need at least 0"),
        ({"on_bad": "ignore"}, r"'predict.on_bad' is 'ignore': give one of error, skip"),
        ({"margin_px": 3}, r"predict.margin_px=3 needs predict.overlap_px too"),
        ({"readers": "two"}, r"'predict.readers' is 'two': give a whole number"),
        ({"tiles": 3}, r"unknown key 'predict.tiles'.*Did you mean 'predict.tile_px'"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_options(PredictOptions, given, "predict")


@pytest.mark.parametrize("tile", [0, [512], [1, 2, 3], "big"])
def test_a_tile_is_one_or_two_sizes(tile: Any) -> None:
    with pytest.raises(ConfigError, match=r"predict\.tile_px"):
        _ = PredictOptions(tile_px=tile).tile_sides_px


def test_options_say_what_they_are_for() -> None:
    inputs = ["resume", "part", "of", "finish", "many_inputs", "to", "first"]
    assert PredictOptions.list_names(Use.INPUTS) == inputs
    assert set(PredictOptions.list_names(Use.TILES)) >= {"tile_px", "overlap_px", "compile"}
    work = ["memory_limit_bytes", "channels_last", "compile", "readers"]
    assert PredictOptions.list_names(Use.TILES, decides=False) == work
    every = {name for task in _list_tasks() for name in PredictOptions.list_names(task.uses)}
    never = set(PredictOptions.list_names()) - every - set(PredictOptions.list_names(Use.ANY))
    assert not never  # each option means something for some kind of data


def _list_tasks() -> list[type[Task[Any]]]:
    return [BoxTask, GenerateTask, InspectionTask, LabelTask, MarkTask, StripeTask, VolumeTask]


@pytest.mark.parametrize(
    ("uses", "options", "refused"),
    [
        (Use.INPUTS, {"min_area_px": 3}, "min_area_px=3"),
        (Use.INPUTS | Use.FINDING, {"overlap_px": 8}, "overlap_px=8"),
        (Use.INPUTS | Use.WINDOWS, {"overlap_px": 8}, None),
        (Use.INPUTS | Use.TILES, {"overlap_px": 8, "resume": True}, None),
        (Use.GENERATION, {"resume": True}, "resume=true"),
        (Use.GENERATION, {"batch_size": 3, "count": 2}, None),
    ],
)
def test_options_of_other_uses_are_refused(
    uses: Use, options: dict[str, Any], refused: str | None
) -> None:
    if refused is None:
        PredictOptions(**options).refuse_unused("this", uses)
        return
    with pytest.raises(ConfigError, match=f"predict.{refused} has no effect on this"):
        PredictOptions(**options).refuse_unused("this", uses)


class _Own(InspectionDataModule):
    """Names some options itself, without their roles, and has a neutral one of its own."""

    def __init__(
        self,
        root: str | None = None,
        *,
        loader: LoaderOptions | None = None,
        patch_px: int = 8,
        strength: float = 0.5,
        lamp: Annotated[str, NEUTRAL] = "left",
    ) -> None:
        super().__init__(root, loader=loader, patch_px=patch_px)


def test_options_of_data_say_whether_predictions_depend_on_them() -> None:
    neutral = list_options(InspectionDataModule, NEUTRAL)
    assert neutral >= {"loader", "batch_format", "splits", "cache", "patch_px", "folds", "exclude"}
    assert not neutral & {"root", "size_px", "scale", "value_range", "augment", "read", "classes"}
    assert "patch_px" not in list_options(DetectionDataModule, NEUTRAL)  # windows have that size
    assert "augment" in list_options(CTDataModule, NEUTRAL)  # which is of training alone
    assert list_options(_Own, NEUTRAL) == {"loader", "patch_px", "lamp"}
    assert read_arguments(InspectionDataModule).hints["fold"] is int  # the type alone
