"""Exported models say what `predict` says, and files that say anything else are refused."""

import csv
import os
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.core.errors import ConfigError
from lit_data.datamodules import InspectionDataModule
from lit_data.loading import LoaderOptions
from lit_data.predict import PredictOptions, find_task
from lit_data.predict.options import ExportRequest
from lit_data.predict.verdicts import Calibration, describe_images
from lit_data.wings.export.encode import encode_file
from lit_inspect.__main__ import main
from lit_inspect.board import encode_array, encode_board, read_board
from lit_inspect.errors import BoardError, UsageError
from lit_inspect.inspector import Inspector
from lit_inspect.results import Results
from tests.predict.running import Marker, make_run, predict

pytestmark = pytest.mark.usefixtures("few_pictures")

TILES = {"tile_px": 64, "multiple_px": 4, "threshold": 0.6, "image_threshold": 0.7}


def _open(root: Path, cache: Path, **options: Any) -> InspectionDataModule:
    loader = LoaderOptions(batch_size=2, num_workers=0)
    splits = {"train": 1.0}
    data = InspectionDataModule(
        str(root), cache_dir=str(cache), splits=splits, loader=loader, **options
    )
    data.prepare_data()
    data.setup("predict")
    return data


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "b").mkdir()
    rng = np.random.default_rng(0)
    for name, size in (("a.png", (50, 60)), ("b/c.jpg", (150, 201)), ("d.bmp", (64, 300))):
        pixels = cv2.GaussianBlur(rng.integers(0, 256, size, np.uint8), (0, 0), 3)
        cv2.imwrite(str(folder / name), cv2.normalize(pixels, None, 0, 255, cv2.NORM_MINMAX))
    np.save(folder / "e.npy", rng.integers(0, 256, (90, 40), np.uint8))
    return folder


