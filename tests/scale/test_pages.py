"""docs/scale: every command is composed, every YAML file is one, every script is Python."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from lit_data.app.configuration.compose import compose
from tests.scale.recipes import PAGES, list_commands, read_blocks

NAMES = sorted(path.stem for path in PAGES.glob("*.md"))
COMMANDS = [(name, words) for name in NAMES for words in list_commands(name)]


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_each_command_composes(page: str, words: list[str], tmp_path: Path) -> None:
    command, *overrides = words
    single = []
    for word in overrides:
        if word != "-m" and not word.startswith("hydra/launcher="):
            word = re.sub(r"\$[A-Z_]+", "0", word)
            single.append(re.sub(r"=range\((\d+),\d+\)$", r"=\1", word))
    launched = [word for word in single if not word.startswith("hydra.launcher.")]
    assert compose(command, [*launched, f"paths.run={tmp_path}"]).command == command


def test_each_page_is_short_and_has_something_to_run() -> None:
    assert {"index", "elastic", "slurm", "dask", "ray", "cloud"} == {*NAMES}
    assert {page for page, _ in COMMANDS} >= {"elastic", "slurm", "cloud", "index"}
    for name in NAMES:
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert len(prose.splitlines()) <= (110 if name == "index" else 45), name


@pytest.mark.parametrize("page", NAMES)
def test_scripts_and_files_can_be_read(page: str) -> None:
    for code in read_blocks(page, "python"):
        ast.parse(code)
    for text in read_blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)
