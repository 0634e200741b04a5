"""``COMMAND --help``: what its YAML files say, in the width of the terminal."""

import pytest

from lit_data.cli import main
from lit_data.commands import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_lists_its_own_keys(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert COMMANDS[command] in page
    assert "  seed=0 " in page
    own = {
        "fit": "resume=null",
        "predict": "predict.tile_px=512",
        "show": "show.count=6",
        "prepare": "prepare.check=false",
    }
    for other, key in own.items():
        assert (f"\n  {key}" in page) == (other == command)
    assert ("trainer.max_epochs=10" in page) == (command in ("fit", "validate", "test", "predict"))
    assert [line for line in page.splitlines() if len(line) > 80 and "=[" not in line] == []


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("experiment=stripe", "data.patch_px=128"),
        ("+experiment=bccd", "data.size_px=null"),
        ("data=ct", "data.window"),
        ("experiment=nothing", "data.patch_px=128"),
    ],
)
def test_the_keys_of_the_chosen_data_are_listed(
    word: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", word, "--help"]) == 0
    page = capsys.readouterr().out
    assert f"\n  {key}" in page
    assert "_target_" not in page


def test_a_comment_stands_beside_its_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    main(["benchmark", "--help"])
    page = capsys.readouterr().out
    assert (
        "  benchmark.mode=loaders          the ways to load | headroom: data for free" in page
    )  # it stands above it
    assert (
        "  benchmark.repeats=3             measurements of each row, in turn; the table holds medians"
        in page
    )


def test_a_mistyped_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fitt", "--help"]) == 2
    assert "unknown command 'fitt'. Did you mean 'fit'?" in capsys.readouterr().err
