"""Pictures of any depth come to a model as bright as those of all bits."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.testing import assert_allclose

from lit_data.datamodules.inspection import InspectionDataModule


@pytest.mark.parametrize(("bits", "cache"), [(4, "store"), (12, "store"), (12, "none")])
def test_a_batch_is_as_bright_as_the_same_picture_of_all_bits(
    tmp_path: Path, bits: int, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "images").mkdir()
    numbers = np.linspace(0, 2**bits - 1, 48).round().reshape(6, 8)
    numbers = numbers.astype("u1" if bits <= 8 else "u2")
    for number in range(4):
        tifffile.imwrite(tmp_path / "images" / f"{number}.tif", numbers, bitspersample=bits)
    options = {"patch_px": (6, 8), "cache": cache, "cache_dir": tmp_path / "cache"}
    with caplog.at_level(logging.INFO):
        assert_allclose(
            _first_image(tmp_path / "images", options), numbers / (2**bits - 1), atol=0.002
        )
    if cache == "store":
        assert f"{bits} bits per sample" in caplog.text
    # A range of values counts the numbers of the files.
    options["value_range"] = (0, 2 ** (bits - 1))
    expected = np.clip(numbers / 2 ** (bits - 1), 0, 1)
    assert_allclose(_first_image(tmp_path / "images", options), expected, atol=1e-6)


def _first_image(root: Path, options: dict[str, Any]) -> np.ndarray:
    datamodule = InspectionDataModule(root, **options)
    datamodule.setup("predict")
    batch = next(iter(datamodule.predict_dataloader()))
    finished = datamodule.transform(batch, "predict")
    return finished["image"][0, 0].numpy()
