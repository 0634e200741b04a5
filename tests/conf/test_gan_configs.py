"""The experiments of generative models go all the way at toy size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.outputs import GENERATED, NO_TIMELINES, QUICK, RAYS

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"
)

Run = Callable[..., dict[str, Any]]


def _find_data(experiment: str, folder: Path) -> list[str]:
    if experiment == "gan_images":
        folder.mkdir()
        rng = np.random.default_rng(0)
        for number in range(12):
            pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / f"{number}.png"), pixels)
        return [
            f"+experiment={experiment}",
            *QUICK,
            *NO_TIMELINES,
            *GENERATED[:-1],
            f"data.root={folder}",
        ]
    rays = RAYS if experiment == "gan_rays" else ()
    return [f"+experiment={experiment}", *QUICK, *NO_TIMELINES, *GENERATED, *rays]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["gan", "gan_images"])
def test_every_command_runs(experiment: str, run: Run, tmp_path: Path) -> None:
    words, sided = _find_data(experiment, tmp_path / "images"), experiment == "gan"
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
    fitted = run("fit", *_find_data(experiment, tmp_path / "images"))
    _check_fit(experiment, fitted)
    pictures = {path.name.partition("-")[0] for path in (fitted["folder"] / "images").iterdir()}
    assert pictures == {"step", "views"}


def _check_fit(experiment: str, fitted: dict[str, Any]) -> None:
    assert fitted["experiment"] == experiment
    for name in ("train/kid_small", "val/kid_small", "test/kid_small", "test/real_score"):
        assert np.isfinite(fitted[name])
    assert fitted["cache/releases"] > 0
    for name in ("samples.png", "predictions.png"):
        assert cv2.imread(str(fitted["folder"] / name)).shape[1] > 300
    for name in ("best.ckpt", "last.ckpt"):
        assert (fitted["folder"] / "checkpoints" / name).is_file()
