"""What ``prepare`` says of a set beside its numbers."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.cli import main


@pytest.mark.parametrize("check", ["true", "false"])
def test_a_set_without_masks_is_warned_of_where_they_are_needed(
    tmp_path: Path, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "set").mkdir()
    for number in range(12):
        cv2.imwrite(
            str(tmp_path / "set" / f"{number}.png"), rng.integers(0, 255, (40, 40), dtype=np.uint8)
        )
    places = [
        f"data.root={tmp_path}/set",
        f"paths.runs={tmp_path}/runs",
        f"paths.cache={tmp_path}/cache",
    ]
    words = ["prepare", *places, "data.patch_px=32", f"prepare.check={check}"]
    told = "no image has a mask, so fit has nothing to learn: name their folder, data.masks=FOLDER"
    assert main([*words, "+experiment=inspection"]) == 0
    assert told in capsys.readouterr().out
    assert main([*words, "+experiment=inspection", "synthesis=gaussian"]) == 0
    assert main([*words, "+experiment=anomaly"]) == 0
    assert told not in capsys.readouterr().out
