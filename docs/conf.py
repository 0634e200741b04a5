"""The pages as a site: ``python -m sphinx -W docs site``.

Sphinx and not MkDocs, because the docstrings are written for it (tables, names in back quotes that
become links) and because its search works on a folder that no server serves.
"""

import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Final

from sphinx.application import Sphinx

import lit_data
from lit_data.app.configuration.names import CLASSES
from lit_data.app.configuration.rows import read_first_comment, read_keys

ROOT: Final = Path(__file__).resolve().parents[1]
GENERATED: Final = ROOT / "docs" / "reference"
PACKAGES: Final = {
    "datamodules": "Datamodules",
    "callbacks": "Callbacks",
    "loading": "Loading",
    "augment": "Augmentation",
    "synthesis": "Synthesis of defects",
    "datasets": "Datasets",
    "models": "Models",
    "predict": "Prediction",
    "images": "Images, masks and stores",
    "testing": "Testing",
    "wings.detection": "Detection",
    "wings.volumes": "Volumes",
    "wings.watermarks": "Watermarks",
    "wings.gan": "Generated images",
    "wings.export": "Exported files",
    "app.api": "Commands from Python",
    "core.types": "Types and protocols",
    "core.errors": "Errors",
}

project, author, release = "lit_data", "the lit_data developers", lit_data.__version__
project_copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["reference/readme.md"]  # a part of index.md
html_theme = "furo"
html_title = "lit_data"

default_role = "py:obj"  # `AdaptiveBatchSize` in a docstring is a link where there is such a name
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False  # signatures that take the options of files have no such source
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
napoleon_use_ivar = True
nb_execution_mode = "off"
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # README begins with headings of its own
autodoc_inherit_docstrings = False


def setup(app: Sphinx) -> None:
    """Write the pages that come from the code, and hand those of the repository on."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    GENERATED.mkdir()
    for name, title in PACKAGES.items():
        exports = hasattr(import_module(f"lit_data.{name}"), "__all__")
        options = "   :members:\n   :show-inheritance:\n" + "   :imported-members:\n" * exports
        text = f"{_heading(title, '=')}``lit_data.{name}``\n\n.. automodule:: lit_data.{name}\n{options}"
        (GENERATED / f"{name}.rst").write_text(text, encoding="utf-8")
    options = [
        _heading("Options", "="),
        *(f".. autoclass:: {name}\n   :members:\n" for name in sorted(CLASSES)),
    ]
    (GENERATED / "options.rst").write_text("\n".join(options), encoding="utf-8")
    (GENERATED / "keys.rst").write_text("\n".join(_write_keys()), encoding="utf-8")
    for name, up, down in [
        ("README", "", "reference/"),
        ("BENCHMARKS", "../", ""),
        ("CONTRIBUTING", "../", ""),
    ]:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8").replace("](docs/", f"]({up}")
        (GENERATED / f"{name.lower()}.md").write_text(_lead_inside(text, down), encoding="utf-8")
    shutil.copytree(ROOT / "notebooks", GENERATED / "notebooks")
    app.connect("autodoc-process-docstring", _name_arguments, priority=0)  # before Napoleon
    app.connect("source-read", _lead_pages_inside)


def _lead_pages_inside(app: Sphinx, name: str, source: list[str]) -> None:
    up = "../" * name.startswith("scale/")
    source[0] = _lead_inside(source[0], f"{up}reference/")


def _write_keys() -> list[str]:
    """The keys of each file of the configuration, with their defaults and what their comments say."""
    conf = ROOT / "conf"
    files = {
        "Every command": "base",
        "fit": "fit",
        "predict": "predict",
        "show": "show",
        "prepare": "prepare",
    }
    parts = [_heading("Keys of the configuration", "="), _INTRODUCTION]
    for title, name in files.items():
        parts += [_heading(title, "-"), _table(conf / f"{name}.yaml", "")]
    for group in (
        "data",
        "model",
        "synthesis",
        "augment",
        "trainer",
        "callbacks",
        "extra_callbacks",
        "logger",
    ):
        parts.append(_heading(group, "-"))
        for path in sorted((conf / group).glob("*.yaml")):
            title, about = f"{group}={path.stem}", read_first_comment(path)
            parts += [
                _heading(title, "~"),
                f"{_plain(about)}\n",
                _table(path, f"{group.removeprefix('extra_')}."),
            ]
    return parts


_INTRODUCTION: Final = """\
Each key is written on the command line as ``key=value``; ``COMMAND --help`` lists those of a command, and
``COMMAND --cfg job`` prints all with the values of an experiment. An experiment may set other values than those here.
"""


def _table(path: Path, prefix: str) -> str:
    rows = [
        row
        for row in read_keys(path)
        if not row[0].endswith("_target_") and not row[0].startswith("defaults")
    ]
    cells = [
        (f"``{prefix}{key}``", f"``{value}``", _plain(comment)) for key, value, comment in rows
    ]
    if not cells:
        return ""
    lines = [".. list-table::", "   :widths: 35 20 45", "   :header-rows: 1", ""]
    for row in [("key", "default", "what it means"), *cells]:
        lines += [f"   {'* -' if not place else '  -'} {cell}" for place, cell in enumerate(row)]
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    return re.sub(r"([*`_|\\])", r"\\\1", text)


def _heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def _name_arguments(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """A heading such as "Args, in addition to those of `Source`:" becomes one that Napoleon knows."""
    for place, line in enumerate(lines):
        if (match := re.fullmatch(r"Args, (in addition to those of .*):", line)) is not None:
            lines[place : place + 1] = [f"Arguments {match[1]}:", "", "Args:"]


def _lead_inside(text: str, folder: str) -> str:
    """Links to files of the repository that are pages of the site too."""
    return re.sub(
        r"\]\((?:\.\./)*(BENCHMARKS|CONTRIBUTING)\.md\)",
        lambda m: f"]({folder}{m[1].lower()}.md)",
        text,
    )
