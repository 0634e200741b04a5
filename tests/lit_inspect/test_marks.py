"""Watermarks by an exported file: masks, overlays and table are those of `predict`."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.core.errors import ConfigError
from lit_data.loading import LoaderOptions
from lit_data.predict import PredictOptions, find_task
from lit_data.predict.options import ExportRequest
from lit_data.wings.export.encode import encode_file
from lit_data.wings.gan import GANDataModule
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.watermarks import WatermarkDataModule
from lit_data.wings.watermarks import predictions as watermarks
from lit_inspect.__main__ import main
from lit_inspect.board import encode_board, read_board
from lit_inspect.errors import BoardError
from lit_inspect.inspector import Inspector
from tests.lit_inspect.boards import write_board
from tests.predict.running import Marker, predict, read_rows

TILES = {"tile_px": 64, "multiple_px": 4, "threshold": 0.3}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> WatermarkDataModule:
    folder = tmp_path_factory.mktemp("marks")
    (folder / "set/b").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, size in (("a.png", (50, 60)), ("b/c.png", (150, 81, 3)), ("d.png", (64, 90, 4))):
        pixels = cv2.GaussianBlur(rng.integers(0, 256, size, np.uint8), (0, 0), 2)
        cv2.imwrite(
            str(folder / "set" / name), cv2.normalize(pixels, None, 0, 255, cv2.NORM_MINMAX)
        )
    data = WatermarkDataModule(
        str(folder / "set"),
        cache_dir=str(folder / "cache"),
        splits={"train": 1.0},
        loader=LoaderOptions(batch_size=2, num_workers=0),
    )
    data.prepare_data()
    data.setup("predict")
    return data


@pytest.fixture(scope="module")
def board(data: WatermarkDataModule) -> Path:
    path = Path(str(data.source.root)).parent / "a.inspect"
    options = PredictOptions(**TILES)
    request = ExportRequest(model=Marker(scale=60).eval(), options=options, doubt=None)
    path.write_bytes(encode_file(find_task(data).export(request)))
    return path


@pytest.mark.parametrize("name", ["image_threshold", "image_score_fraction", "clean"])
def test_options_that_mean_nothing_for_marks_are_refused(
    name: str, data: WatermarkDataModule
) -> None:
    options = PredictOptions(**{name: True if name == "clean" else 0.3})
    request = ExportRequest(model=Marker(), options=options, doubt=None)
    with pytest.raises(ConfigError, match=rf"predict\.{name}=.* has no effect on"):
        find_task(data).export(request)


def _read(path: Path) -> np.ndarray:
    pixels: np.ndarray = cv2.imread(str(path), cv2.IMREAD_UNCHANGED).astype(int)
    return pixels


@pytest.mark.parametrize("large_px", [10**6, 2000])
def test_results_are_those_of_predict(
    large_px: int,
    data: WatermarkDataModule,
    board: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watermarks, "SHOWN", 0)  # drawing takes longer than all else
    predict(data, Marker(scale=60), tmp_path / "one", large_px=large_px, **TILES)
    contents = read_board(board)
    path = tmp_path / "a.inspect"
    path.write_bytes(encode_board({**contents.manifest, "large_px": large_px}, contents.parts))
    root = Path(str(data.source.root))
    assert main([str(path), str(root), "--out", str(tmp_path / "other")]) == 0
    rows = [read_rows(tmp_path / name / "marks.csv") for name in ("one", "other")]
    assert [row["image"] for row in rows[1]] == ["a.png", "b/c.png", "d.png"]
    inspector = Inspector(path)
    for one, other in zip(*rows, strict=True):
        name = other["image"]
        assert (one["height_px"], one["width_px"]) == (other["height_px"], other["width_px"])
        for column in ("marked_share", "mean_score"):
            assert float(one[column]) == pytest.approx(float(other[column]), abs=2e-3)
        for kind in ("masks", "overlays"):
            pictures = [_read(tmp_path / way / kind / f"{name}.png") for way in ("one", "other")]
            assert pictures[0].shape == pictures[1].shape
            assert (np.abs(pictures[0] - pictures[1]) > 1).mean() < 1e-3
        verdict = inspector.inspect(inspector.open(root / name))
        assert verdict.verdict == ("marked" if float(other["marked_share"]) else "clean")
        assert round(verdict.marked_share, 6) == float(other["marked_share"])
    assert any(float(row["marked_share"]) > 0 for row in rows[1])


@pytest.mark.parametrize("change", [{"channels": 1}, {"dtype": "uint16"}, {"classes": ["a"]}])
def test_marks_of_other_images_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    known = {"shows": "marks", "channels": 3}
    with pytest.raises(BoardError, match="marks are those of maps of three channels of uint8"):
        Inspector(write_board(tmp_path / "a.inspect", **(known | change)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            CTDataModule,
            r"lit_inspect reads images, but neither NIfTI nor DICOM, .* \(trainer=cpu\)",
        ),
        (GANDataModule, "lit_inspect scores images and does not generate them: predict does"),
    ],
)
def test_other_kinds_are_refused_with_what_to_do(kind: type[Any], reason: str) -> None:
    request = ExportRequest(model=Marker(), options=PredictOptions(), doubt=None)
    with pytest.raises(
        ConfigError, match=f"a {kind.__name__} cannot be exported, because {reason}"
    ):
        find_task(kind.__new__(kind)).export(request)
