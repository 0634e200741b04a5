"""Words that a shell offers, and the shells themselves where they are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lit_data.app.cli import main
from lit_data.app.configuration.help import complete


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("", {"fit", "report", "--help"}, {"data."}),
        ("fi", {"fit"}, {"predict"}),
        ("fit ", {"experiment=", "resume=", "data.root="}, {"hydra=", "data._target_="}),
        ("fit experiment=det", {"experiment=detection"}, {"experiment=ct"}),
        ("fit +experiment=det", {"+experiment=detection"}, set()),
        ("fit det", {"detection"}, {"ct"}),
        ("fit detection data.mos", {"data.mosaic.probability="}, {"ct"}),
        ("fit experiment=detection data.mos", {"data.mosaic.probability="}, set()),
        ("fit experiment=segmentation model.schedule=", {"model.schedule=cosine"}, set()),
        ("fit callbacks.adaptive.mode=", {"callbacks.adaptive.mode=split"}, set()),
        ("predict predict.th", {"predict.threshold="}, set()),
        ("fit --c", {"--cfg", "--config-dir"}, {"--help"}),
        ("fit --config-dir own experiment=mi", {"experiment=mine"}, set()),
        ("report x", set(), {"experiment="}),
    ],
)
def test_words_are_offered(
    line: str, offered: set[str], not_offered: set[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/experiment").mkdir(parents=True)
    (tmp_path / "own/experiment/mine.yaml").touch()
    found = set(complete(["lit-data", *line.split(" ")]))
    assert offered <= found
    assert not not_offered & found
    assert all(word.startswith(line.split(" ")[-1]) for word in found)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--install-completion", "tcsh"]) == 2
    assert "choose one of bash, zsh, fish" in capsys.readouterr().err


def test_a_reader_that_leaves_early_ends_it_without_a_word() -> None:
    words = [sys.executable, "-m", "lit_data", "fit", "--help"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pipesize=4096
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate(timeout=60)
    assert err == b""


ASK = {
    "bash": """
        source "$HOME/.local/share/bash-completion/completions/lit-data"
        COMP_LINE="lit-data fit +experiment=gan_r"; COMP_POINT=${#COMP_LINE}
        _lit_data; echo "+experiment=${COMPREPLY[@]}"
    """,
    "fish": """
        source $HOME/.config/fish/completions/lit-data.fish
        complete -C 'lit-data fit +experiment=gan_r'
    """,
    "zsh": """
        fpath+=$HOME/.zfunc; autoload -U compinit; compinit -u
        compadd() { [[ $1 == -- ]] && shift; print -l -- "$@" }
        words=(lit-data fit +experiment=gan_r); CURRENT=3
        source $HOME/.zfunc/_lit-data
    """,
}


@pytest.mark.parametrize("shell", ASK)
def test_a_shell_completes(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--install-completion", shell]) == 0
    program = tmp_path / "lit-data"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lit_data "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    flag = {"zsh": "-f", "bash": "--norc", "fish": "-N"}[shell]
    words = [shell, flag, "-c", ASK[shell]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().splitlines()[-1:] == ["+experiment=gan_rays"], done.stderr
