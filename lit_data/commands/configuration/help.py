"""``--help`` and the completion of a shell: commands, their keys, and what their YAML files say of them."""

import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lit_data.checks import check_choice
from lit_data.commands import COMMANDS, TOOLS
from lit_data.commands.configuration.installed import list_conf_packages
from lit_data.files import write_text

_PAGE = """\
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

_COMMAND_PAGE = """\
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

CONF = Path(__file__).parents[2] / "conf"
_LINE = re.compile(
    r"(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?: +(?P<value>[^ #].*?))?(?:  # (?P<comment>.*))?$"
)
_TRAINS = ("fit", "validate", "test", "predict")
_NO_GROUPS = ("hydra", "cluster")
_COLUMN = 34

_COMPLETED_OPTIONS = (
    "--help",
    "--version",
    "--multirun",
    "--config-dir",
    "--package",
    "--cfg",
    "--resolve",
)
_NOT_COMPLETED = ("hydra", "cluster", "paths")
_DEFAULTS = {
    "data": "stripe",
    "model": "segmentation",
    "trainer": "auto",
    "callbacks": "default",
}
"""Groups whose keys are completed, and their options where none is chosen."""
_BASH = """\
_lit_data() {
    local line="${COMP_LINE:0:COMP_POINT}" word before words
    word="${line##* }"
    read -ra words <<< "${line%"$word"}"
    mapfile -t COMPREPLY < <(lit-data --complete "${words[@]}" "$word" 2> /dev/null)
    before="${word%"${word##*=}"}"  # the shell takes what stands before the last = for a word of its own
    [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"$before"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    [[ ${#COMPREPLY[@]} == 0 ]] && compopt -o default
}
complete -F _lit_data lit-data
"""
_ZSH = """\
#compdef lit-data
local -a found keys
found=("${(@f)$(lit-data --complete "${(@)words[1,CURRENT]}" 2> /dev/null)}")
keys=(${(M)found:#*=})
found=(${found:#*=})
[[ -n $keys ]] && compadd -S '' -- $keys
[[ -n $found ]] && compadd -- $found
[[ -z $keys$found ]] && _files
"""
_FISH = """\
complete -c lit-data -f -a '(lit-data --complete (commandline -opc) (commandline -ct) 2> /dev/null)'
"""
_SHELLS = {
    "bash": (_BASH, "~/.local/share/bash-completion/completions/lit-data", "open a new shell"),
    "zsh": (
        _ZSH,
        "~/.zfunc/_lit-data",
        "have `fpath+=~/.zfunc; autoload -U compinit; compinit` in ~/.zshrc",
    ),
    "fish": (_FISH, "~/.config/fish/completions/lit-data.fish", "open a new shell"),
}


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


def install_completion(shell: str) -> Path:
    """Write the script of a shell where it looks for such scripts, and say what is left to do.

    Args:
        shell: ``bash``, ``zsh`` or ``fish``.

    Raises:
        ConfigError: Another one.
    """
    check_choice("--install-completion", shell, tuple(_SHELLS))
    script, file_name, next_step = _SHELLS[shell]
    path = Path(file_name).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, script)
    print(f"{path}\n{next_step}")
    return path


def complete(words: Sequence[str]) -> list[str]:
    """List what the last word may become.

    Args:
        words: The command line as far as it is typed, the program's name first; the last one may be
            empty.

    Returns:
        Whole words; keys end in ``=``.
    """
    *before, word = words[1:] or [""]
    # Hydra's + before a key that is new is typed already and stays.
    name = word.removeprefix("+")
    plus = word[: len(word) - len(name)]
    matches = [option for option in _list_candidates(before, name) if option.startswith(name)]
    return sorted({f"{plus}{match}" for match in matches})


def _list_candidates(before: Sequence[str], name: str) -> Sequence[str]:
    """Return what may stand behind some words, where the next one begins as `name`."""
    if not before:
        return [*COMMANDS, *TOOLS, *_COMPLETED_OPTIONS]
    if name.startswith("-"):
        return _COMPLETED_OPTIONS
    if before[0] not in COMMANDS:
        return []
    key, equals, _ = name.partition("=")
    if equals:
        return [f"{key}={value}" for value in _list_values(key, before)]
    return [f"{key}=" for key in _list_completed_keys(before)]


def _list_values(key: str, words: Sequence[str]) -> Iterator[str]:
    """Options of a group, else what the comment of a key offers: ``one_cycle | cosine | none``."""
    for folder in _list_folders(words):
        for path in (folder / key).glob("*.yaml"):
            if not path.stem.startswith("base"):  # those are parts of others
                yield path.stem
    for known_key, value, comment in _read_all(words):
        if known_key == key:
            yield value
            yield from _read_choices(comment)


def _read_choices(comment: str) -> list[str]:
    """Return the values that a comment offers; none without ``|``.

    ``of the run: one_cycle | cosine`` and ``split: the batch stays | resize: it moves`` name two
    each.
    """
    first, *rest = (part.split() for part in comment.split(" | "))
    if not rest:
        return []
    # Words before the first value say what it is of; with a colon, its meaning follows.
    first_value = first[0] if first[0].endswith(":") else first[-1]
    values = [first_value, *(words[0] for words in rest)]
    return [value.strip(":;,.") for value in values]


def _list_completed_keys(words: Sequence[str]) -> Iterator[str]:
    for folder in _list_folders(words):  # groups are chosen as keys are given: data=ct
        for path in folder.glob("[!_]*/"):
            if path.name not in _NOT_COMPLETED:
                yield path.name
    for key, _, _ in _read_all(words):
        if not key.endswith("_target_"):
            yield key


def _read_all(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield keys, values and comments of the command, of all commands, and of chosen options."""
    for name in (words[0], "base"):
        path = CONF / f"{name}.yaml"
        if path.is_file():
            yield from read_keys(path)
    for group, default in _DEFAULTS.items():
        path = CONF / group / f"{choose_option(group, words, default)}.yaml"
        if path.is_file():
            for key, value, comment in read_option(path):
                yield f"{group}.{key}", value, comment


def _list_folders(words: Sequence[str]) -> list[Path]:
    """Return the folders of configurations: ours, and those of ``--config-dir``."""
    folders = [CONF]
    for word, following in pairwise(words):
        if word in ("--config-dir", "-cd"):
            folders.append(Path(os.path.expandvars(following)).expanduser())
    return folders
