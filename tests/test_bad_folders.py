"""Bad data as a user meets it: one message lists every bad file, exit code 3, nothing written beside the sources."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.app.cli import main

Spoil = Callable[[Path], list[str]]


def _image(path: Path, size: tuple[int, int] = (64, 64), dtype: type = np.uint8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (*size, 3), dtype=dtype)
    assert cv2.imwrite(str(path), pixels)


def _make_empty(root: Path) -> list[str]:
    for path in root.iterdir():
        path.unlink()
    return [str(root), "**/*"]


def _misspell(root: Path) -> list[str]:
    root.rename(root.with_name("imagse"))
    return [str(root), "no such folder", f"{root.parent} exists"]


def _cut_jpegs(root: Path) -> list[str]:
    for name in ("x.jpg", "y.jpg"):
        _image(root / name)
        (root / name).write_bytes((root / name).read_bytes()[:-800])
    return ["x.jpg", "y.jpg", "2 of 8"]


def _add_text(root: Path) -> list[str]:
    (root / "notes.png").write_text("not an image")
    (root / "page.png").write_text("<html>")
    return ["notes.png", "page.png", "not an image"]


def _spoil_both_passes(root: Path) -> list[str]:
    """One file that its header gives away, and one that only decoding does."""
    _add_text(root)
    _cut_jpegs(root)
    return ["notes.png", "page.png", "x.jpg", "y.jpg", "4 of 10 "]


def _mask_folder_beside(root: Path) -> list[str]:
    """As the synthetic dataset's own folder, given as the root."""
    (root / "test_masks").mkdir()
    cv2.imwrite(str(root / "test_masks/0.png"), np.zeros((64, 64), np.uint8))
    return [
        "test_masks/0.png",
        "its folder is named 'test_masks': if these are masks, set data.masks=test_masks",
    ]


def _mix_depths(root: Path) -> list[str]:
    _image(root / "deep.png", dtype=np.uint16)
    return ["uint8", "uint16", "deep.png"]


def _mask_of_another_size(root: Path) -> list[str]:
    for number in range(6):
        (root / "masks").mkdir(exist_ok=True)
        size = (64, 60) if number in (1, 4) else (64, 64)
        cv2.imwrite(str(root / "masks" / f"{number}.png"), np.zeros(size, np.uint8))
    return ["1.png: 64 x 60", "4.png: 64 x 60", "2 masks differ"]


def _places(root: Path) -> list[str]:
    runs = [f"paths.runs={root.parent}/runs", f"paths.cache={root.parent}/cache"]
    return ["+experiment=stripe", f"data.root={root}", *runs, "data.patch_px=32"]


CHECK = ["prepare", "prepare.check=true"]
SPOILS = [
    (_make_empty, ["prepare"]),
    (_misspell, ["fit"]),
    (_cut_jpegs, CHECK),
    (_add_text, ["prepare"]),
    (_spoil_both_passes, ["prepare"]),
    (_spoil_both_passes, CHECK),
    (_spoil_both_passes, ["fit"]),
    (_mask_folder_beside, ["prepare"]),
    (_mix_depths, ["fit"]),
    (_mix_depths, CHECK),
    (_mask_of_another_size, ["prepare"]),
    (_mask_of_another_size, CHECK),
]


