"""Predictions of single images: verdicts, and the classes of defects where they are told apart."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor

from lit_data.datamodules import InspectionDataModule
from lit_data.loading import LoaderOptions
from lit_data.models import AnomalyModule, PlaceGaussians, SegmentationModule
from lit_data.models.segmentation.anomaly_metrics import AnomalyMetrics
from lit_data.testing import QUIET
from tests.helpers.reading import opened
from tests.predict.running import predict, read_rows

pytestmark = pytest.mark.usefixtures("few_pictures")


class _Levels(LightningModule):
    """Says class 1 where pixels are near 0.4, class 2 where they are near 0.8."""

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        levels = torch.tensor([0.0, 0.4, 0.8]).view(1, 3, 1, 1)
        shares = (-100 * (batch["image"][:, :1] - levels).abs()).softmax(1)
        return {"probability": 1 - shares[:, :1], "classes": shares[:, 1:]}


def _predict(tmp_path: Path, *, returns: bool = False, **options: Any) -> Any:
    (tmp_path / "set").mkdir(parents=True)
    for number in range(3):
        image = np.zeros((70, 90), np.uint8)
        if number:
            image[5:15, 5:15] = 102
        if number == 2:
            image[40:60, 30:50] = 204
        cv2.imwrite(str(tmp_path / "set" / f"{number}.png"), image)
    data = InspectionDataModule(
        str(tmp_path / "set"), classes=["dent", "spot"], cache_dir=str(tmp_path / "cache")
    )
    model, folder = _Levels(), tmp_path / "out"
    predicted = predict(opened(data, "predict"), model, folder, tile_px=64, **options)
    return predicted.metrics if returns else folder


def test_each_defect_has_its_class_and_each_image_a_map_of_them(tmp_path: Path) -> None:
    for large_px in (50_000_000, 10):  # also through a temporary file
        folder = _predict(tmp_path / str(large_px), large_px=large_px)
        defects = read_rows(folder / "defects.csv")
        assert sorted((row["image"], row["class"], row["area_px"]) for row in defects) == [
            ("1.png", "dent", "100"),
            ("2.png", "dent", "100"),
            ("2.png", "spot", "400"),
        ]
        classes = cv2.imread(str(folder / "classes" / "2.png.png"), cv2.IMREAD_UNCHANGED)
        assert classes.dtype == np.uint8
        assert (classes == 1).sum() == 100
        assert (classes[40:60, 30:50] == 2).all()
        verdicts = [row["verdict"] for row in read_rows(folder / "images.csv")]
        assert verdicts == ["good", "defect", "defect"]


def test_the_verdict_is_that_of_the_score_where_images_have_a_threshold(tmp_path: Path) -> None:
    scores = []
    for fraction, threshold in ((0, None), (0.05, None), (0.05, 0.4), (0, 1.0)):
        scored = {"image_score_fraction": fraction, "image_threshold": threshold}
        folder = _predict(tmp_path / f"{fraction}{threshold}", large_px=10, **scored)
        rows = read_rows(folder / "images.csv")
        scores.append([float(row["score"]) for row in rows])
        by_score = [score >= (threshold or 0) for score in scores[-1]]
        by_defects = [row["defects"] != "0" for row in rows]
        defective = by_defects if threshold is None else by_score
        assert [row["verdict"] for row in rows] == [("good", "defect")[bad] for bad in defective]
    assert scores[0] == pytest.approx([0, 1, 1], abs=1e-3)
    # 315 of 6300 px: of image 1 100 are a defect
    assert scores[1] == scores[2] == pytest.approx([0, 100 / 315, 1], abs=1e-3)


def test_tables_and_counts_go_by_the_verdict(tmp_path: Path) -> None:
    options = {"image_score_fraction": 0.05, "image_threshold": 0.4}
    predicted = _predict(tmp_path, returns=True, **options)
    rows = read_rows(tmp_path / "out" / "images.csv")
    # Of image 1 a dent is found, but too few of its pixels for a defective image.
    assert [row["verdict"] for row in rows] == ["good", "good", "defect"]
    assert [row["defects"] for row in rows] == ["0", "0", "2"]
    assert {row["image"] for row in read_rows(tmp_path / "out" / "defects.csv")} == {"2.png"}
    assert predicted["predict/images_with_defects"] == 1
    assert predicted["predict/defects"] == 2


def test_each_image_gets_a_picture_unless_none_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        folder = _predict(tmp_path / "with", image_threshold=0.4, image_score_fraction=0.05)
    pictures = sorted(path.name for path in (folder / "pictures").iterdir())
    assert pictures == ["0.png.jpg", "1.png.jpg", "2.png.jpg"]
    found = np.array([43, 214, 106])
    greens = []
    for name in pictures:
        picture = cv2.imread(str(folder / "pictures" / name))[..., ::-1].astype(int)
        greens.append(int((np.abs(picture - found) < 60).all(-1).sum()))
    assert greens[0] == greens[1] == 0  # the verdict is good
    assert greens[2] > 50
    assert caplog.messages[-1] == f"3 images: 1 defect, 2 good; {folder}"
    without = _predict(tmp_path / "without", pictures=False)
    assert not (without / "pictures").exists()
    large = _predict(tmp_path / "large", large_px=10)
    assert not (large / "pictures").exists()


class _Brightness(torch.nn.Module):
    """A logit of each pixel from the pixel alone, so that it is the same in every patch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(6.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * (images[:, :1] - 0.5)


def _write_noise(folder: Path) -> None:
    """Images smaller than a patch, of one, and of several that overlap; two show a defect."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for number, size in enumerate([(40, 90), (64, 64), (100, 150), (70, 64)]):
        image, mask = generator.integers(0, 200, size, dtype=np.uint8), np.zeros(size, np.uint8)
        if number % 2:
            image[:9, -9:] += 50
            mask[:9, -9:] = 255
        cv2.imwrite(str(folder / f"{number}.png"), image)
        cv2.imwrite(str(folder / f"{number}_mask.png"), mask)


@pytest.mark.parametrize("fraction", [0, 0.1])
def test_images_score_in_prediction_as_in_validation(tmp_path: Path, fraction: float) -> None:
    _write_noise(tmp_path / "set")
    names = [f"{number}.png" for number in range(4)]
    data = InspectionDataModule(
        str(tmp_path / "set"),
        splits={"train": [], "val": names, "test": []},
        patch_px=64,
        cache_dir=str(tmp_path / "cache"),
        loader=LoaderOptions(batch_size=3, num_workers=0),
    )
    options = {"baseline": False, "false_alarms_per_patch": None}
    options |= {"anomaly_metrics": True, "image_score_fraction": fraction}
    model = SegmentationModule(_Brightness(), **options)
    metric = AnomalyMetrics(score_fraction=fraction)
    metric.sizes_px = opened(data, "validate").image_sizes_px
    for batch in data.val_dataloader():
        finished = data.finish_batch(batch, "val")
        found = model.predict_step(finished, 0)["probability"].detach()
        metric.update(found, finished["mask"], batch["image_index"], batch["position"])
    Trainer(**QUIET).validate(model, data, verbose=False)
    data.setup("predict")
    threshold = float(model.image_threshold)
    chosen = {"image_score_fraction": fraction, "image_threshold": threshold, "tile_px": 64}
    predicted = predict(data, model, tmp_path / "out", **chosen).metrics
    rows = read_rows(tmp_path / "out" / "images.csv")
    numbers, scores, _ = metric.score_images()
    in_prediction = {row["image"]: float(row["score"]) for row in rows}
    names = [f"{number}.png" for number in numbers.tolist()]
    in_validation = dict(zip(names, scores.tolist(), strict=True))
    assert in_prediction == pytest.approx(in_validation, abs=5.1e-5)  # of four digits
    computed = {name: float(value) for name, value in metric.compute().items()}
    assert threshold == pytest.approx(computed["image_f1_max_threshold"], abs=1e-6)
    wrong = sum(row["verdict"] != row["truth"] for row in rows)
    assert predicted["predict/missed"] + predicted["predict/false_alarms"] == wrong
    assert predicted["predict/image_auroc"] == pytest.approx(computed["image_auroc"], abs=1e-4)


class _Bright(LightningModule):
    """Says that a pixel is a defect as far as it is bright."""

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"probability": batch["image"][:, :1]}


@pytest.mark.parametrize(
    ("options", "large_px"),
    [
        ({"size_px": 64}, 50_000_000),
        ({"size_px": (600, 80)}, 10),  # through a temporary file
        ({"scale": 0.5}, 10),
        ({"scale": 1.5}, 50_000_000),
    ],
)
def test_what_is_found_in_scaled_images_lies_where_it_is_in_their_files(
    tmp_path: Path, options: dict[str, Any], large_px: int
) -> None:
    sizes = {"a": (75, 133), "b": (200, 90), "c": (30, 301)}
    (tmp_path / "set").mkdir()
    for name, size in sizes.items():
        image = np.zeros(size, np.uint16)
        image[10:26, 40:72] = 65535
        cv2.imwrite(str(tmp_path / "set" / f"{name}.png"), image)
        mask = (image >> 8).astype(np.uint8)
        mask[10, 40] = 0
        cv2.imwrite(str(tmp_path / "set" / f"{name}_mask.png"), mask)
    data = InspectionDataModule(
        str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"), splits={"train": 1.0}, **options
    )
    found = predict(opened(data, "predict"), _Bright(), tmp_path / "out", large_px=large_px).metrics
    assert (found["predict/missed"], found["predict/false_alarms"]) == (0, 0)
    defects = read_rows(tmp_path / "out" / "defects.csv")
    assert [row["image"] for row in defects] == ["a.png", "b.png", "c.png"]
    for row in defects:
        size = sizes[row["image"][0]]
        path = tmp_path / "out" / "maps" / f"{row['image']}.png"
        assert cv2.imread(str(path), cv2.IMREAD_UNCHANGED).shape == size
        height, width = data.source.scaling.scaled_px(size)  # type: ignore[union-attr]
        one_px = max(size[0] / height, size[1] / width, 1)  # a scaled pixel in the file
        assert float(row["y"]) == pytest.approx(17.5, abs=0.5 * one_px)
        assert float(row["x"]) == pytest.approx(55.5, abs=0.5 * one_px)
        assert int(row["height_px"]) == pytest.approx(16, abs=one_px)
        assert int(row["width_px"]) == pytest.approx(32, abs=one_px)
    assert (tmp_path / "out" / "predictions.png").is_file() == (large_px > 10)


def test_a_model_of_patches_of_one_size_gets_tiles_of_that_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "set" / "good").mkdir(parents=True)
    for number in range(6):
        image = 120 + rng.integers(0, 10, (64, 96), np.uint8)
        cv2.imwrite(str(tmp_path / "set" / "good" / f"{number}.png"), image)
    cache = str(tmp_path / "cache")
    loader = LoaderOptions(batch_size=4)
    data = InspectionDataModule(
        tmp_path / "set", train_on="good", patch_px=32, cache_dir=cache, loader=loader
    )
    model = AnomalyModule(normality=PlaceGaussians())
    Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=1).fit(model, datamodule=data)
    new = InspectionDataModule(tmp_path / "set", patch_px=32, cache_dir=cache, loader=loader)
    predict(opened(new, "predict"), model, tmp_path / "out", multiple_px=8)
    assert len(read_rows(tmp_path / "out" / "images.csv")) == 6


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"size_px": 32, "fit": "stretch"}, True),
        ({"size_px": (32, 160), "fit": "stretch"}, False),
        ({"size_px": 32}, True),
        ({"patch_px": 32}, False),
    ],
)
def test_strips_that_become_squares_are_said(
    options: dict[str, Any], *, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "set" / "good").mkdir(parents=True)
    for number in range(6):
        image = np.full((64, 300), 40 * number, np.uint8)
        cv2.imwrite(str(tmp_path / "set" / "good" / f"{number}.png"), image)
    data = InspectionDataModule(
        tmp_path / "set", train_on="good", cache_dir=str(tmp_path / "cache"), **options
    )
    opened(data, "fit")
    message = "images of 64 x 300 px become 32 x 32 px, so small defects may be lost"
    assert (message in caplog.text) == warns
    assert ("data.size_px=null data.patch_px=32" in caplog.text) == warns
