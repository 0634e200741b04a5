"""``--help``: the page of all commands, and for each command the keys that it reads.

Their YAML files explain them. The files are read line by line, because a YAML reader drops
comments, and so that Hydra need not be imported.
"""

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from lit_data.commands import COMMANDS, TOOLS
from lit_data.commands.configuration.installed import list_conf_packages

_PAGE: Final = """\
usage: python -m lit_data COMMAND [key=value ...] [options]

commands (COMMAND --help lists its keys):
{commands}

experiments (+experiment=NAME):
{experiments}

options:
  -m, --multirun         run every combination of comma-separated values: -m seed=1,2,3; sweep.resume=latest goes on
  --config-dir FOLDER    a folder of your own groups and experiments, laid out like lit_data/conf
  --package NAME         allow `_target_` below your own package NAME; may be given again
  --cfg job|hydra|all    print the composed configuration and stop; --resolve fills in interpolations
  --install-completion bash|zsh|fish    lets the shell complete commands, experiments, keys and groups of lit-data
  -h, --help, --version

examples:
  python -m lit_data fit +experiment=stripe
  python -m lit_data fit +experiment=stripe data.root=images trainer.max_epochs=20 data.loader.batch_size=64
  python -m lit_data test +experiment=stripe ckpt=runs/fit/stripe/RUN/checkpoints/best.ckpt
  python -m lit_data fit -m +experiment=stripe seed=1,2,3
  python -m lit_data report runs/fit/stripe/RUN
  python -m lit_data fit +experiment=mine --config-dir conf --package my_project

exit codes:
  0 done   2 configuration   3 data   4 stored file   5 memory   6 worker or rank   1 bug   130 Ctrl-C   143 SIGTERM
  LIT_DATA_TRACEBACK=1 or HYDRA_FULL_ERROR=1 shows where an error was raised."""

_COMMAND_PAGE: Final = """\
usage: python -m lit_data {command} [+experiment=NAME] [key=value ...] [options]

{what}

keys of {command}:
{own}

keys of every command:
{shared}

keys of data={data} ({command} data=NAME --help shows those of another):
{of_data}
{of_trainer}
groups (GROUP=OPTION; each option is a file of lit_data/conf/GROUP):
{groups}

{command} +experiment=NAME --cfg job prints every key with its value.
python -m lit_data --help lists experiments and options."""

CONF: Final = Path(__file__).parents[2] / "conf"
_LINE: Final = re.compile(
    r"(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?: +(?P<value>[^ #].*?))?(?:  # (?P<comment>.*))?$"
)
_TRAINS: Final = ("fit", "validate", "test", "predict")
_NO_GROUPS: Final = ("hydra", "cluster")
_COLUMN: Final = 34


def format_help(config_dir: str | None) -> str:
    """Return the page of all commands.

    Args:
        config_dir: The user's own folder, whose experiments are listed beside ours and those of
            installed packages.
    """
    experiments = {}
    folders = [CONF, *(installed.folder for installed in list_conf_packages())]
    if config_dir:
        folders.append(Path(config_dir))
    for folder in folders:
        root = folder / "experiment"
        for path in sorted(root.rglob("*.yaml")):
            name = path.relative_to(root).with_suffix("").as_posix()
            experiments[name] = read_first_comment(path)
    return _PAGE.format(
        commands=_format_table({**COMMANDS, **TOOLS}),
        experiments=_format_table(experiments) or "  none",
    )


def format_command_help(command: str, words: Sequence[str]) -> str:
    """Return the page of one command: its keys and groups, with what their files say.

    Args:
        command: One of `lit_data.commands.COMMANDS`.
        words: Overrides; ``data=NAME`` and ``+experiment=NAME`` choose whose keys are listed.
    """
    data = choose_option("data", words, "stripe")
    trainer_keys = ""
    if command in _TRAINS:
        keys = _list_keys("trainer/auto.yaml", "trainer.")
        trainer_keys = f"\nkeys of trainer, and any argument of Trainer:\n{keys}\n"
    return _COMMAND_PAGE.format(
        command=command,
        what=COMMANDS[command],
        own=_list_keys(f"{command}.yaml") or "  none beside those below",
        shared=_list_keys("base.yaml"),
        data=data,
        of_data=_list_keys(f"data/{data}.yaml", "data."),
        of_trainer=trainer_keys,
        groups=_format_rows(_list_groups()),
    )


