"""The experiments of generative models go all the way at toy size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from lit_data.commands.configuration.compose import compose

CONF = Path(__file__).resolve().parents[2] / "conf"
OPTIONS = {  # option files, and the experiment that takes each
    "data/gan": "gan",
    "model/gan": "gan",
    "model/gan_rays": "gan_rays",
    "callbacks/gan": "gan",
    "callbacks/gan_lowmem": "gan_lowmem",
}
TOY = [
    "trainer.max_epochs=2",
    "trainer.check_val_every_n_epoch=1",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
    "data.loader.batch_size=4",
    "data.loader.num_workers=0",
    "data.image_px=16",
    "data.splits={train: 0.5, val: 0.25, test: 0.25}",
    "model.latent_size=4",
    "model.generator.width=4",
    "model.generator.max_width=8",
    "model.discriminator.width=4",
    "model.discriminator.max_width=8",
    "callbacks.images.every_n_steps=3",
    "callbacks.images.count=4",
    "callbacks.metrics.every_n_steps=3",
    "callbacks.metrics.count=8",
    "callbacks.metrics.batch_size=4",
]
DRAWN = "data.samples={count: 8, size_px: [16, 16], tiles: 2}"
RAYS = [
    "model.generator.plane_px=8",
    "model.generator.points=4",
    "model.patches.size_px=8",
    "model.generator.hidden=8",
]

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]

Run = Callable[..., dict[str, Any]]


def _find_data(experiment: str, folder: Path) -> list[str]:
    if experiment == "gan_images":
        folder.mkdir()
        rng = np.random.default_rng(0)
        for number in range(12):
            cv2.imwrite(
                str(folder / f"{number}.png"), rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            )
        return [f"+experiment={experiment}", f"data.root={folder}"]
    return [f"+experiment={experiment}", DRAWN, *(RAYS if experiment == "gan_rays" else [])]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_makes_its_experiment(option: str, tmp_path: Path) -> None:
    cfg = compose("fit", [f"+experiment={OPTIONS[option]}", f"paths.run={tmp_path}"])
    own = OmegaConf.load(CONF / f"{option}.yaml")
    assert isinstance(own, DictConfig)
    node = cfg[option.partition("/")[0]]
    assert own.keys() - {"defaults"} <= node.keys()
    assert own.get("_target_") == node.get("_target_")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["gan", "gan_images"])
def test_every_command_runs(experiment: str, run: Run, tmp_path: Path) -> None:
    words, sided = [*TOY, *_find_data(experiment, tmp_path / "images")], experiment == "gan"
    fitted = run("fit", *words)
    _check_fit(experiment, fitted)
    pictures = {path.name.partition("-")[0] for path in (fitted["folder"] / "images").iterdir()}
    assert pictures == ({"step", "views"} if sided else {"step"})
    tested = run("test", *words)
    assert tested["test/kid_small"] == pytest.approx(fitted["test/kid_small"], abs=1e-5)
    assert "val/kid_small" in run("validate", *words)
    predicted = run("predict", *words, "predict.count=3")
    assert (predicted["predict/images"], predicted["predict/objects"]) == (3, 3 if sided else 0)
    assert len(list((predicted["folder"] / "images").iterdir())) == 3
    assert run("show", *words, "show.count=2")["show/patches"] == 2
    assert run("prepare", *words)["prepare/images"] == (8 if sided else 12)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["gan_lowmem", "gan_rays"])
def test_the_others_train(experiment: str, run: Run, tmp_path: Path) -> None:
    fitted = run("fit", *TOY, *_find_data(experiment, tmp_path / "images"))
    _check_fit(experiment, fitted)
    assert {path.name.partition("-")[0] for path in (fitted["folder"] / "images").iterdir()} == {
        "step",
        "views",
    }


def _check_fit(experiment: str, fitted: dict[str, Any]) -> None:
    assert fitted["experiment"] == experiment
    for name in (
        "train/kid_small",
        "val/kid_small",
        "test/kid_small",
        "test/fid_small",
        "test/real_score",
    ):
        assert np.isfinite(fitted[name])
    assert fitted["cache/releases"] > 0
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 300
    for name in ("best.ckpt", "last.ckpt"):
        assert (fitted["folder"] / "checkpoints" / name).is_file()
