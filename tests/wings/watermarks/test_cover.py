import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lit_data.core.errors import ConfigError
from lit_data.core.types import Array
from lit_data.wings.watermarks import GlyphBank, WatermarkPlan, WatermarkSpec, sample_watermarks
from lit_data.wings.watermarks import glyphs as font_files
from lit_data.wings.watermarks.cover import draw_cover
from lit_data.wings.watermarks.glyphs import BUILT_IN, draw_text, find_fonts, size_of

SIDE = 160


def _plan(
    spec: WatermarkSpec, index: Any = (0,), shape: tuple[int, int] = (SIDE, SIDE)
) -> WatermarkPlan:
    return sample_watermarks(spec, 0, 0, np.array(index), shape)


def _draw(plan: WatermarkPlan, shape: tuple[int, int] = (SIDE, SIDE)) -> Array:
    rows = np.full((len(plan.present), *shape), 77, np.uint8)
    draw_cover(rows, plan, GlyphBank(plan.spec))
    return rows


def _alone(**options: Any) -> WatermarkSpec:
    given = {
        "probability": 1,
        "tiling": 0,
        "count": (1, 1),
        "outline": 0,
        "soft_px": (0, 0),
    }
    return WatermarkSpec(**(given | {"texts": ("HHH",), "size_px": (32, 32)} | options))


@pytest.mark.parametrize(
    ("angle_deg", "size_px"), [(0, 32), (0, 24), (90, 32), (30, 40), (-45, 20)]
)
def test_a_text_lies_as_planned(angle_deg: float, size_px: float) -> None:
    spec = _alone(straight=0, angle_deg=(angle_deg, angle_deg), size_px=(size_px, size_px))
    plan = replace(_plan(spec), centre=np.array([[70, 90]], np.float32))
    cover = _draw(plan)[0]
    weights = cover.astype(np.float64)
    y, x = (np.average(places, weights=weights) for places in np.indices(cover.shape))
    assert (y, x) == pytest.approx((70, 90), abs=0.6)
    (_, (length, height), _) = cv2.minAreaRect(np.argwhere(cover > 127).astype(np.float32))
    longest = np.ptp(np.flatnonzero((_draw(_upright(plan))[0] > 127).any(0))) + 1
    assert max(length, height) == pytest.approx(longest, abs=2.5)
    turned = cv2.moments(cover, binaryImage=False)
    found = np.degrees(0.5 * np.arctan2(2 * turned["mu11"], turned["mu20"] - turned["mu02"]))
    assert (-found - angle_deg + 90) % 180 - 90 == pytest.approx(0, abs=1.5), "counter-clockwise"


def _upright(plan: WatermarkPlan) -> WatermarkPlan:
    return replace(plan, angle_deg=np.zeros(1, np.float32))


def test_samples_without_a_watermark_are_not_covered_and_others_do_not_matter() -> None:
    spec = WatermarkSpec(probability=0.5)
    plan = _plan(spec, range(12))
    rows = _draw(plan)
    for index in range(12):
        assert rows[index].any() <= plan.present[index]
        assert_array_equal(rows[index], _draw(_plan(spec, (index,)))[0])
    assert not plan.present.all()


@pytest.mark.parametrize("straight", [1, 0])
def test_a_tiled_text_is_everywhere(straight: float) -> None:
    spec = _alone(tiling=1, spacing=(0.5, 0.5), size_px=(14, 14), straight=straight)
    for row in _draw(_plan(spec, range(4))):
        assert all(row[y : y + 54, x : x + 54].any() for y in (0, 53, 106) for x in (0, 53, 106))


def test_edges_are_softened() -> None:
    sharp, soft = (_draw(_plan(_alone(soft_px=(sigma, sigma), straight=1)))[0] for sigma in (0, 2))
    assert soft.max() < sharp.max()
    assert soft.sum() == pytest.approx(sharp.sum(), rel=0.1)
    assert_array_equal(soft, cv2.GaussianBlur(sharp, (0, 0), 2.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{}/none.ttf", "none.ttf does not exist: name a font file, a folder of them, system"),
        ("{}/empty", "holds no .ttf or .otf file"),
        ("{}/bad.ttf", "bad.ttf cannot be read as a font"),
        (["{}/bad.ttf", "{}/none.ttf"], "none.ttf does not exist"),
    ],
)
def test_missing_fonts_are_named(given: str | list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.ttf").write_bytes(b"no font")
    named = (
        given.format(tmp_path)
        if isinstance(given, str)
        else tuple(each.format(tmp_path) for each in given)
    )
    with pytest.raises(ConfigError, match=message):
        GlyphBank(WatermarkSpec(fonts=named))


def test_a_character_without_a_glyph_is_named() -> None:
    with pytest.raises(ConfigError, match="the font of Pillow has no glyph for '文水'"):
        GlyphBank(WatermarkSpec(texts=("水文 draft",)))


def test_fonts_without_a_character_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.ttf").write_bytes(b"no font")
    monkeypatch.setattr(font_files, "system_folders", lambda: (tmp_path, tmp_path / "none"))
    with pytest.raises(ConfigError, match="fonts=system: none of the 1 installed fonts holds all"):
        find_fonts("system", ["a"])


def test_letters_are_filled_or_outlined_and_keep_an_empty_edge() -> None:
    filled, outlined = draw_text("HB", BUILT_IN, 64, 0), draw_text("HB", BUILT_IN, 64, 3)
    for bitmap in (filled, outlined):
        assert bitmap.max() == 255
        assert bitmap[0].max() == bitmap[-1].max() == bitmap[:, 0].max() == bitmap[:, -1].max() == 0
    assert outlined.shape[0] == filled.shape[0] + 6
    inner = outlined[3:-3, 3:-3][: filled.shape[0], : filled.shape[1]]
    assert inner[filled == 255].max() == 0, "the letters themselves are empty"


def test_a_bank_is_bounded_and_shared_by_threads() -> None:
    spec = WatermarkSpec(text_count=30, cache_bytes=40_000)
    bank = GlyphBank(spec)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: bank.get(text % 30, 0, 2, 0), range(120)))
    assert bank.cache.nbytes <= 40_000
    for text in range(30):
        for copy in found[text::30]:
            assert_array_equal(copy, draw_text(spec.words[text], BUILT_IN, size_of(2), 0))
    copied = pickle.loads(pickle.dumps(bank))
    assert (copied.fonts, len(copied.cache)) == (bank.fonts, 0)
