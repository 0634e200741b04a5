"""Run folders of strangers, given to ``why``."""

from pathlib import Path

import pytest

from lit_data.commands.why import compare_options
from lit_data.errors import DataError


def _make(folder: Path, config: str) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/config.yaml").write_text(config)
    return folder


def test_a_configuration_that_cannot_be_read_is_no_equal_one(tmp_path: Path) -> None:
    first = _make(tmp_path / "a", "seed: 1\n")
    second = _make(tmp_path / "b", "seed: &a [*a]\n")
    with pytest.raises(DataError, match=r"b: \.hydra/config\.yaml cannot be read: .*holds itself"):
        list(compare_options(first, second))


def test_a_long_option_is_shortened(tmp_path: Path) -> None:
    first = _make(tmp_path / "a", "seed: 1\n")
    second = _make(tmp_path / "b", f"seed: {'x' * 100_000}\n")
    (line,) = compare_options(first, second)
    assert line.startswith("seed: 1 -> xxx")
    assert line.endswith("... (100000 letters)")
