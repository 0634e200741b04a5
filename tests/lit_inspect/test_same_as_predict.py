"""Pre-processing and blending of the runtime are those of lit_data, on a grid of cases."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from lit_data.core.errors import DataError
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.read_options import ReadOptions
from lit_data.predict.tiles import ImageJob, MemoryTarget, Tiling, open_source
from lit_inspect import images as runtime
from lit_inspect import rows, tiles
from lit_inspect.errors import ImageError


@pytest.mark.parametrize(
    ("multiple", "overlap", "margin", "blend"),
    [(4, 12, None, "constant"), (16, 16, 5, "constant"), (4, 20, None, "gaussian")],
)
def test_tiles_blend_to_the_same(
    multiple: int, overlap: int, margin: int | None, blend: tiles.Blend
) -> None:
    image = np.random.default_rng(0).random((2, 131, 257), np.float32)
    tiling = Tiling((64, 48), overlap, margin, blend, multiple)
    job = ImageJob(open_source(0, image), tiling, MemoryTarget)
    for tile in job.tiles:
        job.stitcher.add(torch.from_numpy(np.ascontiguousarray(tile)))
    axes = tiling.plan(131, 257)
    blended = np.empty_like(image)
    for top, part in tiles.stitch(tiles.cut(rows.ArrayRows(image), *axes), *axes):
        blended[:, top : top + part.shape[1]] = part
    assert isinstance(job.stitcher.target, MemoryTarget)
    assert np.abs(blended - job.stitcher.target.values.numpy()).max() <= 1e-6
    assert np.abs(blended - image).max() <= 1e-6


def _write_all(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    gray = rng.integers(0, 256, (23, 31), np.uint8)
    colour = rng.integers(0, 256, (23, 31, 3), np.uint8)
    opaque = np.dstack((colour, np.full((23, 31), 255, np.uint8)))
    deep = rng.integers(0, 65536, (23, 31), np.uint16)
    floats = rng.random((23, 31), np.float32)
    for name, pixels in (("gray", gray), ("colour", colour), ("opaque", opaque), ("deep", deep)):
        cv2.imwrite(str(folder / f"{name}.png"), pixels)
        np.save(folder / f"{name}.npy", pixels)
        if name != "opaque":
            tifffile.imwrite(folder / f"{name}.tif", pixels, compression="zlib")
        if name in ("gray", "colour"):
            cv2.imwrite(str(folder / f"{name}.bmp"), pixels)
            cv2.imwrite(str(folder / f"{name}.jpg"), pixels)
    equal = np.repeat(gray[..., None], 3, axis=2)
    cv2.imwrite(str(folder / "equal.png"), equal)
    cv2.imwrite(str(folder / "clear.png"), np.dstack((colour, gray)))
    tifffile.imwrite(folder / "floats.tif", floats)
    np.save(folder / "floats.npy", floats.astype(">f8"))
    np.save(folder / "fortran.npy", np.asfortranarray(np.moveaxis(colour, -1, 0)))
    np.save(folder / "bool.npy", gray > 100)
    floats[3, 4] = np.nan
    np.save(folder / "nan.npy", floats)
    whole = (folder / "colour.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:-30])
    (folder / "flipped.png").write_bytes(whole[:200] + b"\xff" + whole[201:])
    (folder / "cut.jpg").write_bytes((folder / "colour.jpg").read_bytes()[:-40])
    (folder / "cut.npy").write_bytes((folder / "deep.npy").read_bytes()[:-4])
    (folder / "text.png").write_text("no image")
    (folder / "empty.tif").write_bytes(b"")
    return sorted(folder.iterdir())


OPTIONS = [
    {},
    {"gray_to_rgb": True},
    {"cv2_order": True},
    {"equal_channels": "collapse"},
    {"equal_channels": "brightest", "as_float": True},
    {"alpha": "drop", "nan_fill": 0.5},
    {"max_pixels": 700},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_files_are_read_alike_and_refused_alike(options: dict[str, Any], tmp_path: Path) -> None:
    decoder = ImageDecoder(ReadOptions(**options))
    read = runtime.ReadOptions(**options)
    outcomes = set()
    for path in _write_all(tmp_path):
        expected = None
        with contextlib.suppress(DataError):
            expected = decoder(ImageSource((str(path),))).array
        try:
            image = runtime.open_image(path, read)
            pixels = image.read(0, image.shape[1])
        except ImageError:
            assert expected is None, path
            outcomes.add("refused")
            continue
        assert expected is not None, path
        assert pixels.dtype == expected.dtype, path
        assert np.array_equal(pixels, expected), path
        assert np.array_equal(image.read(5, 9), expected[:, 5:9]), path
        outcomes.add("read")
    assert outcomes == ({"refused"} if "max_pixels" in options else {"read", "refused"})


def test_kinds_of_tiff_that_opencv_reads_otherwise_are_refused(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20), np.uint8)
    tifffile.imwrite(tmp_path / "white.tif", pixels, photometric="miniswhite")
    tifffile.imwrite(tmp_path / "pages.tif", np.stack((pixels, pixels)), photometric="minisblack")
    for name in ("white", "pages"):
        with pytest.raises(ImageError, match="lit_inspect does not read"):
            runtime.open_image(tmp_path / f"{name}.tif", runtime.ReadOptions())


_PICTURE = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
_RARE: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "planar_16": (_PICTURE.transpose(2, 0, 1).astype(np.uint16), {"planarconfig": "separate"}),
    "planar_32": (_PICTURE.transpose(2, 0, 1).astype(np.float32), {"planarconfig": "separate"}),
    "bits_12": (_PICTURE.astype(np.uint16) * 16, {"bitspersample": 12}),
    "bits_10": (_PICTURE.astype(np.uint16) * 4, {"bitspersample": 10}),
    "no_colours": (_PICTURE, {"photometric": "minisblack"}),
    "turned_3": (_PICTURE, {"extratags": [(274, 3, 1, 3, True)]}),
    "turned_6": (_PICTURE, {"extratags": [(274, 3, 1, 6, True)]}),
}


@pytest.mark.parametrize("name", _RARE)
def test_what_opencv_reads_in_another_way_is_refused(name: str, tmp_path: Path) -> None:
    pixels, options = _RARE[name]
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, **{"photometric": "rgb", "planarconfig": "contig"} | options)
    assert ImageDecoder()(ImageSource((str(path),))).array.shape == (3, 16, 24)
    with pytest.raises(ImageError, match="which lit_inspect does not read"):
        runtime.open_image(path, runtime.ReadOptions())


def test_grey_levels_with_alpha_are_one_channel(tmp_path: Path) -> None:
    grey = _PICTURE[..., 0]
    both = np.dstack([grey, np.full_like(grey, 255)])
    Image.fromarray(both, "LA").save(tmp_path / "a.png")
    image = runtime.open_image(tmp_path / "a.png", runtime.ReadOptions())
    assert np.array_equal(image.read(0, 16), grey[None])


def test_animated_pictures_are_refused(tmp_path: Path) -> None:
    frames = [Image.fromarray(_PICTURE), Image.fromarray(255 - _PICTURE)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match="an animated PNG: save the frame"):
        runtime.open_image(tmp_path / "a.png", runtime.ReadOptions())


def test_a_transparent_grey_level_is_refused(tmp_path: Path) -> None:
    Image.fromarray(_PICTURE[..., 0]).save(tmp_path / "a.png", transparency=7)
    with pytest.raises(ImageError, match="a transparent gray level"):
        runtime.open_image(tmp_path / "a.png", runtime.ReadOptions())


def test_palettes_of_os2_are_refused(tmp_path: Path) -> None:
    palette = bytes(range(256)) * 3
    start = 26 + len(palette)
    head = struct.pack("<2sIIIIHHHH", b"BM", start + 32, 0, start, 12, 8, 4, 1, 8)
    (tmp_path / "a.bmp").write_bytes(head + palette + bytes(range(32)))
    assert ImageDecoder()(ImageSource((str(tmp_path / "a.bmp"),))).array.shape == (3, 4, 8)
    with pytest.raises(
        ImageError, match="of OS/2, which lit_inspect does not read: save it as PNG"
    ):
        runtime.open_image(tmp_path / "a.bmp", runtime.ReadOptions())
