"""What every synthetic set keeps to: pure samples, made once, and arguments that are refused."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.core.errors import ConfigError, StoreError
from lit_data.datasets.synthetic import sample_set
from lit_data.datasets.synthetic.sample_set import SampleSpec
from lit_data.datasets.synthetic.stripes import StripeSampleSpec
from lit_data.datasets.synthetic.surface_set import InspectionSampleSpec, draw_surface
from lit_data.datasets.synthetic.surfaces import draw_texture
from lit_data.wings.detection.sample_set import DetectionSampleSpec
from lit_data.wings.gan.sample_set import GANSampleSpec
from lit_data.wings.volumes.sample_set import CTSampleSpec
from lit_data.wings.watermarks.sample_set import WatermarkSampleSpec

Make = Callable[..., Path]


def _maker(spec: type[SampleSpec], **small: Any) -> Make:
    def make(folder: Path, **options: Any) -> Path:
        return spec(**small | options).ensure(folder)

    return make


MAKERS = {
    "stripe": _maker(StripeSampleSpec, height_px=128, width_px=112),
    "detection": _maker(DetectionSampleSpec, size_px=(64, 80)),
    "gan": _maker(GANSampleSpec, size_px=(8, 8), tiles=2),
    "inspection": _maker(InspectionSampleSpec, size_px=(64, 64)),
    "watermark": _maker(WatermarkSampleSpec, size_px=(96, 96)),
    "ct": _maker(CTSampleSpec, shape=[24, 32, 40]),
}


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of each file by its path below the root."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    names = [path.relative_to(root).as_posix() for path in files]
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}


def stamps(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


def _images(root: Path) -> dict[str, str]:
    return {
        name: digest
        for name, digest in digests(root).items()
        if name.endswith((".png", ".jpg", ".npy")) and "mask" not in name and "_labels" not in name
    }


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
    shared = _images(longer).keys() & images.keys()
    assert len(shared) >= 2
    for name in shared:
        assert _images(longer)[name] == images[name]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_set_is_made_once_without_a_lock_and_a_damaged_one_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = MAKERS[kind]
    root = make(tmp_path, count=3)
    whole, before = digests(root), stamps(root)
    with monkeypatch.context() as patch:
        patch.setattr(sample_set, "build_lock", None)
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
            (kind, {"count": 2}, "count=2 is not usable: choose a whole number from 3")
            for kind in MAKERS
        ),
        *((kind, {"seed": -1}, "seed=-1 is not usable: choose a whole number") for kind in MAKERS),
        ("detection", {"count": 3.0}, "count=3.0"),
        ("detection", {"size_px": 64}, r"size_px is 64; allowed: \(height, width\)"),
        ("detection", {"size_px": (64,)}, "size_px is"),
        ("detection", {"size_px": (63, 64)}, "a side of size_px=63"),
        ("gan", {"size_px": (7, 64)}, "a side of size_px=7 is not usable:"),
        ("gan", {"tiles": 0}, "tiles=0 is not usable:"),
        ("watermark", {"size_px": (95, 200)}, "a side of size_px=95 is not usable:"),
        ("stripe", {"height_px": 111}, "height_px=111 is not usable: .* from 112 to 32768"),
        ("stripe", {"width_px": 40000}, "width_px=40000 is not usable: .* from 112 to 32768"),
        ("stripe", {"seed": True}, "seed=True is not usable: choose a whole number"),
        ("stripe", {"dtype": "uint16"}, "dtype='uint16' is unknown: choose one of uint8, float32"),
        ("ct", {"shape": 64}, r"shape is 64; allowed: \(z, y, x\)"),
        ("ct", {"shape": [8, 64, 64]}, "a side of shape=8"),
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
    message = (
        r"file: the synthetic stripe dataset cannot be written there \(File exists\).*paths\.cache="
    )
    with pytest.raises(StoreError, match=message):
        MAKERS["stripe"](tmp_path / "file")


def test_half_of_the_surfaces_have_defects_that_their_masks_show() -> None:
    defective = 0
    for number in range(60):
        image, mask = draw_surface(0, number, (96, 128))
        defective += mask.any()
        rng = np.random.default_rng((0, number))
        changed = np.abs(image.astype(int) - draw_texture(rng, (96, 128)))
        assert (changed >= 0.08 * 255).any() == mask.any()
        if mask.any():
            assert np.median(changed[mask == 1]) > 0.08 * 255
        assert changed[mask == 0].max() < 0.08 * 255 + 1
    assert 20 < defective < 40
