"""`Run.predict_image`: verdicts of single files and arrays are those of ``predict``."""

import csv
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from lit_data.app import api
from lit_data.core.errors import ConfigError, DataError
from tests import outputs

KINDS: dict[str, tuple[str, ...]] = {
    "segmentation": outputs.EXPERIMENTS["segmentation"],
    "anomaly": ("data.samples={count: 12, size_px: [96, 96]}", "data.size_px=64"),
    "classification": outputs.EXPERIMENTS["classification"],
    "detection": (*outputs.BOXES, "model=detector"),
    "stripe": outputs.STRIPES,
}

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path


def _fit(kind: str, *words: str) -> api.Run:
    quick = (*outputs.QUICK, "callbacks=base", "logger=none", "report=false", *outputs.NO_TIMELINES)
    return api.fit(kind, *quick, *KINDS[kind], *words)


def _read(path: Path) -> NDArray[Any]:
    pixels: NDArray[Any] | None = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert pixels is not None
    return pixels if pixels.ndim == 2 else pixels[..., ::-1]


def _check(run: api.Run, row: dict[str, str], image: tuple[Any, ...]) -> None:
    verdict = run.predict_image(*image)
    assert verdict.verdict == row["verdict"]
    assert verdict.score == pytest.approx(float(row["score"]), rel=2e-3)
    found = len(verdict.boxes) or len(verdict.defects)
    assert found == int(row.get("defects", found))
    overlay = verdict.overlay()
    assert overlay.dtype == np.uint8
    assert overlay.shape[2] == 3


def _list_files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("kind", KINDS)
def test_one_image_gets_the_verdict_of_predict(kind: str, place: Path) -> None:
    run = _fit(kind)
    root = next(path for path in (place / "cache/samples").iterdir() if path.is_dir())
    words = ["data.exclude=[test_masks]"] if kind == "stripe" else []
    predicted = run.predict(f"data.root={root}", *words)
    with (predicted.folder / "images.csv").open() as file:
        rows = list(csv.DictReader(file))
    files = _list_files(place)
    for row in rows[:4]:
        path = root / row["image"]
        _check(run, row, (str(path),))
        _check(run, row, (_read(path),))
    assert _list_files(place) == files
    alone = run.predict(f"data.root={path}")
    with (alone.folder / "images.csv").open() as file:
        [only] = csv.DictReader(file)
    assert only["image"] == path.name
    assert only["verdict"] == row["verdict"]
    assert float(only["score"]) == pytest.approx(float(row["score"]), rel=2e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_target_and_references_are_one_file_or_array_each(place: Path) -> None:
    rng = np.random.default_rng(0)
    (place / "parts").mkdir()
    for number in range(6):
        good = rng.integers(60, 180, (96, 96), np.uint8)
        target = good.copy()
        target[10 : 20 + number, 30:40] = 255
        for role, pixels in (("t", target), ("a", good), ("b", good)):
            cv2.imwrite(str(place / f"parts/{number}_{role}.png"), pixels)
    roles = "{target: '*_t.png', ref1: '*_a.png', ref2: '*_b.png'}"
    run = _fit("stripe", "data.root=parts", "data.layout=files", f"data.files={roles}")
    predicted = run.predict("data.root=parts")
    with (predicted.folder / "images.csv").open() as file:
        rows = list(csv.DictReader(file))
    paths = [place / f"parts/3_{role}.png" for role in "tab"]
    _check(run, rows[3], tuple(paths))
    _check(run, rows[3], tuple(map(_read, paths)))
    with pytest.raises(ConfigError, match=r"has 3 files or arrays \(target, ref1, ref2\), not 1"):
        api.open_run(run.folder).predict_image(paths[0])


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_what_is_no_image_of_the_run_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _fit("segmentation")
    (place / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    for image, error, message in (
        (place / "bad.png", DataError, "bad.png"),
        (place / "none.png", DataError, "none.png: No such file"),
        (
            np.zeros((40, 40, 7), np.uint8),
            DataError,
            "7 channels, but the model was trained with 3",
        ),
        (np.zeros((2, 3, 4, 5)), DataError, "shape"),
        ([1, 2], ConfigError, "a list is not an image: give a path or a NumPy array"),
    ):
        with pytest.raises(error, match=message):
            run.predict_image(image)  # type: ignore[arg-type]  # which it refuses
    grey = np.full((50, 40), 90, np.uint8)
    run.predict_image(grey.astype(np.float64))
    assert "mean gray level 90.00 of the range" in capsys.readouterr().out
    verdict = run.predict_image(grey)
    assert verdict.probability.shape == (50, 40)
    assert run.predict_image(np.repeat(grey[..., None], 3, axis=2)).score == verdict.score
    assert run.predict_image((grey / 255).astype(np.float32)).score == pytest.approx(verdict.score)
    with pytest.raises(DataError, match="7 channels"):
        run.predict_image(np.zeros((40, 40, 7), np.uint8))
