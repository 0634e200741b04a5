"""``new-kind``: write a kind of data of one's own, as a package that can be installed."""

import keyword
import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lit_data.app.cli import Parser
from lit_data.app.configuration.installed import list_conf_packages
from lit_data.app.configuration.rows import CONF
from lit_data.core.errors import ConfigError, StoreError, show_path

_HELP = """\
usage: lit-data new-kind NAME

Writes your own kind of data into the folder NAME: images with one label each. It works as it is.

  NAME/pyproject.toml                       makes it a package, whose experiments lit_data finds
  NAME/NAME/dataset.py, datamodule.py       its dataset and datamodule
  NAME/NAME/conf/experiment/NAME.yaml       an experiment that trains on it
  NAME/tests/test_NAME.py                   a test

NAME must be the name of a Python module. Nothing is overwritten. docs/extend.md has the next steps."""

_NEXT = """\
next:
  pip install -e ./{name}
  python -m pytest {name}
  lit-data fit experiment={name} data.root=FOLDER"""

_NAME = re.compile(r"(?!.{41})[a-z][a-z0-9]*(_[a-z0-9]+)*")
_VALUES = frozenset({"null", "true", "false", "yes", "no", "on", "off", "nan", "inf"})
"""Words that YAML or Hydra read as a value and not as a name."""
_FOLDERS = frozenset({"conftest", "tests"})
"""Names that pytest gives a meaning, or that stand beside the package."""
_TEMPLATES = (
    "pyproject.toml",
    "my_kind/__init__.py",
    "my_kind/dataset.py",
    "my_kind/datamodule.py",
    "my_kind/conf/experiment/my_kind.yaml.txt",
    "tests/test_my_kind.py",
)
"""Files below ``conf/new_kind``; an experiment there is no experiment of ours, so its name ends otherwise."""


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
    """Write the package of a kind of data: its module, a test and an experiment.

    Args:
        name: Of the package and the experiment.
        folder: Where the folder of the package is made; nothing that is there is changed.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: The name cannot be one, or hides a module or an experiment; or a file or folder
            has it already.
        StoreError: The files cannot be written; those that were are taken away again.
    """
    _check_name(name)
    target = folder / name
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"{show_path(target)} already exists: choose another name or go to another folder"
        )
    _check_unused(name)
    texts = _fill_templates(name)
    try:
        target.mkdir(parents=True)
        for file, text in texts.items():
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        if not isinstance(error, FileExistsError):  # it came since the check, and is not ours
            shutil.rmtree(target, ignore_errors=True)
        raise StoreError(
            f"cannot write {show_path(target)}: {error.strerror}. Go to a folder that you may "
            "write to."
        ) from error
    return [target / file for file in texts]


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"new-kind {name!r}: it names a Python module: give at most 40 of a-z, 0-9 and "
            "single _ between them, a letter first"
        )
    if keyword.iskeyword(name) or name in _VALUES | _FOLDERS:
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
    folders = {"lit_data": CONF}
    folders |= {package.package: package.folder for package in list_conf_packages()}
    for owner, folder in folders.items():
        if (folder / "experiment" / f"{name}.yaml").is_file():
            raise ConfigError(
                f"new-kind {name}: {owner} has an experiment with this name; choose another name"
            )


def _fill_templates(name: str) -> dict[str, str]:
    """Return the text of each file by its path in the folder of the package."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    texts = {}
    for template in _TEMPLATES:
        text = (CONF / "new_kind" / template).read_text(encoding="utf-8")
        file = template.removesuffix(".txt").replace("my_kind", name)
        texts[file] = text.replace("my_kind", name).replace("MyKind", class_name)
    return texts
