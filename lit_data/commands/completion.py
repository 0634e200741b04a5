"""Completion of words in a shell: ``lit-data --install-completion bash|zsh|fish``.

Its script asks for the words with ``lit-data --complete``.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from lit_data.checks import check_choice
from lit_data.commands import COMMANDS, TOOLS
from lit_data.commands.configuration.help import CONF, choose_option, read_keys, read_option
from lit_data.files import write_text

_OPTIONS: Final = (
    "--help",
    "--version",
    "--multirun",
    "--config-dir",
    "--package",
    "--cfg",
    "--resolve",
)
_NO_GROUPS: Final = ("hydra", "cluster", "paths")
_DEFAULTS: Final = {
    "data": "stripe",
    "model": "segmentation",
    "trainer": "auto",
    "callbacks": "default",
}
"""Groups whose keys are completed, and their options where none is chosen."""

_BASH: Final = """\
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
_ZSH: Final = """\
#compdef lit-data
local -a found keys
found=("${(@f)$(lit-data --complete "${(@)words[1,CURRENT]}" 2> /dev/null)}")
keys=(${(M)found:#*=})
found=(${found:#*=})
[[ -n $keys ]] && compadd -S '' -- $keys
[[ -n $found ]] && compadd -- $found
[[ -z $keys$found ]] && _files
"""
_FISH: Final = """\
complete -c lit-data -f -a '(lit-data --complete (commandline -opc) (commandline -ct) 2> /dev/null)'
"""
_SHELLS: Final = {
    "bash": (_BASH, "~/.local/share/bash-completion/completions/lit-data", "open a new shell"),
    "zsh": (
        _ZSH,
        "~/.zfunc/_lit-data",
        "have `fpath+=~/.zfunc; autoload -U compinit; compinit` in ~/.zshrc",
    ),
    "fish": (_FISH, "~/.config/fish/completions/lit-data.fish", "open a new shell"),
}


def install(shell: str) -> Path:
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
        return [*COMMANDS, *TOOLS, *_OPTIONS]
    if name.startswith("-"):
        return _OPTIONS
    if before[0] not in COMMANDS:
        return []
    key, equals, _ = name.partition("=")
    if equals:
        return [f"{key}={value}" for value in _list_values(key, before)]
    return [f"{key}=" for key in _list_keys(before)]


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


def _list_keys(words: Sequence[str]) -> Iterator[str]:
    for folder in _list_folders(words):  # groups are chosen as keys are given: data=ct
        for path in folder.glob("[!_]*/"):
            if path.name not in _NO_GROUPS:
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
