"""Damaged files of every kind give an array or a DataError, within limits, and nothing else."""

import io
import logging
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from lit_data.errors import DataError
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.readers import read_image

MUTANTS = 1000
MAX_GROWTH_BYTES = 256 * 2**20
RULES = ReadOptions(alpha="drop", nan_fill=0)


def _seeds() -> dict[str, bytes]:
    ramp = np.linspace(0, 200, 20 * 24 * 3).reshape(20, 24, 3).astype(np.uint8)
    color, gray = Image.fromarray(ramp), Image.fromarray(ramp[..., 0])
    seeds = {
        "rgb.png": _written(lambda file: color.save(file, "PNG")),
        "palette.png": _written(lambda file: color.quantize(8).save(file, "PNG")),
        "rgb.jpg": _written(lambda file: color.save(file, "JPEG")),
        "progressive.jpg": _written(lambda file: color.save(file, "JPEG", progressive=True)),
        "rgb.bmp": _written(lambda file: color.save(file, "BMP")),
        "palette.bmp": _written(lambda file: color.quantize(8).save(file, "BMP")),
        "fax.tif": _written(
            lambda file: gray.convert("1").save(file, "TIFF", compression="group4")
        ),
        "palette.tif": _written(lambda file: color.quantize(8).save(file, "TIFF")),
        "array.npy": _written(lambda file: np.save(file, ramp)),
    }
    layouts = {
        "plain": {},
        "lzw": {"compression": "lzw", "predictor": 2, "rowsperstrip": 5},
        "tiles": {"compression": "deflate", "tile": (16, 16)},
        "jpeg": {"compression": "jpeg"},
        "big": {"compression": "zstd", "bigtiff": True, "byteorder": ">"},
    }
    for name, layout in layouts.items():
        seeds[f"{name}.tif"] = _written(
            lambda file, k=layout: tifffile.imwrite(file, ramp, photometric="rgb", **k)
        )  # type: ignore[misc]
    return seeds


def _written(write: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def _mutate(data: bytes, rng: np.random.Generator) -> bytes:
    if rng.random() < 0.25:
        return data[: int(rng.integers(1, len(data)))]
    mutant = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        # Sizes and places stand at both ends of a file, so half of the damage goes there.
        span = min(300, len(data))
        place = int(
            rng.choice(
                [rng.integers(len(data)), rng.integers(span), len(data) - 1 - rng.integers(span)]
            )
        )
        mutant[place] = int(rng.integers(256))
    return bytes(mutant)


@pytest.mark.timeout(120)
def test_mutants_are_read_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tifffile")  # it reports each damage
    seeds, rng = _seeds(), np.random.default_rng(2024)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = []  # the name in the error, or nothing
    for number in range(MUTANTS):
        name = sorted(seeds)[number % len(seeds)]
        path = tmp_path / name
        path.write_bytes(_mutate(seeds[name], rng))
        try:
            image = read_image(path, RULES, strict=number % 2 == 0)
            assert (image.ndim, image.nbytes <= 10_000 * 8 * path.stat().st_size) == (3, True)
            outcomes.append("")
        except DataError as error:
            outcomes.append(str(error).partition(": ")[0].removeprefix(f"{tmp_path}/"))
    assert set(outcomes) == {"", *seeds}
    assert MUTANTS // 10 < outcomes.count("") < MUTANTS // 2
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    ) * 1024 < MAX_GROWTH_BYTES
