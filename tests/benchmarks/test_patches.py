"""`python -m benchmarks patches`: installed ways read patches; a table is written."""

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from benchmarks.__main__ import run as measure
from benchmarks.patches import COLUMNS, RegionPatches
from lit_data.grid import PatchGrid
from lit_data.io.images.writing import write_png
from tests.benchmarks.suites import read_table

TOY = ["suite.images=2", "suite.side_px=1100", "suite.worker_kind=thread"]
TOY += ["suite.batches=2", "suite.repeats=1"]


@pytest.mark.usefixtures("small_runs_are_fast")
def test_the_store_is_measured_in_bands_and_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, photos = tmp_path / "run", tmp_path / "photos"
    write_png(photos / "0.png", np.add.outer(np.arange(90), np.arange(120)).astype(np.uint8))
    folder.mkdir()
    places = [f"suite.photos={photos}", f"paths.cache={tmp_path}", f"paths.run={folder}"]
    assert measure(["patches", *TOY, *places]) == 0
    rows = {row["way"]: row for row in read_table(folder)}
    assert list(rows) == ["bands", "whole", "tiff", "zarr", "hdf5"]
    assert tuple(rows["bands"]) == COLUMNS
    for name in ("bands", "whole"):
        assert float(rows[name]["cold_per_s"]) > 0
        assert float(rows[name]["warm_per_s"]) > 0
    assert float(rows["whole"]["warm_ratio"]) == 1
    assert float(rows["bands"]["stored_share"]) < 1.01
    shown = capsys.readouterr().out
    assert "2 images of 1100 x 1100 x 3, patches of 128 px" in shown
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("patches-")]


def test_regions_of_another_format_are_the_patches_of_the_grid() -> None:
    image = np.arange(3 * 40 * 60, dtype=np.int32).reshape(3, 40, 60)
    grid = PatchGrid([40], [60], 16, 10)
    (batch,) = DataLoader(RegionPatches(lambda: [image], grid), len(grid))
    _, y, x = grid.locate(np.arange(len(grid)))
    wanted = [image[:, top : top + 16, left : left + 16] for top, left in zip(y, x, strict=True)]
    np.testing.assert_array_equal(batch.numpy(), np.stack(wanted))
