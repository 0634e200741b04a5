"""Completion of words in a shell: ``lit-data --install-completion bash|zsh|fish``, and what its script asks for."""

import os
from collections.abc import Iterator, Sequence
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
    script, place, then = _SHELLS[shell]
    path = Path(place).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, script)
    print(f"{path}\n{then}")
    return path


def complete(words: Sequence[str]) -> list[str]:
    """What the last word may become.

    Args:
        words: The command line as far as it is typed, the program's name first; the last one may be
            empty.

    Returns:
        Whole words; keys end in ``=``.
    """
    *before, word = words[1:] or [""]
    plus, name = ("+", word[1:]) if word.startswith("+") else ("", word)
    if not before:
        found: Iterator[str] = iter([*COMMANDS, *TOOLS, *_OPTIONS])
    elif word.startswith("-"):
        found = iter(_OPTIONS)
    elif before[0] not in COMMANDS:
        return []
    elif "=" in name:
        found = (
            f"{name.partition('=')[0]}={value}"
            for value in _list_values(name.partition("=")[0], before)
        )
    else:
        found = (f"{key}=" for key in _list_keys(before))
    return sorted({f"{plus}{one}" for one in found if one.startswith(name)})


def _list_values(key: str, words: Sequence[str]) -> Iterator[str]:
    """Options of a group, else what the comment of a key offers: ``one_cycle | cosine | none``."""
    for folder in _folders(words):
        options = (path.stem for path in (folder / key).glob("*.yaml"))
        yield from (option for option in options if not option.startswith("base"))
    for known, value, comment in _read_all(words):
        if known == key:
            yield from [value, *_read_choices(comment)]


def _read_choices(comment: str) -> list[str]:
    """``of the run: one_cycle | cosine`` and ``split: the batch stays | resize: it moves`` name two values each."""
    first, *rest = (part.split() for part in comment.split(" | "))
    if not rest:
        return []
    named = first[0] if first[0].endswith(":") else first[-1]
    return [word.strip(":;,.") for word in (named, *(part[0] for part in rest))]


def _list_keys(words: Sequence[str]) -> Iterator[str]:
    for folder in _folders(words):
        yield from (path.name for path in folder.glob("[!_]*/") if path.name not in _NO_GROUPS)
    yield from (key for key, _, _ in _read_all(words) if not key.endswith("_target_"))


def _read_all(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Keys of the command, of all commands, and of the options that are chosen, with values and comments."""
    for name in (words[0], "base"):
        yield from read_keys(CONF / f"{name}.yaml") if (CONF / f"{name}.yaml").is_file() else ()
    for group, option in {
        "data": "stripe",
        "model": "segmentation",
        "trainer": "auto",
        "callbacks": "default",
    }.items():
        path = CONF / group / f"{choose_option(group, words, option)}.yaml"
        for key, value, comment in read_option(path) if path.is_file() else ():
            yield f"{group}.{key}", value, comment


def _folders(words: Sequence[str]) -> list[Path]:
    own = [
        words[place + 1] for place, word in enumerate(words[:-1]) if word in ("--config-dir", "-cd")
    ]
    return [CONF, *(Path(os.path.expandvars(folder)).expanduser() for folder in own)]
