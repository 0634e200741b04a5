"""Bad data as a user meets it: one message lists every bad file, exit code 3, nothing written beside the sources."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.cli import main

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


def _mix_depths(root: Path) -> list[str]:
    _image(root / "deep.png", dtype=np.uint16)
    return ["uint8", "uint16", "deep.png"]


def _mask_of_another_size(root: Path) -> list[str]:
    for number in range(6):
        (root / "masks").mkdir(exist_ok=True)
        size = (64, 60) if number in (1, 4) else (64, 64)
        cv2.imwrite(str(root / "masks" / f"{number}.png"), np.zeros(size, np.uint8))
    return ["1.png: 64 x 60", "4.png: 64 x 60", "2 masks differ"]


SPOILS = [_make_empty, _misspell, _cut_jpegs, _add_text, _mix_depths, _mask_of_another_size]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__.strip("_"))
@pytest.mark.parametrize("command", [["prepare"], ["prepare", "prepare.check=true"], ["fit"]], ids=" ".join)
def test_bad_data_ends_with_one_message(
    spoil: Spoil, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "images"
    for number in range(6):
        _image(root / f"{number}.png")
    expected = spoil(root)
    before = _digest(tmp_path)
    words = [f"data.root={root}", f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache", "data.patch_px=32"]
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
    words = [f"data.root={root}", f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache", "data.patch_px=32"]
    assert main(["prepare", *words, "data.on_bad=skip"]) == 0
    assert "notes.png" in capfd.readouterr().out
    assert '"prepare/skipped": 2' in next((tmp_path / "runs").rglob("summary.json")).read_text()


def _digest(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and modification time of everything that is not ours."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in ("runs", "cache")
    }
