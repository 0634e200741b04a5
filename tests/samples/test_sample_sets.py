"""What every synthetic set keeps to: pure samples, made once, and arguments that are refused."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_data.errors import ConfigError, StoreError
from lit_data.samples.detection import DetectionSampleSpec
from lit_data.samples.gan import GANSampleSpec
from lit_data.samples.inspection import InspectionSampleSpec
from lit_data.samples.sample_set import SampleSpec
from lit_data.samples.stripes import StripeSampleSpec
from lit_data.samples.watermarks import WatermarkSampleSpec

Make = Callable[..., Path]


def _maker(spec: type[SampleSpec], **small: Any) -> Make:
    def make(folder: Path, **options: Any) -> Path:
        return spec(**small | options).ensure(folder)

    return make


MAKERS: dict[str, Make] = {
    "stripe": _maker(StripeSampleSpec, height_px=128, width_px=112),
    "detection": _maker(DetectionSampleSpec, size_px=(64, 80)),
    "gan": _maker(GANSampleSpec, size_px=(8, 8), tiles=2),
    "inspection": _maker(InspectionSampleSpec, size_px=(64, 64)),
    "watermark": _maker(WatermarkSampleSpec, size_px=(96, 96)),
}


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of each file by its path below the root."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def stamps(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


def _images(root: Path) -> dict[str, str]:
    found = digests(root)
    suffixes = (".png", ".jpg")
    images = {name: digest for name, digest in found.items() if name.endswith(suffixes)}
    return {name: digest for name, digest in images.items() if "mask" not in name}


@pytest.mark.parametrize("kind", MAKERS)
def test_samples_depend_on_seed_and_number_alone(kind: str, tmp_path: Path) -> None:
    make = MAKERS[kind]
    first = make(tmp_path / "a", count=4)
    assert digests(first) == digests(make(tmp_path / "b", count=4))
    images = _images(first)
    assert len(images) == 4
    other, longer = make(tmp_path / "a", count=4, seed=1), make(tmp_path / "a", count=5)
    assert len({first, other, longer}) == 3, "sets lie side by side"
    for name, digest in _images(other).items():
        assert images[name] != digest
    shared = [name for name in _images(longer) if name in images]
    assert len(shared) >= 2
    for name in shared:
        assert _images(longer)[name] == images[name]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_set_is_made_once_and_a_damaged_one_again(kind: str, tmp_path: Path) -> None:
    make = MAKERS[kind]
    root = make(tmp_path, count=3)
    whole, before = digests(root), stamps(root)
    assert make(tmp_path, count=3) == root
    assert stamps(root) == before
    (root / next(iter(_images(root)))).unlink()
    assert make(tmp_path, count=3) == root
    assert digests(root) == whole
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == [root.name]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(
            (kind, {"count": 2}, "count=2 is not usable: choose a whole number from 3 to 9999")
            for kind in MAKERS
        ),
        *(
            (kind, {"seed": -1}, "seed=-1 is not usable: choose a whole number from 0 to")
            for kind in MAKERS
        ),
        ("detection", {"count": 3.0}, "count=3.0"),
        ("detection", {"size_px": 64}, r"size_px is 64; allowed: \(height, width\)"),
        ("detection", {"size_px": (64,)}, "size_px is"),
        ("detection", {"size_px": (63, 64)}, "a side of size_px=63"),
        ("gan", {"size_px": (7, 64)}, "a side of size_px=7 is not usable:"),
        ("gan", {"tiles": 0}, "tiles=0 is not usable:"),
        ("watermark", {"size_px": (95, 200)}, "a side of size_px=95 is not usable:"),
        (
            "stripe",
            {"height_px": 111},
            "height_px=111 is not usable: choose a whole number from 112 to 32768",
        ),
        (
            "stripe",
            {"width_px": 40000},
            "width_px=40000 is not usable: choose a whole number from 112 to 32768",
        ),
        ("stripe", {"seed": True}, "seed=True is not usable: choose a whole number"),
        ("stripe", {"dtype": "uint16"}, "dtype='uint16' is unknown: choose one of uint8, float32"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    kind: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        MAKERS[kind](tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        StoreError, match=r"cannot make the stripe samples in .*file.*another folder"
    ):
        MAKERS["stripe"](tmp_path / "file")
