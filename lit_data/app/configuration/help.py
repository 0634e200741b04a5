"""``--help`` and the completion of a shell: commands, their keys, and what their YAML files say of them."""

import os
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lit_data.app import COMMANDS, list_tools
from lit_data.app.configuration.installed import list_conf_packages
from lit_data.app.configuration.rows import (
    CONF,
    OF_FILES,
    Files,
    Row,
    read_first_comment,
    read_keys,
    read_words,
)
from lit_data.core.checks import check_choice
from lit_data.core.files import write_text

_PAGE = """\
usage: lit-data COMMAND [key=value ...] [options]

commands (COMMAND --help lists its keys):
{commands}

experiments (experiment=NAME):
{experiments}

options:
  -m, --multirun         run every combination of comma-separated values: -m seed=1,2,3; sweep.resume=latest resumes
  --config-dir FOLDER    a folder of your own groups and experiments, laid out like lit_data/conf
  --package NAME         allow `_target_` in your own package NAME; can be repeated
  --cfg job|hydra|all    print the composed configuration and exit; --resolve fills in interpolations
  --install-completion bash|zsh|fish    set up completion of commands, experiments, keys and groups in the shell
  -h, --help, --version

examples:
  lit-data fit experiment=stripe
  lit-data fit experiment=stripe data.root=images trainer.max_epochs=20 data.loader.batch_size=64
  lit-data test experiment=stripe ckpt=runs/fit/stripe/RUN/checkpoints/best.ckpt
  lit-data fit -m experiment=stripe seed=1,2,3
  lit-data report runs/fit/stripe/RUN
  lit-data fit experiment=mine --config-dir conf --package my_project

exit codes:
  0 done   2 configuration   3 data   4 stored file   5 memory   6 worker or rank   1 bug   130 Ctrl-C   143 SIGTERM
  LIT_DATA_TRACEBACK=1 or HYDRA_FULL_ERROR=1 shows where an error was raised."""

_COMMAND_PAGE = """\
usage: lit-data {command} [experiment=NAME] [key=value ...] [options]

{what}
{chosen}

{keys}

{more}"""
_OPTIONS = """\
{command} experiment=NAME --cfg job prints all as YAML; lit-data --help lists the experiments."""
_GROUPS = """\
groups (GROUP=OPTION; each option is a file of lit_data/conf/GROUP):
{groups}

"""
_USUAL = (
    "data.root",
    "data.splits",
    "data.classes",
    "data.patch_px",
    "data.size_px",
    "data.image_px",
    "data.loader.batch_size",
    "model.net",
    "model.optimizer.lr",
    "model.generator_optimizer.lr",
    "trainer.max_epochs",
    "callbacks.checkpoint.monitor",
    "seed",
    "name",
    "resume",
)
"""Keys that trainings differ in most, of which the first ten that an experiment has are shown."""
_SOURCES = ("data.root", "run", "ckpt")
"""The same of other commands, before their own keys."""
_MOST_USUAL = 10
_NET = "model.net._target_"
_TRAINS = ("fit", "benchmark")
_WITHOUT_RUN = ("prepare", "show", "doctor")
_NO_GROUPS = ("hydra", "cluster")
_COLUMN = 34
_ALL = "all"
"""Word behind ``--help``."""

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
    experiments: dict[str, str] = {}
    for folder in _list_folders(config_dir):
        root = folder / "experiment"
        for path in sorted(root.rglob("*.yaml")):
            name = path.relative_to(root).with_suffix("").as_posix()
            experiments.setdefault(name, read_first_comment(path))
    return _PAGE.format(
        commands=_format_table({**COMMANDS, **list_tools()}),
        experiments=_format_table(experiments) or "  none",
    )


def format_command_help(command: str, words: Sequence[str], config_dir: str | None = None) -> str:
    """Return the page of one command: its keys with the values that the words give them.

    Args:
        command: One of `lit_data.app.COMMANDS`.
        words: Overrides, such as ``experiment=NAME``; with ``all`` all keys are shown, else the
            usual ones.
        config_dir: The user's own folder of configurations.
    """
    files = Files(_list_folders(config_dir))
    overrides = [word for word in words if word != _ALL]
    rows = files.compose(command, overrides)
    if _ALL in words:
        keys = _format_rows(map(_describe, _list_all(rows)))
        more = _GROUPS.format(groups=_format_rows(_list_groups())) + _OPTIONS
    else:
        keys = _format_rows(map(_describe_briefly, _list_usual(command, rows)))
        line = shlex.join(["lit-data", command, *overrides, "--help", _ALL])
        more = f"{line} lists all {len(_list_all(rows))} keys and the groups.\n{_OPTIONS}"
    return _COMMAND_PAGE.format(
        command=command,
        what=COMMANDS[command],
        chosen=_describe_choice(files, overrides),
        keys=keys,
        more=more.format(command=command),
    )


