import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lit_data.errors import ConfigError
from lit_data.synthesis.watermarks import GlyphBank, WatermarkSpec
from lit_data.synthesis.watermarks import glyphs as font_files
from lit_data.synthesis.watermarks.glyphs import BUILT_IN, draw_text, find_fonts, level_of, size_of


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "{}/none.ttf",
            "none.ttf does not exist: name a font file, a folder of them, system, or null",
        ),
        ("{}/empty", "holds no .ttf or .otf file"),
        ("{}/bad.ttf", "bad.ttf cannot be read as a font"),
        (["{}/bad.ttf", "{}/none.ttf"], "none.ttf does not exist"),
    ],
)
def test_fonts_that_are_missing_are_named(
    given: str | list[str], message: str, tmp_path: Path
) -> None:
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


def test_installed_fonts_without_a_character_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.ttf").write_bytes(b"no font")
    monkeypatch.setattr(font_files, "system_folders", lambda: (tmp_path, tmp_path / "none"))
    with pytest.raises(
        ConfigError, match="fonts=system: none of the 1 installed fonts holds all characters"
    ):
        find_fonts("system", ["a"])


def test_bitmaps_are_larger_than_what_they_are_warped_to() -> None:
    for size_px in (4.0, 15.9, 16.0, 16.1, 33.0, 512.0):
        stored = size_of(level_of(size_px))
        assert size_px <= stored
        assert stored <= max(16, 1.5 * size_px)


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
            np.testing.assert_array_equal(
                copy, draw_text(spec.words[text], BUILT_IN, size_of(2), 0)
            )
    copied = pickle.loads(pickle.dumps(bank))
    assert (copied.fonts, len(copied.cache)) == (bank.fonts, 0)
