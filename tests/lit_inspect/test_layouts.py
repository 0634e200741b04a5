"""Targets with references: the runtime groups, stacks and inspects them as `predict` does."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from lit_data.augment import StripeAugment
from lit_data.core.errors import ConfigError, DataError
from lit_data.datamodules import StripeDataModule
from lit_data.datasets.references import find_sources
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.read_options import ReadOptions as ReadTraining
from lit_data.loading import LoaderOptions
from lit_data.predict import PredictOptions, find_task
from lit_data.predict.options import ExportRequest
from lit_data.wings.export.encode import encode_file
from lit_inspect.__main__ import main
from lit_inspect.board import encode_board, read_board
from lit_inspect.errors import BoardError, ImageError, UsageError
from lit_inspect.images import ReadOptions
from lit_inspect.inspector import Inspector
from lit_inspect.layouts import Group, Layout, find_role, group_files, open_files
from tests.lit_inspect.boards import write_board
from tests.predict.running import Marker, make_run, predict, read_rows

pytestmark = pytest.mark.usefixtures("few_pictures")

ROLES = ("target", "ref1", "ref2")
TILES = {"tile_px": 64, "multiple_px": 4, "threshold": 0.08}
FILES = {"target": "*_a.png", "ref1": "ref/*_b.png", "ref2": "ref/*_c.png"}
PAIRS = {"target": "*_a.png", "ref1": "ref/*_b.png"}
SIZES = {"1": (50, 60), "2": (150, 81), "10": (64, 90)}


def _draw(name: str) -> np.ndarray:
    """Return a target and two references, [3, H, W]."""
    rng = np.random.default_rng(int(name))
    planes = []
    for _ in ROLES:
        noise = cv2.GaussianBlur(rng.integers(0, 256, SIZES[name], np.uint8), (0, 0), 3)
        planes.append(cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX))
    return np.stack(planes)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of files that hold all three, and one of three files each."""
    folder = tmp_path_factory.mktemp("sets")
    for name in ("channels", "files/ref"):
        (folder / name).mkdir(parents=True)
    for name in SIZES:
        planes = _draw(name)
        np.save(folder / f"channels/{name}.npy", planes)
        for pattern, plane in zip(FILES.values(), planes, strict=True):
            cv2.imwrite(str(folder / "files" / pattern.replace("*", name)), plane)
    return folder


LAYOUTS: dict[str, dict[str, Any]] = {
    "channels": {"layout": "channels", "channels": [2, 0, 1]},
    "files": {"layout": "files", "files": FILES},
    "pairs": {"layout": "pairs", "files": PAIRS},
}


def _open(sets: Path, cache: Path, name: str, **options: Any) -> StripeDataModule:
    folder = sets / ("channels" if name in ("channels", "single") else "files")
    splits = {"train": 1.0}
    loader = LoaderOptions(batch_size=2, num_workers=0)
    chosen = {
        "patch_px": 32,
        "stride_px": 32,
        **LAYOUTS.get(name, {"layout": name}),
        "mask_splits": (),
        **options,
    }
    data = StripeDataModule(
        str(folder), cache_dir=str(cache), splits=splits, loader=loader, **chosen
    )
    data.prepare_data()
    data.setup("predict")
    return data


def _export(data: StripeDataModule, path: Path) -> Path:
    model = Marker(scale=60).eval()
    request = ExportRequest(model=model, options=PredictOptions(**TILES), doubt=None)
    path.write_bytes(encode_file(find_task(data).export(request)))
    return path


