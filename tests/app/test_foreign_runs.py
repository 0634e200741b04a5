"""The configuration of a stranger's run: refused in one line before it takes the machine."""

from pathlib import Path

import pytest

from lit_data.app.rerun import read_config
from lit_data.core.errors import ConfigError
from tests.core.test_plain import BOMB, MERGES

REFUSED = {
    "aliases": (BOMB, "expands to more than"),
    "merged keys": (MERGES, "expands to more than"),
    "base 60": ("seed: 1:30\n", "base 60"),
    "long base 60": (f"seed: 1{':0' * 200_000}\n", "more than 40 digits"),
    "base 8": ("seed: 010\n", "base 8"),
    "hexadecimal": (f"seed: 0x{'f' * 5000}\n", "more than 40 digits"),
    "nested": ("a: " + "[" * 500 + "]" * 500 + "\n", "nested"),
    "no yaml": ("a: [\n", "did not find expected node content"),
    "a list": ("- seed\n", "holds no keys"),
    "large": ("#" * (2**20 + 1), "larger than"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", REFUSED)
def test_the_configuration_of_a_run_is_bounded(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(tmp_path)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)
