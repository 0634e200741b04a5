"""``--help``: the page of all commands, and for each command the keys that it reads, as their YAML
files explain them.

The files are read line by line, because a YAML reader drops comments, and so that Hydra need not be
imported.
"""

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from lit_data.commands import COMMANDS, TOOLS

_PAGE: Final = """\
usage: python -m lit_data COMMAND [key=value ...] [options]

commands (COMMAND --help lists its keys):
{commands}

experiments (experiment=NAME):
{experiments}

options:
  -m, --multirun         run every combination of comma-separated values: -m seed=1,2,3; sweep.resume=latest goes on
  --config-dir FOLDER    a folder of your own groups and experiments, laid out like lit_data/conf
  --package NAME         allow `_target_` below your own package NAME; may be given again
  --cfg job|hydra|all    print the composed configuration and stop; --resolve fills in interpolations
  --install-completion bash|zsh|fish    lets the shell complete commands, experiments, keys and groups of lit-data
  -h, --help, --version

examples:
  python -m lit_data fit experiment=stripe
  python -m lit_data fit experiment=stripe data.root=images trainer.max_epochs=20 data.loader.batch_size=64
  python -m lit_data test experiment=stripe ckpt=runs/fit/stripe/RUN/checkpoints/best.ckpt
  python -m lit_data fit -m experiment=stripe seed=1,2,3
  python -m lit_data report runs/fit/stripe/RUN
  python -m lit_data fit experiment=mine --config-dir conf --package my_project

exit codes:
  0 done   2 configuration   3 data   4 stored file   5 memory   6 worker or rank   1 bug   130 Ctrl-C   143 SIGTERM
  LIT_DATA_TRACEBACK=1 or HYDRA_FULL_ERROR=1 shows where an error was raised."""

_COMMAND_PAGE: Final = """\
usage: python -m lit_data {command} [experiment=NAME] [key=value ...] [options]

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

{command} experiment=NAME --cfg job prints every key with its value.
python -m lit_data --help lists experiments and options."""

CONF: Final = Path(__file__).parents[2] / "conf"
_LINE: Final = re.compile(
    r"(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?: +(?P<value>[^ #].*?))?(?:  # (?P<comment>.*))?$"
)
_TRAINS: Final = ("fit", "validate", "test", "predict")
_COLUMN: Final = 34


def format_help(config_dir: str | None) -> str:
    """The page of all commands.

    Args:
        config_dir: The user's own folder, whose experiments are listed too.
    """
    folders = [CONF, *([Path(config_dir)] if config_dir else [])]
    experiments = {
        path.relative_to(folder / "experiment").with_suffix("").as_posix(): read_first_comment(path)
        for folder in folders
        for path in sorted((folder / "experiment").rglob("*.yaml"))
    }
    return _PAGE.format(
        commands=_format_table({**COMMANDS, **TOOLS}),
        experiments=_format_table(experiments) or "  none",
    )


def format_command_help(command: str, words: Sequence[str]) -> str:
    """The page of one command: its keys and groups, with what their files say.

    Args:
        command: One of `lit_data.commands.COMMANDS`.
        words: Overrides; ``data=NAME`` and ``experiment=NAME`` choose whose keys are listed.
    """
    data = choose_option("data", words, "stripe")
    trainer = f"\nkeys of trainer, and any argument of Trainer:\n{_list_keys('trainer/auto.yaml', 'trainer.')}\n"
    groups = {
        folder.name: ", ".join(
            sorted(path.stem for path in folder.glob("*.yaml") if not path.stem.startswith("base"))
        )
        for folder in sorted(CONF.iterdir())
        if folder.is_dir()
        and folder.name not in ("hydra", "cluster")
        and any(folder.glob("*.yaml"))
    }
    return _COMMAND_PAGE.format(
        command=command,
        what=COMMANDS[command],
        own=_list_keys(f"{command}.yaml") or "  none beside those below",
        shared=_list_keys("base.yaml"),
        data=data,
        of_data=_list_keys(f"data/{data}.yaml", "data."),
        of_trainer=trainer if command in _TRAINS else "",
        groups=_format_rows(groups.items()),
    )


def choose_option(group: str, words: Sequence[str], default: str) -> str:
    """The option of a group that the words choose, by themselves or by their experiment; else the default one."""
    chosen = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}
    path = CONF / "experiment" / f"{chosen.get('experiment', '')}.yaml"
    found = chosen.get(group)
    for _ in range(2):  # an experiment may build on another one
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        override = re.search(rf"override /{group}: (\w+)", text)
        found = found or (override[1] if override else None)
        base = re.search(r"^  - (\w+)$", text, re.MULTILINE)
        path = path.with_name(f"{base[1]}.yaml") if base else path
    return found if found and (CONF / group / f"{found}.yaml").is_file() else default


def _list_keys(name: str, prefix: str = "") -> str:
    return _format_rows(
        (f"{prefix}{key}={value}", comment)
        for key, value, comment in read_option(CONF / name)
        if not key.endswith("_target_") and key.split(".")[0] not in ("defaults", "command")
    )


def read_option(path: Path) -> Iterator[tuple[str, str, str]]:
    """As `read_keys`, with the keys of the files of its group that the defaults list of an option names."""
    text = path.read_text(encoding="utf-8")
    parents = re.findall(r"^  - (base\w*)$", text, re.MULTILINE) if path.parent != CONF else []
    rows: dict[str, tuple[str, str, str]] = {}
    for parent in parents:
        rows |= {row[0]: row for row in read_option(path.with_name(f"{parent}.yaml"))}
    rows |= {row[0]: row for row in read_keys(path)}
    yield from rows.values()


def read_keys(path: Path) -> Iterator[tuple[str, str, str]]:
    """Dotted key, value and comment of each line of a file of ``conf`` that has a value; a comment may stand above."""
    parents: list[tuple[int, str]] = []
    above = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            above = (
                line.strip().removeprefix("# ") if line.strip().startswith("# ") and parents else ""
            )
            continue
        depth = len(match["indent"])
        while parents and parents[-1][0] >= depth:
            parents.pop()
        parents.append((depth, match["key"]))
        if match["value"] is not None:
            yield ".".join(key for _, key in parents), match["value"], match["comment"] or above
        above = ""


def _format_rows(rows: Iterable[tuple[str, str]]) -> str:
    """A column of words beside what they mean, in the width of the terminal."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    lines: list[str] = []
    for word, text in rows:
        wrapped = textwrap.wrap(text, width - _COLUMN) or [""]
        if len(word) > _COLUMN - 4:
            lines.append(f"  {word}")
            lines += [" " * _COLUMN + part for part in wrapped if part]
        else:
            lines.append(f"  {word:{_COLUMN - 2}}{wrapped[0]}".rstrip())
            lines += [" " * _COLUMN + part for part in wrapped[1:]]
    return "\n".join(lines)


def _format_table(rows: dict[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {name:{width}}  {text}".rstrip() for name, text in rows.items())


def read_first_comment(path: Path) -> str:
    """What a file of ``conf`` says of itself in its first line."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comments = (line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")