def _describe_choice(files: Files, words: Sequence[str]) -> str:
    """Return the experiment and the options of its groups, or which experiments there are."""
    name = read_words(words).get("experiment", "")
    path = files.find("experiment", name)
    if path is None:
        names = ", ".join(sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
        return textwrap.fill(f"values without an experiment, of experiment={names}", _measure())
    choices = files.choose(words).items()
    options = " ".join(f"{group}={option}" for group, option in choices if option != "null")
    text = f"experiment={name}: {read_first_comment(path)}\n{options}"
    return "\n".join(textwrap.fill(line, _measure()) for line in text.splitlines())


def _list_all(rows: Mapping[str, Row]) -> list[Row]:
    return [row for row in rows.values() if not row.key.endswith("_target_")]


def _list_usual(command: str, rows: Mapping[str, Row]) -> list[Row]:
    """List the keys of a command that are typed most, at most ten."""
    own_keys = [row.key for row in read_keys(CONF / f"{command}.yaml")]
    sources = _SOURCES[:1] if command in _WITHOUT_RUN else _SOURCES
    keys: Sequence[str] = (*sources, *own_keys)
    if command in _TRAINS:
        keys = (*own_keys, *_USUAL) if command == "benchmark" else _USUAL
    usual = []
    for key in dict.fromkeys(keys):
        if key == "model.net" and _NET in rows:
            net = rows[_NET].value.rpartition(".")[2]
            usual.append(Row(key, net, "the net; model=OPTION chooses another"))
        elif key in rows and key not in OF_FILES:
            usual.append(rows[key])
    return usual[:_MOST_USUAL]


def _describe(row: Row) -> tuple[str, str]:
    return f"{row.key}={row.value}", row.comment


def _describe_briefly(row: Row) -> tuple[str, str]:
    """Return a key with its value and the first line of what a file says of it."""
    word = f"{row.key}={row.value}"
    width = _measure() - _COLUMN
    return word, textwrap.shorten(row.comment, width, placeholder=" ...")


def _list_groups() -> Iterator[tuple[str, str]]:
    """Yield the groups of ``conf`` and their options."""
    for folder in sorted(CONF.iterdir()):
        if not folder.is_dir() or folder.name in _NO_GROUPS:
            continue
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        if names:  # those that begin with base are parts of others
            options = [name for name in names if not name.startswith("base")]
            yield folder.name, ", ".join(options)


def _measure() -> int:
    """Return the letters of a line."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def _format_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return a column of words beside what they mean, in the width of the terminal."""
    width = _measure() - _COLUMN
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
        return [*COMMANDS, *list_tools(), *_COMPLETED_OPTIONS]
    if name.startswith("-"):
        return _COMPLETED_OPTIONS
    if before[0] not in COMMANDS:
        return []
    key, equals, _ = name.partition("=")
    if equals:
        return [f"{key}={value}" for value in _list_values(key, before)]
    keys = [f"{key}=" for key in _list_completed_keys(before)]
    return (
        keys
        if "experiment" in read_words(before[1:])
        else [*_list_values("experiment", before), *keys]
    )


def _list_values(key: str, words: Sequence[str]) -> Iterator[str]:
    """Options of a group, else what the comment of a key offers: ``one_cycle | cosine | none``."""
    for folder in _list_typed_folders(words):
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
    for folder in _list_typed_folders(words):  # groups are chosen as keys are given: data=ct
        for path in folder.glob("[!_]*/"):
            if path.name not in _NOT_COMPLETED:
                yield path.name
    for key, _, _ in _read_all(words):
        if not key.endswith("_target_"):
            yield key


def _read_all(words: Sequence[str]) -> Iterator[Row]:
    """Yield keys, values and comments of the command and of chosen options."""
    yield from Files(_list_typed_folders(words)).compose(words[0], words[1:]).values()


def _list_typed_folders(words: Sequence[str]) -> list[Path]:
    """Return the folders of configurations; the last ``--config-dir`` of a command line counts."""
    typed = [following for word, following in pairwise(words) if word in ("--config-dir", "-cd")]
    return _list_folders(os.path.expandvars(typed[-1]) if typed else None)


def _list_folders(config_dir: str | None) -> list[Path]:
    """Return the folders of configurations: ours, those of installed packages, and the user's own."""
    folders = [CONF, *(installed.folder for installed in list_conf_packages())]
    return [*folders, Path(config_dir).expanduser()] if config_dir else folders
