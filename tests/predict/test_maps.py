"""``predict`` for stripes: whole images get what their patches got, whatever their layout and dtype."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_data.core.errors import ConfigError
from lit_data.core.types import Array, Batch
from lit_data.datamodules import StripeDataModule
from lit_data.loading import LoaderOptions
from lit_data.predict import Predicted, PredictOptions, find_defects, find_task
from lit_data.wings.watermarks import WatermarkDataModule
from lit_inspect.layouts import ROLES
from tests.helpers.reading import opened
from tests.predict.running import Marker, make_run, predict, read_rows

SIZE = (48, 80)
"""Of an image and, for the old way, of its one patch."""


pytestmark = pytest.mark.usefixtures("few_pictures")


def _predict(
    data: StripeDataModule, model: LightningModule, folder: Path, **options: Any
) -> Predicted:
    return predict(data, model, folder, **({"tile_px": 32, "multiple_px": 1} | options))


def _write_images(folder: Path, layout: str = "channels", dtype: str = "uint8") -> Path:
    rng, top = np.random.default_rng(0), 1 if dtype == "float32" else np.iinfo(dtype).max
    folder.mkdir()
    for number in range(2):
        pixels = (rng.random((3, *SIZE)) * top).astype(dtype)
        if layout == "channels":
            stacked = np.moveaxis(pixels, 0, -1)
            tifffile.imwrite(folder / f"{number}.tif", stacked, photometric="rgb")
        elif layout == "single":
            tifffile.imwrite(folder / f"{number}.tif", pixels[0])
        else:
            for role, channel in zip("abc", pixels, strict=True):
                tifffile.imwrite(folder / f"{number}_{role}.tif", channel)
    return folder


def _open(root: Path, **options: Any) -> StripeDataModule:
    data = StripeDataModule(
        str(root),
        cache_dir=str(root.parent / "cache"),
        patch_px=SIZE,
        splits={"train": 1.0},
        loader=LoaderOptions(batch_size=2, worker_kind="inline"),
        **options,
    )
    return opened(data, "predict")


def _read_map(folder: Path, name: str) -> Array:
    stored = cv2.imread(str(folder / "maps" / f"{name}.png"), cv2.IMREAD_UNCHANGED)
    assert stored.dtype == np.uint16
    return stored / 65535


@pytest.mark.parametrize(
    ("layout", "dtype", "options"),
    [
        ("channels", "uint8", {}),
        ("channels", "uint8", {"channels": (2, 0, 1)}),
        ("channels", "uint16", {"value_range": (1000, 50000)}),
        ("channels", "float32", {}),
        ("files", "uint16", {}),
        ("pairs", "uint8", {}),
        ("single", "uint8", {}),
    ],
)
def test_tiles_of_whole_images_say_what_patches_said(
    layout: str, dtype: str, options: dict[str, Any], tmp_path: Path
) -> None:
    root = _write_images(tmp_path / "set", layout, dtype)
    roles = {"files": ("target", "ref1", "ref2"), "pairs": ("target", "ref1")}.get(layout, ())
    files = {role: f"*_{letter}.tif" for role, letter in zip(roles, "abc", strict=False)}
    data = _open(root, layout=layout, **({"files": files} if files else {}), **options)
    model = Marker()
    found = _predict(data, model, tmp_path / "run")
    assert (found.metrics["predict/images"], found.bad) == (2, [])
    batch = data.transform(data.make_loader("predict").read(np.arange(2), 0), "predict")
    with torch.inference_mode():
        before = model.predict_step(batch, 0)["probability"][:, 0].numpy()
    assert before.std() > 0.01
    for number, name in enumerate(data.source.names(data.bank)):
        written = _read_map(tmp_path / "run", name)
        np.testing.assert_allclose(written, before[number], rtol=0, atol=2e-5)


def test_the_table_holds_what_the_maps_show(tmp_path: Path) -> None:
    data = _open(_write_images(tmp_path / "set"))
    _predict(data, Marker(), tmp_path / "run")
    names = ("0.tif", "1.tif")
    maps = {name: _read_map(tmp_path / "run", name).astype(np.float32) for name in names}
    level = np.floor(np.quantile(np.stack(list(maps.values())), 0.9) * 65535)
    threshold = float((level + 0.5) / 65535)  # between two levels of a map, which is rounded
    metrics, _ = _predict(data, Marker(), tmp_path / "run", threshold=threshold, min_area_px=2)
    rows = read_rows(tmp_path / "run" / "defects.csv")
    assert list(rows[0]) == ["image", "y", "x", "area_px", "score", "height_px", "width_px"]
    shown = [
        (name, f"{defect.y:.2f}", defect.height_px)
        for name, found in maps.items()
        for defect in find_defects(found, threshold=threshold, min_area_px=2)
    ]
    written = [(row["image"], f"{float(row['y']):.2f}", int(row["height_px"])) for row in rows]
    assert sorted(written) == sorted(shown)
    assert metrics["predict/defects"] == len(rows) > 2
    assert metrics["predict/images_with_defects"] == 2
    assert cv2.imread(str(tmp_path / "run" / "predictions.png")) is not None


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (
            lambda images: images[:, 0, 0],
            r"of Forgetful must return .* \[B, 1, H, W\].*returned \[",
        ),
        (lambda images: None, r"must return probabilities.*returned a NoneType"),
        (
            lambda images: {"probability": images, "mask": 1},
            r"must return probabilities.*a dict with probability \[.*, 3, 32, 32\], mask a int",
        ),
        (
            lambda images: {"probability": 9 * images[:, :1] - 3},
            r"probability goes from -\d.* to \d.*: predict_step must return values in 0..1",
        ),
        (
            lambda images: {"probability": images[:, :1] * torch.nan},
            r"predict_step returned NaN: the model overflows",
        ),
    ],
)
@pytest.mark.parametrize("large_px", [1, 10**6])
def test_modules_that_answer_something_else_are_told_what_to_answer(
    answer: Callable[[Tensor], Any], match: str, large_px: int, tmp_path: Path
) -> None:
    class Forgetful(Marker):
        def predict_step(self, batch: Batch, batch_idx: int) -> Any:
            return answer(batch["image"])

    data = _open(_write_images(tmp_path / "set"))
    with pytest.raises(ConfigError, match=match):
        _predict(data, Forgetful(), tmp_path / "run", large_px=large_px)


def test_modules_get_the_format_they_were_written_for(tmp_path: Path) -> None:
    class Tuple(Marker):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"image": torch.cat(batch, 1)[:, [2, 0, 1]]}

    root = _write_images(tmp_path / "set")
    _predict(_open(root), Marker(), tmp_path / "plain")
    data = _open(root, batch_format=["ref1", "ref2", "target", "mask"])
    _predict(data, Tuple(), tmp_path / "tuple")
    plain, other = (_read_map(tmp_path / name, "0.tif") for name in ("plain", "tuple"))
    np.testing.assert_array_equal(plain, other)


def test_options_and_augmentations_that_maps_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"predict.clean=true has no effect on maps of defects"):
        _predict(_open(_write_images(tmp_path / "set")), Marker(), tmp_path, clean=True)
    marks = WatermarkDataModule(augment={"predict": nn.Identity()}, cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"remove predict from data\.augment"):
        predict(marks, Marker(), tmp_path)


def test_an_image_with_a_wrong_reference_is_for_review(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = np.random.default_rng(0).integers(0, 255, (6, 10, 1), dtype=np.uint8)
    part = np.kron(blocks, np.ones((8, 8, 3), np.uint8))
    (tmp_path / "set").mkdir()
    for number in range(3):
        pixels = part.copy()
        if number == 1:
            pixels[..., 2] = part[::-1, ::-1, 2]
        tifffile.imwrite(tmp_path / "set" / f"{number}.tif", pixels, photometric="rgb")
    data = _open(tmp_path / "set")
    run = replace(make_run(tmp_path / "run"), reference_limits=(1.5, 0.0))
    options = PredictOptions(tile_px=32, multiple_px=1, threshold=0.01)
    found = find_task(data).predict(Marker(scale=100), run, options)
    rows = read_rows(tmp_path / "run" / "images.csv")
    assert [row["references"] for row in rows] == ["", "ref2 does not fit", ""]
    assert [row["verdict"] for row in rows] == ["defect", "review", "defect"]
    assert {row["image"] for row in read_rows(tmp_path / "run" / "defects.csv")} == {
        "0.tif",
        "2.tif",
    }
    assert found.metrics["predict/misfits"] == 1
    assert "1 image has references that do not fit" in caplog.text
    assert "1.tif: ref2 does not fit" in caplog.text


def test_a_missing_reference_is_said_of_its_image_alone(tmp_path: Path) -> None:
    root = _write_images(tmp_path / "set", "files")
    (root / "1_c.tif").unlink()
    files = {role: f"*_{letter}.tif" for role, letter in zip(ROLES, "abc", strict=True)}
    data = _open(root, layout="files", files=files, on_bad="skip")
    found = _predict(data, Marker(), tmp_path / "run")
    assert found.metrics["predict/images"] == 1
    assert [Path(path).name for path, _ in found.bad] == ["1_a.tif"]
    assert "1_c.tif: no such file" in found.bad[0][1]