@pytest.fixture(scope="module")
def board(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of the layout of three files."""
    folder = tmp_path_factory.mktemp("board")
    return _export(_open(sets, folder, "files"), folder / "a.inspect")


def _change(board: Path, path: Path, **changes: Any) -> Path:
    contents = read_board(board)
    path.write_bytes(encode_board({**contents.manifest, **changes}, contents.parts))
    return path


def _read_maps(folder: Path) -> dict[str, np.ndarray]:
    maps = {}
    for path in sorted((folder / "maps").rglob("*.png")):
        maps[path.relative_to(folder).as_posix()] = cv2.imread(str(path), -1).astype(int)
    return maps


def _compare(data: StripeDataModule, board: Path, folder: Path) -> None:
    """Compare files and cameras with `predict`: tables, and maps to one part in 65,535."""
    predict(data, Marker(scale=60), folder / "one", **TILES)
    assert main([str(board), str(data.source.root), "--out", str(folder / "other")]) == 0
    rows = [read_rows(folder / name / "defects.csv") for name in ("one", "other")]
    places = [[(row["image"], row["y"], row["area_px"]) for row in table] for table in rows]
    assert places[0] == places[1]
    assert places[0]
    one, other = _read_maps(folder / "one"), _read_maps(folder / "other")
    assert one.keys() == other.keys()
    inspector = Inspector(board, threads=1)
    for name, values in other.items():
        assert np.abs(one[name] - values).max() <= 1
        planes = _draw(Path(name).name.split("_")[0].split(".")[0])
        layout = inspector.settings.layout
        assert layout is not None
        seen = planes[list(layout.channels or range(len(layout.roles)))]
        probability = inspector(*seen).probability
        assert np.array_equal(np.rint(probability * np.float32(65535)), values)
        if layout.channels:
            stacked = inspector(np.moveaxis(planes, 0, -1))
            assert np.array_equal(stacked.probability, probability)
    assert len(other) == len(SIZES)


def test_three_files_are_inspected_as_by_predict(sets: Path, board: Path, tmp_path: Path) -> None:
    _compare(_open(sets, tmp_path, "files"), board, tmp_path)


LIMITS = (1.5, 0.0)
MISFITS = {
    "0.npy": "",
    "1.npy": "ref2 does not fit",
    "2.npy": "ref1 is shifted by 0 px down and 12 px right",
    "3.npy": "ref1 is empty, ref2 does not fit",
}


def _write_misfits(folder: Path) -> Path:
    blocks = np.random.default_rng(0).integers(0, 255, (1, 16, 12), dtype=np.uint8)
    part = np.kron(blocks, np.ones((3, 8, 8), np.uint8))
    images = np.stack([part] * 4)
    images[1, 2] = images[3, 2] = part[2, ::-1, ::-1]
    images[2, 1] = np.roll(part[1], 12, 1)
    images[3, 1] = 7
    folder.mkdir()
    for name, pixels in zip(MISFITS, images, strict=True):
        np.save(folder / name, pixels)
    return folder


@pytest.mark.parametrize("doubt", [None, "trained for one epoch"])
@pytest.mark.parametrize("large_px", [10**6, 2000])
def test_references_that_do_not_fit_are_named_as_by_predict(
    doubt: str | None, large_px: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_misfits(tmp_path / "channels")
    data = _open(tmp_path, tmp_path / "cache", "channels", layout="channels", channels=[0, 1, 2])
    options = PredictOptions(**TILES, large_px=large_px)
    run = replace(make_run(tmp_path / "one"), reference_limits=LIMITS, doubt=doubt)
    find_task(data).predict(Marker(scale=60), run, options)
    request = ExportRequest(
        model=Marker(scale=60).eval(), options=options, doubt=doubt, reference_limits=LIMITS
    )
    (tmp_path / "a.inspect").write_bytes(encode_file(find_task(data).export(request)))
    words = [str(tmp_path / "a.inspect"), str(tmp_path / "channels"), "--out", str(tmp_path / "b")]
    assert main(words) == 0
    assert "3 images have references that do not fit" in capsys.readouterr().err
    rows = read_rows(tmp_path / "b" / "images.csv")
    assert {row["image"]: row["references"] for row in rows} == MISFITS
    good, *others = [row["verdict"] for row in rows]
    assert (good, set(others)) == (("unsure", {"unsure"}) if doubt else ("defect", {"review"}))
    for table in ("images.csv", "defects.csv"):
        assert (tmp_path / "one" / table).read_text() == (tmp_path / "b" / table).read_text()
    inspector = Inspector(tmp_path / "a.inspect", threads=1)
    for row in rows:
        verdict = inspector(*np.load(tmp_path / "channels" / row["image"]))
        assert (verdict.verdict, verdict.references) == (row["verdict"], row["references"])
        assert len(verdict.defects) == int(row["defects"])


def test_limits_without_references_are_refused(board: Path, tmp_path: Path) -> None:
    for name, changes in {
        "a": {"reference_limits": [1.5, 0.0], "layout": None},
        "b": {"reference_limits": [1.5]},
        "c": {"reference_limits": ["1.5", 0.0]},
    }.items():
        with pytest.raises(BoardError, match="reference_limits"):
            Inspector(_change(board, tmp_path / f"{name}.inspect", **changes))


@pytest.mark.parametrize("large_px", [10**6, 2000])
def test_channels_of_one_file_too(large_px: int, sets: Path, board: Path, tmp_path: Path) -> None:
    layout = {"channels": LAYOUTS["channels"]["channels"], "files": None}
    path = _change(board, tmp_path / "b.inspect", layout=layout, large_px=large_px)
    _compare(_open(sets, tmp_path, "channels"), path, tmp_path)


def test_what_cannot_be_exported_is_refused_with_the_reason(sets: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.layout=single makes the references from the target"
    ):
        _export(_open(sets, tmp_path, "files", layout="single", files=None), tmp_path / "a.inspect")
    augmented = _open(sets, tmp_path, "channels", augment={"predict": StripeAugment()})
    with pytest.raises(ConfigError, match=r"remove predict from data\.augment"):
        _export(augmented, tmp_path / "a.inspect")


NAMES = ["1_a.png", "2_a.png", "b/3_a.png", "ref/1_a.png", "ref/1_b.png", "ref/2_b.png", "x.png"]
GLOBS = {
    "*_a.png": ["1", "2"],
    "ref/*_b.png": ["1", "2"],
    "?/*_a.png": ["3"],
    "[a-c]/*_a.png": ["3"],
    "[!b]*_a.png": [""] * 2,
    "ref/*": ["1_a.png", "1_b.png", "2_b.png"],
    "*.png": ["1_a", "2_a", "x"],
    "*/1_b.png": ["ref"],
    "[*.png": [],
}


@pytest.mark.parametrize("pattern", GLOBS)
def test_globs_fit_the_same_files_as_in_training(pattern: str, tmp_path: Path) -> None:
    found = find_role(pattern, NAMES)
    stars = [star for star, names in found.items() for _ in names]
    assert sorted(stars) == sorted(GLOBS[pattern])
    for name in NAMES:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).touch()
    if len(set(stars)) < len(stars) or not stars:
        return
    # A second file for each, so that all have a partner.
    for star in stars:
        (tmp_path / "root" / f"{star}.partner.bmp").touch()
    files = {"target": pattern, "ref1": "*.partner.bmp"}
    sources = find_sources(tmp_path / "root", "pairs", files=files)
    targets = [Path(source.paths[0]).relative_to(tmp_path / "root") for source in sources]
    layout = Layout(channels=None, files=tuple(files.values()))
    partners = [f"{star}.partner.bmp" for star in stars]
    groups = group_files([*NAMES, *partners], layout)
    assert sorted(group.name for group in groups) == sorted(map(str, targets))
    assert not any(group.fault for group in groups)


def test_references_that_are_missing_or_unclear_are_named() -> None:
    layout = Layout(channels=None, files=("*_a.png", "re?/*_b.png"))
    names = ["1_a.png", "2_a.png", "3_a.png", "ref/1_b.png", "ref/3_b.png", "rez/3_b.png"]
    names += ["ref/4_b.png"]
    assert group_files(names, layout) == [
        Group("1_a.png", ("1_a.png", "ref/1_b.png")),
        Group("2_a.png", ("2_a.png",), "ref1 is missing: re?/2_b.png"),
        Group("3_a.png", ("3_a.png", "ref/3_b.png"), "ref1 may be ref/3_b.png or rez/3_b.png"),
        Group("ref/4_b.png", ("ref/4_b.png",), "target is missing: 4_a.png"),
    ]


def test_files_are_stacked_and_refused_as_in_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (20, 30), np.uint8)
    kinds = {
        **{"a.png": grey, "equal.png": np.repeat(grey[..., None], 3, 2), "b.png": 255 - grey},
        **{"colour.png": rng.integers(0, 256, (20, 30, 3), np.uint8), "lower.png": grey[:19]},
        **{"deep.png": grey.astype(np.uint16), "turned.png": grey.T.copy()},
    }
    for name, pixels in kinds.items():
        cv2.imwrite(str(tmp_path / name), pixels)
    np.save(tmp_path / "c.npy", grey[::-1])
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:-9])
    decoder = ImageDecoder(replace(ReadTraining(), equal_channels="collapse"))
    layout = Layout(channels=None, files=("a*", "b*", "c*"))
    outcomes = set()
    for name in (*kinds, "c.npy", "cut.png", "none.png"):
        paths = [tmp_path / "a.png", tmp_path / name, tmp_path / "c.npy"]
        try:
            expected = decoder(ImageSource(tuple(map(str, paths)))).array
        except DataError:
            with pytest.raises(ImageError):
                open_files(paths, ReadOptions(), layout)
            outcomes.add(name)
            continue
        image = open_files(paths, ReadOptions(), layout)
        assert image.shape == expected.shape
        assert np.array_equal(image.read(3, 9), expected[:, 3:9])
    refused = {"colour.png", "lower.png", "deep.png", "turned.png", "cut.png", "none.png"}
    assert outcomes == refused


def test_a_wrong_number_of_images_is_refused(board: Path, tmp_path: Path) -> None:
    inspector = Inspector(board)
    planes = _draw("1")
    text = "arrays, but the model was trained with 3: give target, ref1, ref2$"
    with pytest.raises(UsageError, match=f"2 {text}"):
        inspector(*planes[:2])
    with pytest.raises(UsageError, match=f"1 {text}"):
        inspector(np.moveaxis(planes, 0, -1))
    with pytest.raises(ImageError, match="target is 50 x 60 px, ref2 is 49 x 60 px"):
        inspector(planes[0], planes[1], planes[2][1:])
    with pytest.raises(ImageError, match="target is uint8, ref1 is uint16"):
        inspector(planes[0], planes[1].astype(np.uint16), planes[2])
    with pytest.raises(ImageError, match="3 channels that differ, but one is expected"):
        inspector(np.moveaxis(planes, 0, -1), planes[1], planes[2])
    layout = {"channels": [0, 1, 3], "files": None}
    inspector = Inspector(_change(board, tmp_path / "b.inspect", layout=layout))
    with pytest.raises(UsageError, match=r"give target, ref1, ref2, or one array \[H, W, C\]"):
        inspector(*planes[:2])
    with pytest.raises(
        ImageError, match="3 channels, but target, ref1 and ref2 are channels 0, 1, 3"
    ):
        inspector(np.moveaxis(planes, 0, -1))
    single = Inspector(write_board(tmp_path / "c.inspect"))
    with pytest.raises(UsageError, match="2 arrays, but the model was trained with single images"):
        single(*planes[:2])
    with pytest.raises(UsageError, match="2 files, but an image is one file here"):
        single.open("a.png", "b.png")


def test_images_with_bad_references_are_listed_and_the_others_inspected(
    sets: Path, board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "files"
    shutil.copytree(sets / "files", folder)
    (folder / "ref/2_b.png").unlink()
    cv2.imwrite(str(folder / "ref/10_c.png"), np.zeros((9, 9), np.uint8))
    out = tmp_path / "out"
    assert main([str(board), str(folder), "--out", str(out)]) == 3
    assert [row["image"] for row in read_rows(out / "images.csv")] == ["1_a.png"]
    reasons = {row["image"]: row["reason"] for row in read_rows(out / "bad.csv")}
    assert reasons["2_a.png"].endswith("2_a.png: ref1 is missing: ref/2_b.png")
    assert "10_a.png is 64 x 90 px, " in reasons["10_a.png"]
    assert "3 images: 2 bad" in capsys.readouterr().out
    assert main([str(board), str(folder / "ref"), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "no file is one of *_a.png, ref/*_b.png, ref/*_c.png, as the model was trained" in error
    assert "name the folder above them" in error
    assert main([str(board), str(folder / "1_a.png"), "--out", str(out)]) == 2
    assert "1_a.png: an image has 3 files here (*_a.png, " in capsys.readouterr().err


HOSTILE: dict[str, Any] = {
    "both": {"channels": [0, 1, 2], "files": ["*a", "*b", "*c"]},
    "none": {"channels": None, "files": None},
    "stars": {"channels": None, "files": ["*" * 900, "*b", "*c"]},
    "negative": {"channels": [0, 1, -1], "files": None},
    "far": {"channels": [0, 1, 10**9], "files": None},
    "few": {"channels": None, "files": ["*a", "*b"]},
    "many": {"channels": None, "files": ["*a"] * 4},
    "long": {"channels": None, "files": ["*a", "*b", "*" + "c" * 10**6]},
    "text": "channels",
    "other": {"channels": [0, 1, 2], "files": None, "run": "x"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_layout_that_does_not_fit_is_refused(name: str, board: Path, tmp_path: Path) -> None:
    path = _change(board, tmp_path / "a.inspect", layout=HOSTILE[name])
    with pytest.raises(BoardError, match=r"not a usable \.inspect file \(inspect\.json: .*layout"):
        Inspector(path)