@pytest.mark.parametrize(("spoil", "command"), SPOILS)
def test_bad_data_ends_with_one_message(
    spoil: Spoil, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "images"
    for number in range(6):
        _image(root / f"{number}.png")
    expected = spoil(root)
    before = _digest(tmp_path)
    words = _places(root)
    if (root / "masks").exists():
        words += ["data.masks=masks", "data.splits={test: 1.0}"]
    assert main([*command, *words]) == 3
    message = capfd.readouterr().err
    assert all(text in message for text in expected), message
    assert "Traceback" not in message
    assert _digest(tmp_path) == before


def test_bad_files_can_be_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "images"
    for number in range(6):
        _image(root / f"{number}.png")
    _add_text(root)
    assert main(["prepare", *_places(root), "data.on_bad=skip"]) == 0
    assert "notes.png" in capfd.readouterr().out
    assert '"prepare/skipped": 2' in next((tmp_path / "runs").rglob("summary.json")).read_text()


def _digest(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and modification time of everything that is not ours."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in ("runs", "cache")
    }


def _masked_set(root: Path, edges: int = 0) -> list[str]:
    """Images with masks, of which the first ones have grey edges."""
    (root / "masks").mkdir(parents=True)
    for number in range(6):
        _image(root / f"{number}.png")
        mask = np.zeros((64, 64), np.uint8)
        mask[8:16, 8:16] = 255
        if number < edges:
            mask[7, 8:16], mask[16, 8:16] = 3, 130
        cv2.imwrite(str(root / "masks" / f"{number}.png"), mask)
    return [*_places(root), "data.masks=masks", "data.splits={test: 1.0}"]


def test_masks_with_grey_edges_name_what_helps_and_it_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = _masked_set(tmp_path / "images", edges=2)
    assert main(["prepare", *words]) == 3
    message = capfd.readouterr().err
    assert "set data.mask_read.threshold=128" in message
    assert "2 of 6 images are bad" in message
    assert main(["prepare", *words, "data.mask_read.threshold=128"]) == 0


@pytest.mark.parametrize("experiment", ["stripe", "watermark"])
def test_images_are_left_out_with_their_bad_masks(
    experiment: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*_masked_set(tmp_path / "images", edges=2)[1:], "data.mask_splits=[test]"]
    (tmp_path / "images/5.png").write_bytes(b"not an image, though it has a mask")
    assert main(["prepare", f"+experiment={experiment}", *words, "data.on_bad=skip"]) == 0
    assert "test: images with bad masks are skipped: 2" in capfd.readouterr().out


def test_good_files_are_answered_in_a_line_and_a_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, *words, _ = _masked_set(tmp_path / "images")
    splits = "data.splits={train: 0.5, val: 0.5}"
    assert main(["prepare", "+experiment=segmentation", *words, "prepare.check=true", splits]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "6 images readable; 3 / 3 / 0 train, val, test" in lines
    table = [re.split("[│┃]", line) for line in lines if "│" in line or "┃" in line]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in table}
    assert (rows["images"], rows["images with masks"], rows["layout"]) == (["6"], ["6"], ["folder"])
    assert rows["split"] == ["images", "positive images", "patches"]
    assert [rows[split][0] for split in ("train", "val", "test")] == ["3", "3", "0"]


HOSTILE = "bad\x1b[31m\nlit_data: all good\u202e"


def _prepare(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["prepare", *words])
    told = capfd.readouterr()
    return code, told.out, told.err


def test_many_bad_files_are_one_screen_and_all_are_listed_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(60):
        _image(tmp_path / "set" / f"{number:02}.png")
    for number in range(0, 60, 2):
        path = tmp_path / "set" / f"{number:02}.png"
        path.write_bytes(path.read_bytes()[: 4000 + number] if number % 4 else b"none")
    where = ("data.root=set", f"paths.cache={tmp_path}/cache", "hydra.run.dir=run")
    words = ("+experiment=classification", "data.classes=[a,b]", "prepare.check=true")
    code, _, err = _prepare(capfd, *words, *where)
    assert code == 3
    lines = err.rstrip("\n").split("\n")
    assert len(lines) < 10
    assert lines[-2:] == [
        "lit_data: 30 of 60 files are bad:",
        "  data.on_bad=skip skips bad files",
    ]
    assert f"  full list: {tmp_path}/run/problems.txt" in lines
    listed = (tmp_path / "run/problems.txt").read_text()
    assert all(f"set/{number:02}.png: " in listed for number in range(0, 60, 2))


def test_no_name_of_a_class_forges_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(24):
        _image(tmp_path / "kinds" / ("good", HOSTILE)[number % 2] / f"{number}\x1b\n.png")
        _image(tmp_path / "coco/images" / f"{number}.png")
    box = {"bbox": [5, 5, 20, 20], "area": 400, "iscrowd": 0}
    boxes = [{"id": n, "image_id": n, "category_id": n % 2, **box} for n in range(24)]
    images = [{"id": n, "file_name": f"{n}.png", "width": 64, "height": 64} for n in range(24)]
    categories = [{"id": 0, "name": "a"}, {"id": 1, "name": HOSTILE}]
    (tmp_path / "coco/annotations").mkdir()
    text = json.dumps({"images": images, "annotations": boxes, "categories": categories})
    (tmp_path / "coco/annotations/instances_all.json").write_text(text)
    commands = (
        ("classification", "kinds"),
        ("detection", "coco"),
        ("detection", "coco", "data.classes=[a]"),
    )
    for number, words in enumerate(commands):
        place = (
            f"data.root={words[1]}",
            f"paths.cache={tmp_path}/cache",
            f"hydra.run.dir=run{number}",
        )
        code, out, err = _prepare(capfd, f"+experiment={words[0]}", *place, *words[2:])
        assert code == (3 if words[2:] else 0), err
        told = out + err + (tmp_path / f"run{number}/prepare.log").read_text()
        assert all(line.isprintable() for line in told.split("\n"))
        assert "\nlit_data: all good" not in told
        assert "\\nlit_data: all good" in told
