"""Numbers that are typed are bounded, and what is none is one line."""

from collections.abc import Callable, Sequence

import pytest

from lit_data.app.cli import main
from lit_data.core.errors import ConfigError
from lit_data.wings.export import command as export

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (export.main, [f"predict.tile_px={DIGITS}"], "cannot be read"),
        (export.main, ["predict.tile_px=["], "cannot be read"),
    ],
)
def test_a_number_that_is_too_large_is_refused(
    command: Callable[[Sequence[str]], None], words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        command(["run", *words])
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "word", [f"seed={DIGITS}", f"data.patch_px={DIGITS}", "seed=" + "[" * 3000]
)
def test_an_override_that_cannot_be_read_is_one_line(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "+experiment=stripe", word, "--cfg", "job"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert len(err) < 1000
