"""``python -m lit_data COMMAND [overrides]``: words in, exit code out."""

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, SimpleNamespace

import lit_data
from lit_data.commands import COMMANDS, TOOLS
from lit_data.commands.arguments import Parser
from lit_data.commands.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError, LitDataError

_HELP = """\
usage: python -m lit_data COMMAND [key=value ...] [options]

commands:
{commands}

experiments (experiment=NAME):
{experiments}

options:
  -m, --multirun         run every combination of comma-separated values: -m seed=1,2,3; sweep.resume=latest goes on
  --config-dir FOLDER    a folder of your own groups and experiments, laid out like lit_data/conf
  --package NAME         allow `_target_` below your own package NAME; may be given again
  --cfg job|hydra|all    print the composed configuration and stop; --resolve fills in interpolations
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

_ENDINGS = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "stopped by SIGTERM"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; by default those of `sys.argv`.

    Returns:
        The exit code; see `--help`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with _note_sigterm() as received:
        try:
            code = _dispatch(words)
        except BaseException as error:
            code = _choose_exit_code(error)
    if received.sigterm:
        code = 128 + signal.SIGTERM
    if code in _ENDINGS:
        print(f"lit_data: {_ENDINGS[code]}.", file=sys.stderr)
    return code


def _dispatch(words: Sequence[str]) -> int:
    if words and words[0] in TOOLS:
        import_module(f"lit_data.commands.{words[0]}").main(words[1:])
        return 0
    options = _parse(words)
    if options.version:
        print(f"lit_data {lit_data.__version__}")
    elif options.help or not words:
        print(_format_help(options.config_dir), file=sys.stdout if words else sys.stderr)
        return 0 if words else ConfigError.exit_code
    else:
        _run(_check_command(options.words), options)
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m lit_data")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--package", action="append", default=[])
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.read(words)
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve belongs to --cfg: write --cfg job --resolve.")
    return options


def _check_command(words: Sequence[str]) -> str:
    command, known = words[0] if words else "", [*COMMANDS, *TOOLS]
    if command not in known:
        hint = did_you_mean(nearest(command, known))
        raise ConfigError(f"unknown command '{command}'.{hint} Commands: {', '.join(known)}.")
    if command in TOOLS:
        raise ConfigError(f"'{command}' comes first and has no options of a configuration: see {command} --help.")
    return command


def _format_help(config_dir: str | None) -> str:
    folders = [Path(__file__).parent / "conf", *([Path(config_dir)] if config_dir else [])]
    experiments = {
        path.relative_to(folder / "experiment").with_suffix("").as_posix(): _read_first_comment(path)
        for folder in folders
        for path in sorted((folder / "experiment").rglob("*.yaml"))
    }
    return _HELP.format(
        commands=_format_table({**COMMANDS, **TOOLS}), experiments=_format_table(experiments) or "  none"
    )


def _format_table(rows: dict[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {name:{width}}  {text}".rstrip() for name, text in rows.items())


def _read_first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comments = (line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def _run(command: str, options: argparse.Namespace) -> None:
    from lit_data.commands.run import print_config, run  # Hydra is imported only here, to keep --help quick

    places = {"config_dir": options.config_dir, "packages": options.package, "multirun": options.multirun}
    if options.cfg:
        print_config(command, options.words[1:], part=options.cfg, resolve=options.resolve, **places)
    else:
        run(command, options.words[1:], **places)


@contextmanager
def _note_sigterm() -> Iterator[SimpleNamespace]:
    """Stop at SIGTERM; while Lightning trains it finishes the step and cleans up first, unless a second one comes."""
    note, own_pid = SimpleNamespace(sigterm=False), os.getpid()

    def stop(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != own_pid:  # a forked worker inherits the handler
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        wait = signal.getsignal(signum) is not stop and not note.sigterm  # Lightning's handler calls this one
        note.sigterm = True
        if not wait:
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
    stop = error if isinstance(error, SystemExit) else None
    cause = error.__cause__ if stop else error
    if isinstance(cause, LitDataError):
        _report(cause)
        return cause.exit_code
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return 128 + signal.SIGINT  # Lightning turns Ctrl-C into SystemExit(1)
    if stop is None:
        traceback.print_exception(error)
        return 1
    return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _report(error: LitDataError) -> None:
    if "1" in (os.environ.get("LIT_DATA_TRACEBACK"), os.environ.get("HYDRA_FULL_ERROR")):
        traceback.print_exception(error)
    print(f"lit_data: {error}", file=sys.stderr)
