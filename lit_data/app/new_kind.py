"""``new-kind``: write a kind of data of one's own, with an experiment and a test."""

import keyword
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from lit_data.app.cli import Parser
from lit_data.app.configuration.rows import CONF
from lit_data.core.errors import ConfigError, StoreError, show_path

_HELP = """\
usage: lit-data new-kind NAME

Writes your own kind of data into the current folder: images with one label each. It works as it is.

  NAME.py                       its dataset and datamodule
  test_NAME.py                  a test of both
  conf/experiment/NAME.yaml     an experiment that trains on it

NAME must be the name of a Python module. Nothing is overwritten. docs/extend.md has the next steps."""

_NEXT = """\
next:
  python -m pytest test_{name}.py
  lit-data fit experiment={name} data.root=FOLDER --config-dir conf --package {name}"""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_VALUES = frozenset({"null", "true", "false", "yes", "no", "on", "off", "nan", "inf"})
"""Words that YAML or Hydra read as a value and not as a name."""


def main(arguments: Sequence[str]) -> None:
    """Write a kind of data into the current folder and print what comes next.

    Args:
        arguments: Those behind ``new-kind``.

    Raises:
        LitDataError: As `write_kind` raises it, or the words are not one name.
    """
    parser = Parser("new-kind", packages=False)
    options = parser.read(arguments)
    if options.help:
        print(_HELP)
        return
    if len(options.words) != 1:
        raise ConfigError("new-kind needs one name, such as parts: lit-data new-kind parts")
    name = options.words[0]
    for path in write_kind(name, Path()):
        print(path)
    print(_NEXT.format(name=name))


def write_kind(name: str, folder: Path) -> list[Path]:
    """Write the module of a kind of data, its test and its experiment.

    Args:
        name: Of the module and the experiment.
        folder: Where to; nothing that is there is changed.

    Returns:
        The paths of the three files.

    Raises:
        ConfigError: The name cannot be one, or hides a module or an experiment; or a file is there
            already.
        StoreError: The files cannot be written; those that were are taken away again.
    """
    _check_name(name)
    texts = _fill_templates(name, folder)
    _check_targets(folder, texts)
    _check_unused(name)
    with ExitStack() as undo:
        for path, text in texts.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # "x" follows no link, and writes over no file that came since the check
                with path.open("x", encoding="utf-8") as file:
                    undo.callback(path.unlink)
                    file.write(text)
            except OSError as error:
                raise StoreError(
                    f"cannot write {show_path(path)}: {error.strerror}. Go to a folder that you "
                    "may write to."
                ) from error
        undo.pop_all()
    return list(texts)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"new-kind {name!r}: it names a Python module: give at most 40 of a-z, 0-9 and _, a "
            "letter first"
        )
    if keyword.iskeyword(name) or name in _VALUES or name == "conftest":
        raise ConfigError(
            f"new-kind {name}: Python, YAML or pytest reserves this word; choose another name"
        )


def _check_unused(name: str) -> None:
    """Refuse a name that would hide a module or an experiment."""
    # `find_spec` imports nothing of a name without dots.
    spec = find_spec(name)
    # a folder without code, such as one of images, has no origin and is hidden by a module anyway
    if spec is not None and spec.origin is not None:
        raise ConfigError(
            f"new-kind {name}: a module with this name exists, which yours would hide; choose "
            "another name"
        )
    if (CONF / "experiment" / f"{name}.yaml").is_file():
        raise ConfigError(
            f"new-kind {name}: lit_data has an experiment with this name; choose another name"
        )


def _fill_templates(name: str, folder: Path) -> dict[Path, str]:
    """Return the text of each file by its path."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    templates = {
        folder / f"{name}.py": "my_kind.py",
        folder / f"test_{name}.py": "test_my_kind.py",
        folder / "conf" / "experiment" / f"{name}.yaml": "my_kind.yaml.txt",
    }
    texts = {}
    for path, template in templates.items():
        text = (CONF / "new_kind" / template).read_text(encoding="utf-8")
        texts[path] = text.replace("my_kind", name).replace("MyKind", class_name)
    return texts


def _check_targets(folder: Path, texts: Mapping[Path, str]) -> None:
    """Refuse what is there already, and folders that lead elsewhere."""
    for path in texts:
        if path.exists() or path.is_symlink():
            raise ConfigError(
                f"{show_path(path)} already exists: choose another name or an empty folder"
            )
    for path in (folder / "conf", folder / "conf" / "experiment"):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise ConfigError(f"{show_path(path)} is a link or not a folder: go to an empty folder")
