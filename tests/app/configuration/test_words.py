"""Texts in overrides: what is written is read back, whatever signs a path has."""

import random
import shlex
from pathlib import Path

import pytest

from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.words import quote, read_override, show_override, write_override
from lit_data.core.errors import ConfigError

SIGNS = "a\\'\"${}()[]=, :#%ü中~*+|;&.-_/\t"
PATHS = ("data/müller", "a b", "x (1)", "k=v", "a,b", "it's", 'a"b', "#1", "[old]", "{new}")
PATHS += ("$HOME", "${seed}", "50%", "数据", "back\\", "~tilde", "null", "2026_01", "!x", "-m")


def test_a_text_that_is_written_is_read_back() -> None:
    numbers = random.Random(0)
    for _ in range(2000):
        text = "".join(numbers.choices(SIGNS, k=numbers.randrange(10)))
        assert read_override(write_override("key", text)) == text
        assert read_override(f"key={quote(text, chr(34))}") == text


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_read_back_by_hydra_and_by_a_shell(path: str) -> None:
    cfg = compose("prepare", [write_override("data.root", path), "paths.run=here"])
    assert cfg.data.root == path
    assert list(map(read_override, shlex.split(show_override("data.root", path)))) == [path]


@pytest.mark.parametrize("path", ["data/中文", "müller", "it's", "a(b)", "k=v", "50%#1", "a{b}"])
def test_a_path_may_stand_without_quotation_marks(path: str) -> None:
    assert compose("prepare", [f"data.root={path}", "paths.run=here"]).data.root == path


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.root=中,b", "\\( \\[: 'data.root=\"中,b\"'"),
        ("data.classes=[Öl]", "\\( \\[: 'data.classes=\"\\[Öl\\]\"'"),
        ("segmentation", "Did you mean 'experiment=segmentation'"),
        ("segmentaton", "Did you mean 'experiment=segmentation'"),
        (str(Path(__file__).parent), "Did you mean 'data.root=/"),
    ],
)
def test_a_word_that_cannot_be_read_is_answered_with_a_cure(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose("fit", [word])


@pytest.mark.parametrize("word", ["key=[a]", "key=a,b", "key=${seed}", "key=null", "key"])
def test_a_word_without_a_text_has_none(word: str) -> None:
    assert read_override(word) is None
