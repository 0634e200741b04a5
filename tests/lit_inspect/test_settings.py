"""What ``inspect.json`` states is checked before anything is built: one line for any nonsense."""

from pathlib import Path
from typing import Any

import pytest

from lit_inspect import BoardError, Inspector
from lit_inspect.__main__ import main
from tests.lit_inspect.boards import BOXES, LABELS, write_board

NAN, INF = float("nan"), float("inf")
TILING = {
    **{"tile_px": [64, 64], "overlap_px": 16, "margin_px": None, "blend": "constant"},
    **{"multiple_px": 16, "round_px": 1},
}
READ = {
    **{"alpha": "opaque", "cv2_order": False, "gray_to_rgb": False, "equal_channels": "keep"},
    **{"nan_fill": None, "as_float": False, "max_pixels": 1000},
}
VALUES = {
    "golden": ["3", -1, 10**12, 1.5, True, None],
    "threshold": ["a", None, NAN, -0.1, 1.1, [0.5], True],
    "image_threshold": ["a", NAN, INF, 2],
    "top_fraction": [NAN, "x", None, -1, 2],
    "min_area_px": ["x", None, -1, 1.5, 10**30],
    "large_px": ["x", None, -1, NAN],
    "task": ["volumes", None, 3],
    "channels": [0, -1, 10**9, "1", None],
    "dtype": ["float64", "object", "U9", None, 8],
    "classes": [None, "ab", [1, 2], [""], ["a", "a"], ["a" * 201], [["a"]]],
    "review": [0.5, [0.1], [0.1, "b"], [NAN, 1], [0, 1, 2], [None, None]],
    "value_range": [[0, 0], [1, 0], [0], [0, NAN], [-1e39, 1], [-3e38, 3e38], "01"],
    "doubt": [{"a": 1}, 1, True],
    "versions": [None, [], {"torch": 2}],
    "guarantee": [{}, {"promise": "", "features": [[0, 0, 0]]}, {"promise": 1, "features": []}],
    "expand": [[1], [-1], ["0"], 0],
    "precision": ["int4", 8],
    "trained": [1, "x"],
    "unknown": [None, 1],
}


def _refuse(path: Path, text: str = r"inspect\.json: ", **changes: Any) -> None:
    with pytest.raises(BoardError, match=f"not a usable .inspect file .*{text}") as caught:
        Inspector(write_board(path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_another_type_or_range_is_refused(name: str, tmp_path: Path) -> None:
    for value in VALUES[name]:
        _refuse(tmp_path / "a.inspect", **{name: value})


@pytest.mark.parametrize(
    "change",
    [
        *({"tile_px": sides} for sides in ([0, 0], [-5, -5], [10**9, 10**9], 64, [64], [60, 64])),
        *({"tile_px": sides} for sides in ([64, 64.0], [64, True], [2**15, 2**15])),
        *({"overlap_px": overlap} for overlap in (-1, 48.5, 64, 63, None)),
        *({"multiple_px": multiple} for multiple in (0, -1, 3, None)),
        *({"margin_px": margin} for margin in (-5, 9, 10**9, "1")),
        *({"round_px": rounded} for rounded in (0, 10**9, None)),
        *({"blend": blend} for blend in ("linear", None, 1)),
        {"more": 1},
    ],
)
def test_tiles_that_do_not_fit_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    _refuse(tmp_path / "a.inspect", tiling={**TILING, **change})


@pytest.mark.parametrize("side", [[0, 0], [2**15, 2**15], [10**12, 1], [-1, 5], [5], "5", None])
def test_sizes_that_nothing_has_are_refused(side: Any, tmp_path: Path) -> None:
    _refuse(tmp_path / "a.inspect", scaling={"size_px": side, "factor": None})
    _refuse(tmp_path / "a.inspect", **{**BOXES, "boxes": {**BOXES["boxes"], "sample_px": side}})


@pytest.mark.parametrize(
    "change",
    [
        *({"stride_px": stride} for stride in ([0, 0], [1, 64], [65, 64], [-1, 5], 5, [5])),
        *({"fill": fill} for fill in (NAN, 256, -1, "0", None)),
        *({"iou_threshold": overlap} for overlap in (NAN, -1, 2, None)),
        {"more": 1},
    ],
)
def test_windows_that_leave_gaps_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    _refuse(tmp_path / "a.inspect", **{**BOXES, "boxes": {**BOXES["boxes"], **change}})


@pytest.mark.parametrize(
    "change",
    [
        *({"nan_fill": value} for value in (NAN, 1e39, "0")),
        *({"max_pixels": value} for value in (0, -1, 10**12, "9", None)),
        *({"alpha": value} for value in ("only", None)),
        {"equal_channels": "x"},
        {"cv2_order": 1},
        {"as_float": "no"},
        {"page": 1},
    ],
)
def test_options_of_reading_that_are_none_are_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    _refuse(tmp_path / "a.inspect", read={**READ, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"tiling": None},
        {"boxes": BOXES["boxes"]},
        {**LABELS, "scaling": None},
        {**LABELS, "classes": []},
        {**LABELS, "tiling": TILING},
        {**LABELS, "review": [0, 1]},
        {**BOXES, "classes": []},
        {**BOXES, "boxes": None},
        {**BOXES, "scaling": LABELS["scaling"]},
        {"classes": [f"{number}" for number in range(256)]},
        {"channels": 16, "tiling": {**TILING, "tile_px": [4096, 4096]}},
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    _refuse(tmp_path / "a.inspect", **change)


def test_codes_of_a_terminal_are_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "\x1b[2J\x1b]0;x\x07\u202e\u009b31m\r\n"
    path = tmp_path / "a.inspect"
    changes = [{code: 1}, {"task": code}, {"precision": code}, {"versions": {"a": 1, code: code}}]
    for change in changes:
        _refuse(path, **change)
        assert main([str(path), str(tmp_path), "--out", str(tmp_path / code)]) == 4
        assert capsys.readouterr().err.removesuffix("\n").isprintable()
    settings = Inspector(write_board(path, doubt=code, classes=[code], versions={"a": code}))
    assert settings.settings.doubt == settings.settings.classes[0]
    assert settings.settings.classes[0].isprintable()
