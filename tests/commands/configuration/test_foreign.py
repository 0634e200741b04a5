"""Configurations of strangers: refused in one line before they take the machine, or its secrets."""

import os
from pathlib import Path

import pytest

from lit_data.commands.configuration.compose import compose
from lit_data.commands.configuration.foreign import load_config
from lit_data.errors import ConfigError
from tests.io.test_plain import BOMB, MERGES

START = "# @package _global_\ndefaults: [segmentation, _self_]\ndata: {root: /x}\n"
DOUBLED = "a0: x\n" + "".join(f"a{n}: '${{a{n - 1}}}${{a{n - 1}}}'\n" for n in range(1, 40))
LISTS = "a0: [x]\n"
for _number in range(1, 20):
    LISTS += f"a{_number}: ['${{a{_number - 1}}}'" + f", '${{a{_number - 1}}}'" * 8 + "]\n"
LONG = f"a0: '{'x' * 9000}${{seed}}'\n" + "".join(f"b{n}: '{'${a0}' * 9}'\n" for n in range(3000))
REFUSED = {
    "aliases": (BOMB, "stands for more than"),
    "merged keys": (MERGES, "stands for more than"),
    "base 60": ("seed: 1:30\n", "base 60"),
    "long base 60": (f"seed: 1{':0' * 200_000}\n", "more than 40 digits"),
    "base 8": ("seed: 010\n", "base 8"),
    "hexadecimal": (f"seed: 0x{'f' * 5000}\n", "more than 40 digits"),
    "nested": ("a: " + "[" * 500 + "]" * 500 + "\n", "nested"),
    "no yaml": ("a: [\n", "expected the node content"),
    "large": ("#" * (2**20 + 1), "larger than"),
    "nested references": (f"a: {'${' * 300}b{'}' * 300}\n", "nested too deeply"),
    "long text": (f"a: '${{seed}}{'x' * 20_000}'\n", "too long"),
    "doubled references": (DOUBLED + "name: ${a39}\n", "come to too much"),
    "lists of references": (LISTS + "name: ${a19}\n", "come to too much"),
    "long references": (LONG, "come to too much"),
    "long name": (f"name: {'://?' * 15_000}\n", "letters are allowed"),
}


def _compose(folder: Path, text: str, *overrides: str) -> None:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment/evil.yaml").write_text(START + text)
    compose("fit", ["+experiment=evil", "paths.run=/x", *overrides], config_dir=folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", REFUSED)
def test_an_experiment_that_stands_for_too_much_is_refused(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        _compose(tmp_path, text)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_what_a_file_means_is_the_same(tmp_path: Path) -> None:
    _compose(tmp_path, "report: off\nseed: 0x1F\nname: ${oc.env:MY_NAME,a}-${seed}\n")


def test_a_fifo_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    os.mkfifo(tmp_path / "experiment/evil.yaml")
    with pytest.raises(ConfigError):
        compose("fit", ["+experiment=evil", "paths.run=/x"], config_dir=tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:MY_TOKEN}",
        "${oc.env:HIDDEN}",
        "${oc.env:${v}_TOKEN,x}",
        "${oc.decode:'${oc.env:MY_TOKEN}'}",
    ],
)
def test_a_file_reads_no_secret_of_the_environment(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "a")
    monkeypatch.setenv("HIDDEN", "ghp_abcdefghijklmnopqrstuvwxyz0123456789")
    with pytest.raises(ConfigError, match="of the environment") as caught:
        _compose(tmp_path, f'v: MY\nname: "{value}"\n')
    assert "ghp_" not in str(caught.value)
    _compose(tmp_path, "", "name='${oc.env:MY_TOKEN}'")  # typed


@pytest.mark.parametrize("name", REFUSED)
def test_the_configuration_of_a_run_is_bounded_too(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    if name == "long name":
        return
    path = tmp_path / "config.yaml"
    path.write_text(f"seed: 1\n{text}" if "seed" not in text[:8] else text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_references_that_a_run_alone_can_follow_stay(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: ${hydra:runtime.output_dir}\nseed: 3\nother: ${seed}\n")
    assert load_config(path).other == 3
    path.write_text("data: {root: 'http://h/${oc.env:MY_TOKEN,x}'}\n")
    with pytest.raises(ConfigError, match="secret MY_TOKEN of the environment"):
        load_config(path)