@pytest.fixture(scope="module")
def board(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    return _export(_open(images, folder), folder / "a.inspect", **TILES)


def _export(data: InspectionDataModule, path: Path, **options: Any) -> Path:
    model = Marker(scale=60).eval()
    request = ExportRequest(model=model, options=PredictOptions(**options), doubt=None)
    path.write_bytes(encode_file(find_task(data).export(request)))
    return path


def _compare(one: Path, other: Path) -> int:
    """Compare the maps of two folders; return how many there are."""
    names = sorted(path.relative_to(one) for path in (one / "maps").rglob("*.png"))
    for name in names:
        maps = [cv2.imread(str(folder / name), -1).astype(int) for folder in (one, other)]
        assert np.abs(maps[0] - maps[1]).max() <= 1, name
    return len(names)


def _compare_tables(one: Path, other: Path) -> None:
    """Compare two tables; numbers to three digits, as torch and onnxruntime round by the processor."""
    tables = [list(csv.reader(path.read_text().splitlines())) for path in (one, other)]
    assert [len(row) for row in tables[0]] == [len(row) for row in tables[1]]
    for cells in zip(chain(*tables[0]), chain(*tables[1]), strict=True):
        if cells[0] != cells[1]:
            assert float(cells[0]) == pytest.approx(float(cells[1]), rel=2e-3)


@pytest.mark.parametrize("large_px", [50_000_000, 10_000])
def test_results_are_those_of_predict(
    large_px: int, images: Path, board: Path, tmp_path: Path
) -> None:
    data = _open(images, tmp_path)
    predict(data, Marker(scale=60), tmp_path / "one", large_px=large_px, **TILES)
    contents = read_board(board)
    manifest = {**contents.manifest, "large_px": large_px}
    path = tmp_path / "a.inspect"
    path.write_bytes(encode_board(manifest, contents.parts))
    assert main([str(path), str(images), "--out", str(tmp_path / "other")]) == 0
    for name in ("images.csv", "defects.csv", "bad.csv"):
        _compare_tables(tmp_path / "one" / name, tmp_path / "other" / name)
    rows = (tmp_path / "one/images.csv").read_text().split()
    assert {row.rpartition(",")[2] for row in rows[1:]} == {"good", "defect"}
    assert _compare(tmp_path / "one", tmp_path / "other") == 4


def test_functions_that_windows_lacks_are_not_needed(
    images: Path, board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = read_board(board)
    path = tmp_path / "a.inspect"
    path.write_bytes(encode_board({**contents.manifest, "large_px": 10_000}, contents.parts))
    assert main([str(path), str(images), "--out", str(tmp_path / "all")]) == 0
    monkeypatch.setattr(tempfile, "TemporaryFile", tempfile.NamedTemporaryFile)  # as there
    for name in ("sched_getaffinity", "posix_fallocate", "pread", "preadv", "pwrite", "O_TMPFILE"):
        monkeypatch.delattr(os, name)
    assert main([str(path), str(images), "--out", str(tmp_path / "fewer")]) == 0
    names = [path.relative_to(tmp_path / "all") for path in (tmp_path / "all").rglob("*.*")]
    assert len(names) == 7
    for name in names:
        assert (tmp_path / "fewer" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()


def test_a_camera_gets_the_verdict_of_its_file(images: Path, board: Path) -> None:
    inspector = Inspector(board, threads=1)
    pixels = np.load(images / "e.npy")
    of_file = inspector.inspect(inspector.open(images / "e.npy"))
    for array in (pixels, np.repeat(pixels[..., None], 3, axis=2)):
        verdict = inspector(array)
        assert (verdict.verdict, verdict.score) == (of_file.verdict, of_file.score)
        assert np.array_equal(verdict.probability, of_file.probability)
        assert verdict.defects == of_file.defects
    with pytest.raises(UsageError, match="3 channels of uint16, but the model was trained with 3"):
        inspector(pixels.astype(np.uint16))
    with pytest.raises(UsageError, match=r"give \[H, W\] or \[H, W, C\]"):
        inspector(pixels[0])


def test_a_calibration_leaves_images_for_review(images: Path, board: Path, tmp_path: Path) -> None:
    contents = read_board(board)
    path = tmp_path / "a.inspect"
    pixels = np.load(images / "e.npy")
    score = Inspector(board)(pixels).score
    cases = {"review": (score, score), "good": (score + 1e-4, 1.0), "defect": (0.0, score - 1e-4)}
    for verdict, review in cases.items():
        path.write_bytes(encode_board({**contents.manifest, "review": review}, contents.parts))
        assert Inspector(path)(pixels).verdict == verdict


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_a_guarantee_is_given_and_withdrawn_as_by_predict(
    gain: float, images: Path, board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _open(images, tmp_path)
    features = gain * describe_images(data.bank, range(4))
    calibration = Calibration(
        **{"good_below": 0.6, "defect_above": 0.9, "miss": 0.02, "false_alarms": 0.1},
        **{"confidence": 0.95, "unit": "image", "checkpoint_sha256": "", "conditions": {}},
        features=np.tile(features, (60, 1)).tolist(),
    )
    run = replace(make_run(tmp_path / "one"), calibration=calibration)
    find_task(data).predict(Marker(scale=60), run, PredictOptions(**TILES))
    contents = read_board(board)
    guarantee = {"promise": calibration.promise, "features": calibration.features}
    manifest = {**contents.manifest, "review": [0.6, 0.9], "guarantee": guarantee}
    path = tmp_path / "a.inspect"
    path.write_bytes(encode_board(manifest, contents.parts))
    assert main([str(path), str(images), "--out", str(tmp_path / "other")]) == 0
    tables = [(tmp_path / name / "images.csv").read_bytes() for name in ("one", "other")]
    assert tables[0] == tables[1]
    error = capsys.readouterr().err
    if gain == 1:
        assert (b"misses <= 0.02 and false alarms <= 0.1" in tables[0], error) == (True, "")
    else:
        assert tables[0].count(b",withdrawn") == 4
        assert error.startswith("lit_inspect: the guarantee is withdrawn: the gray level of these ")
        assert error.count("\n") == 1


def test_a_changed_golden_answer_is_refused_though_all_digests_fit(
    board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = read_board(board)
    parts = dict(contents.parts)
    answer = contents.load_array("golden/3_answer.npy")
    answer[0, 5, 7] += 1e-3
    parts["golden/3_answer.npy"] = encode_array(answer)
    path = tmp_path / "a.inspect"
    path.write_bytes(encode_board(contents.manifest, parts))
    with pytest.raises(BoardError, match=r"golden input 3 differs by 0\.001 on this machine"):
        Inspector(path)
    (tmp_path / "images").mkdir()
    assert main([str(board), str(tmp_path / "images"), "--out", str(tmp_path / "out")]) == 2
    cv2.imwrite(str(tmp_path / "images" / "a.png"), np.zeros((9, 9), np.uint8))
    assert main([str(path), str(tmp_path / "images"), "--out", str(tmp_path / "out")]) == 4
    assert "export it again" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"task": "volumes"},
        {"review": 0.5},
        {"read": {}},
        {"tiling": None},
        {"value_range": [1]},
        {"golden": 9},
        {"classes": 3},
        {"tiling": {"tile_px": 0}},
        {"guarantee": {"promise": "", "features": [[1, 2]]}},
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    change: dict[str, Any], board: Path, tmp_path: Path
) -> None:
    contents = read_board(board)
    path = tmp_path / "a.inspect"
    path.write_bytes(encode_board({**contents.manifest, **change}, contents.parts))
    with pytest.raises(BoardError, match=r"not a usable|cannot be inspected"):
        Inspector(path)


def test_bad_images_are_listed_and_the_others_inspected(
    images: Path, board: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "good.png").write_bytes((images / "a.png").read_bytes())
    (folder / "cut.png").write_bytes((images / "a.png").read_bytes()[:300])
    np.save(folder / "deep.npy", np.zeros((20, 20), np.uint16))
    out = tmp_path / "out"
    assert main([str(board), str(folder), "--out", str(out)]) == 3
    assert (out / "images.csv").read_text().splitlines()[1].startswith("good.png,")
    bad = (out / "bad.csv").read_text()
    assert "cut.png: truncated or damaged PNG" in bad
    assert "3 channels of uint16" in bad
    (out / "labels.csv").write_text("of another program")
    Results(Inspector(board), out)  # a run that was interrupted shows no table of the one before
    assert {path.name for path in out.iterdir()} == {"labels.csv", "maps"}
    (tmp_path / "file").write_text("")
    assert main([str(board), str(folder), "--out", str(tmp_path / "file")]) == 4


def test_options_that_the_runtime_lacks_are_refused(images: Path, tmp_path: Path) -> None:
    data = _open(images, tmp_path)
    with pytest.raises(ConfigError, match=r"predict\.augment=flips has no effect on an \.inspect"):
        _export(data, tmp_path / "a.inspect", augment="flips")
    with pytest.raises(ConfigError, match=r"predict\.precision=bf16"):
        _export(data, tmp_path / "a.inspect", precision="bf16")