def _list_groups() -> Iterator[tuple[str, str]]:
    """Yield the groups of ``conf`` and their options."""
    for folder in sorted(CONF.iterdir()):
        if not folder.is_dir() or folder.name in _NO_GROUPS:
            continue
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        if names:  # those that begin with base are parts of others
            options = [name for name in names if not name.startswith("base")]
            yield folder.name, ", ".join(options)


def choose_option(group: str, words: Sequence[str], default: str) -> str:
    """Return the option of a group that words or their experiment choose; else the default one."""
    overrides = {}
    for word in words:
        key, _, value = word.partition("=")
        overrides[key.lstrip("+")] = value
    option = overrides.get(group)
    path = CONF / "experiment" / f"{overrides.get('experiment', '')}.yaml"
    for _ in range(2):  # an experiment may build on another one
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        match = re.search(rf"override /{group}: (\w+)", text)
        if match and not option:
            option = match[1]
        base = re.search(r"^  - (\w+)$", text, re.MULTILINE)
        if base:
            path = path.with_name(f"{base[1]}.yaml")
    if option and (CONF / group / f"{option}.yaml").is_file():
        return option
    return default


def _list_keys(name: str, prefix: str = "") -> str:
    rows = []
    for key, value, comment in read_option(CONF / name):
        is_option = key.split(".")[0] not in ("defaults", "command")
        if is_option and not key.endswith("_target_"):
            rows.append((f"{prefix}{key}={value}", comment))
    return _format_rows(rows)


def read_option(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield as `read_keys`, with the keys of files of its group that an option builds on."""
    text = path.read_text(encoding="utf-8")
    parents: list[str] = []
    if path.parent != CONF:
        parents = re.findall(r"^  - (base\w*)$", text, re.MULTILINE)
    rows: dict[str, tuple[str, str, str]] = {}
    for parent in parents:
        for row in read_option(path.with_name(f"{parent}.yaml")):
            rows[row[0]] = row
    for row in read_keys(path):
        rows[row[0]] = row
    yield from rows.values()


def read_keys(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield dotted key, value and comment of each line of a file of ``conf`` that has a value.

    A comment may stand above its line.
    """
    parents: list[tuple[int, str]] = []  # indentation and key
    comment_above = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            text = line.strip()
            # Comments before the first key are about the file.
            is_comment = text.startswith("# ") and parents
            comment_above = text.removeprefix("# ") if is_comment else ""
            continue
        depth = len(match["indent"])
        while parents and parents[-1][0] >= depth:
            parents.pop()
        parents.append((depth, match["key"]))
        if match["value"] is not None:
            key = ".".join(name for _, name in parents)
            yield key, match["value"], match["comment"] or comment_above
        comment_above = ""


def _format_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return a column of words beside what they mean, in the width of the terminal."""
    columns = shutil.get_terminal_size((100, 24)).columns
    width = max(60, min(columns, 120)) - _COLUMN
    lines: list[str] = []
    for word, text in rows:
        wrapped = textwrap.wrap(text, width) or [""]
        if len(word) > _COLUMN - 4:  # its text begins below it
            lines.append(f"  {word}")
        else:
            lines.append(f"  {word:{_COLUMN - 2}}{wrapped.pop(0)}".rstrip())
        lines += [" " * _COLUMN + line for line in wrapped if line]
    return "\n".join(lines)


def _format_table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {name:{width}}  {text}".rstrip() for name, text in rows.items())


def read_first_comment(path: Path) -> str:
    """Return what a file of ``conf`` says of itself in its first line."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        comment = line.removeprefix("#").strip()
        if line.startswith("#") and not comment.startswith("@package"):
            return comment
    return ""
