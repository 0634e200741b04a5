"""``lit-data COMMAND [overrides]``: words in, exit code out."""

import argparse
import os
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import NoReturn

import lit_data
from lit_data.app import COMMANDS, ON_RUNS, SCORING, find_module, is_tool, list_tools
from lit_data.app.configuration.help import (
    complete,
    format_command_help,
    format_help,
    install_completion,
)
from lit_data.app.configuration.suggest import did_you_mean, nearest
from lit_data.app.machine import find_full_disk, find_unfit_torchvision
from lit_data.core.errors import (
    ConfigError,
    LitDataError,
    escape,
    find_headline,
    settle_lines,
)
from lit_data.core.heap import load_module

_OTHER_WORDS = {
    "val": "validate",
    "eval": "test",
    "evaluate": "test",
    "infer": "predict",
    "detect": "predict",
}
"""Words of other programs for our commands."""
_SHOWING_TRACEBACKS = ("LIT_DATA_TRACEBACK", "HYDRA_FULL_ERROR")
_ENDINGS = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "stopped by SIGTERM"}


class Parser(argparse.ArgumentParser):
    """Parser of words and options behind ``lit-data``; knows whole names of options only.

    Args:
        command: Typed before the options; ``--help`` after it explains them.
        packages: It takes ``--package NAME``, also several times.
    """

    def __init__(self, command: str = "", *, packages: bool = True) -> None:
        program = f"lit-data {command}".rstrip()
        super().__init__(prog=program, add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("words", nargs="*")
        if packages:
            self.add_argument("--package", action="append", default=[])

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message}. See {self.prog} --help.")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Options and arguments in any order.

        Raises:
            ConfigError: An option is unknown or lacks its value.
        """
        options, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            near = nearest(unknown[0], self._option_string_actions)
            raise ConfigError(
                f"unknown option '{unknown[0]}'.{did_you_mean(near)} See {self.prog} --help."
            )
        return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; by default those of `sys.argv`.

    Returns:
        The exit code; see `--help`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Others must not write into the cache, whatever umask a container or a server starts with.
    os.umask(os.umask(0) | stat.S_IWOTH)
    with _note_sigterm() as received:
        try:
            code = _dispatch(words)
        except BaseException as error:
            code = _choose_exit_code(error)
    if received.sigterm:
        code = 128 + signal.SIGTERM  # whatever Lightning made of it
    if code in _ENDINGS:
        print(f"lit_data: {_ENDINGS[code]}.", file=sys.stderr)
    return code


def _dispatch(words: Sequence[str]) -> int:
    if words and words[0] == "--complete":  # a shell asks what the last word may become
        with _ending_with_reader():
            for word in complete(words[1:]):
                print(word)
        return 0
    if words and words[0] == "--install-completion":
        install_completion(words[1] if len(words) > 1 else "")
        return 0
    if words and is_tool(words[0]):  # they have options of their own and no configuration
        load_module(find_module(words[0])).main(words[1:])
        return 0
    options = _parse(words)
    if not (options.version or options.help or options.cfg or not words):
        _run(_check_command(options.words), options)
        return 0
    with _ending_with_reader():  # not around a run, which a closed pipe would end
        return _print(words, options)


def _print(words: Sequence[str], options: argparse.Namespace) -> int:
    if options.version:
        print(f"lit_data {lit_data.__version__}")
    elif options.help and options.words:
        command = _check_command(options.words)
        print(format_command_help(command, options.words[1:], options.config_dir))
    elif options.help or not words:
        print(format_help(options.config_dir), file=sys.stdout if words else sys.stderr)
        return 0 if words else ConfigError.exit_code
    else:
        _run(_check_command(options.words), options)
    return 0


@contextmanager
def _ending_with_reader() -> Iterator[None]:
    """End without a word where the reader ends, as other programs: ``--help | head``."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGPIPE"):
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser()
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--cwd")
    options = parser.read(words)
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve belongs to --cfg: write --cfg job --resolve.")
    return options


def _check_command(words: Sequence[str]) -> str:
    command = words[0] if words else ""
    if command == "train":
        print("lit_data: the command is called fit, not train", file=sys.stderr)
        return "fit"
    if command in COMMANDS:
        return command
    known = [*COMMANDS, *list_tools()]
    if command not in known:
        hint = did_you_mean(_OTHER_WORDS.get(command) or nearest(command, known))
        raise ConfigError(f"unknown command '{command}'.{hint} Commands: {', '.join(known)}.")
    raise ConfigError(
        f"'{command}' comes first and has no options of a configuration: see {command} --help."
    )


def _run(command: str, options: argparse.Namespace) -> None:
    # Hydra is imported only here, to keep --help quick.
    from lit_data.app.run import print_config, run

    flags = {
        "config_dir": options.config_dir,
        "packages": options.package,
        "multirun": options.multirun,
    }
    overrides: Sequence[str] = options.words[1:]
    is_on_run = command in ON_RUNS and overrides and _names_run(command, overrides[0])
    if options.cwd is not None and not is_on_run:
        raise ConfigError(
            f"--cwd is only for reruns: write {ON_RUNS[0]} RUN --cwd FOLDER, or rerun"
        )
    if is_on_run:
        from lit_data.app.rerun import take_run

        on_run = take_run(command, overrides[0], overrides[1:], options.cwd)
        overrides = on_run.overrides
        flags["config_dir"] = options.config_dir or on_run.config_dir
    if options.cfg:
        print_config(command, overrides, part=options.cfg, resolve=options.resolve, **flags)
    else:
        run(command, overrides, **flags)


def _names_run(command: str, word: str) -> bool:
    """Return True for the folder or address of a run, and not for the name of an experiment."""
    if "=" in word:
        return False
    from lit_data.app.run_folder import is_run

    return command not in SCORING or "/" in word or is_run(Path(word))


@contextmanager
def _note_sigterm() -> Iterator[SimpleNamespace]:
    """Stop at SIGTERM.

    While Lightning trains, it finishes the step and cleans up first, unless a second one comes.
    """
    note = SimpleNamespace(sigterm=False)
    main_pid = os.getpid()

    def stop(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != main_pid:  # a forked worker inherits the handler
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        is_called_by_lightning = signal.getsignal(signum) is not stop
        is_first = not note.sigterm
        note.sigterm = True
        if not (is_called_by_lightning and is_first):
            raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield note
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield note
    finally:
        signal.signal(signal.SIGTERM, before)


def _choose_exit_code(error: BaseException) -> int:
    # Hydra's job is left by SystemExit, whose cause is the error.
    cause = error.__cause__ if isinstance(error, SystemExit) else error
    if isinstance(cause, LitDataError):
        _report(cause)
        return cause.exit_code
    # Lightning turns Ctrl-C into SystemExit(1).
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return 128 + signal.SIGINT
    of_machine = find_unfit_torchvision(error) or find_full_disk(error)
    if of_machine is not None:
        _report(of_machine)
        return of_machine.exit_code
    if not isinstance(error, SystemExit):
        _print_traceback(error)
        return 1
    if isinstance(error.code, int):
        return error.code
    return 0 if error.code is None else 1


def _report(error: LitDataError) -> None:
    if any(os.environ.get(name) == "1" for name in _SHOWING_TRACEBACKS):
        _print_traceback(error)
    text = settle_lines(str(error))
    headline = find_headline(text)
    print(text.replace(headline, f"lit_data: {headline}", 1), file=sys.stderr)


def _print_traceback(error: BaseException) -> None:
    lines = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
    print("\n".join(map(escape, lines)), file=sys.stderr)
