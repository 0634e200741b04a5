"""Long strips train in patches at full resolution, unless a size is typed; the choice is said and written down."""

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.app.configuration.compose import check_run
from lit_data.app.configuration.tree import Engine, open_hydra
from lit_data.app.configuration.view_choice import PATCHES, VIEW_PX


@pytest.fixture(scope="module")
def hydra() -> Iterator[Engine]:
    with open_hydra() as engine:
        yield engine


@pytest.fixture
def strips(tmp_path: Path) -> Path:
    folder = tmp_path / "strips"
    (folder / "good").mkdir(parents=True)
    for number in range(3):
        cv2.imwrite(str(folder / "good" / f"{number}.png"), np.zeros((64, 1024), np.uint8))
    (folder / "good" / "damaged.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("")
    return folder


def test_strips_train_in_patches(
    strips: Path, hydra: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["+experiment=anomaly", f"data.root={strips}"]
    cfg, completed = check_run(hydra, "fit", typed)
    plain, _ = check_run(hydra, "fit", typed[:1])
    assert completed == [*typed, *PATCHES]
    assert (cfg.data.size_px, cfg.data.patch_px) == (None, VIEW_PX)
    assert plain.data.size_px == VIEW_PX
    said = capsys.readouterr().err
    assert "images of 64 x 1024 px become 256 x 256 px" in said
    assert f"data.size_px={VIEW_PX} uses whole images" in said


@pytest.mark.parametrize(
    "line",
    [
        "predict",
        "fit data.size_px=256",
        "fit data.patch_px=64",
        "fit data.fit=contain",
        "fit model=anomaly_texture",
        "fit resume=latest",
        "fit ckpt=last.ckpt",
        "fit +experiment=segmentation",
        "fit data.root=nowhere",
        "fit data.root=a,b",
    ],
)
def test_what_is_typed_stays(
    line: str, strips: Path, hydra: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *words = line.split()
    keys = {word.partition("=")[0] for word in words}
    if "+experiment" not in keys:
        words.append("+experiment=anomaly")
    if "data.root" not in keys:
        words.append(f"data.root={strips}")
    _, completed = check_run(hydra, command, words, multirun=True)
    assert not set(PATCHES) & set(completed)
    assert not capsys.readouterr().err


def test_images_of_usual_shape_train_whole(tmp_path: Path, hydra: Engine) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((300, 400), np.uint8))
    typed = ["+experiment=anomaly", f"data.root={tmp_path}"]
    assert check_run(hydra, "fit", typed)[1] == typed


@pytest.mark.parametrize(("size_px", "is_scaled"), [("256", False), ("512", True)])
def test_the_folder_and_the_size_of_an_own_file_are_seen(
    size_px: str, is_scaled: bool, strips: Path, tmp_path: Path
) -> None:
    experiments = tmp_path / "own" / "experiment"
    experiments.mkdir(parents=True)
    (experiments / "ribbons.yaml").write_text(
        "# @package _global_\ndefaults:\n  - anomaly\n  - _self_\n"
        f"data:\n  root: {strips}\n  size_px: {size_px}\n"
    )
    with open_hydra(tmp_path / "own") as hydra:
        cfg, _ = check_run(hydra, "fit", ["+experiment=ribbons"])
    assert cfg.data.size_px == (512 if is_scaled else None)
