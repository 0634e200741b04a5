"""A server from which the commands of tests are forked, with all that they import.

A command spends seconds on its imports, and the tests start hundreds of commands. `install` lets
`subprocess.Popen` fork them from a process that has imported what they import, and has one thread.
To its starter such a command is a child as any other: by its process id, its group, its streams,
folder, environment, import path and warnings, and its end is that of an interpreter, whose modules
are not taken apart. One that
starts ranks or jobs gets a server of its own beside it.

Interpreters of their own stay: programs with ``-c``, scripts of users, commands with another
`lit_data` or with variables that are read at an import, and what `FRESH` is given to.
"""

import atexit
import ctypes
import faulthandler
import gc
import inspect
import json
import multiprocessing.process
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NAME = "fork-server"
"""Name of the process, by which tests that count processes leave it out."""
FRESH = {"TESTS_FORK": "never"}
"""Variable of a command that gets an interpreter of its own."""
SCRIPTS_TOO = {"TESTS_FORK": "scripts"}
"""Variable of a command whose scripts are forked too, wherever they lie."""

WITHOUT_PICTURES = {"TESTS_PICTURES": "never"}
"""Variable of a command that leaves out what ``fit`` draws, which takes longer than a toy training."""
PICTURES = (
    "lit_data.app.fit.draw_samples",
    "lit_data.app.fit.draw_predictions",
    "lit_data.app.job.add_report",
    "lit_data.callbacks.memory.record.draw_memory",
    "lit_data.callbacks.data_wait_monitor.draw_throughput",
)
"""Functions that draw."""

_MODULES = (
    "lit_data",
    "lit_data.__main__",  # as Lightning starts ranks
    "torch.distributed.run",
    "submitit.local._local",
    "submitit.core._submit",
)
_PRELOADED = (
    "cv2",
    "hydra._internal.hydra",
    "lit_data.app.api",
    "lit_data.app.cli",
    "lit_data.app.benchmark",
    "lit_data.app.evaluate",
    "lit_data.app.fit",
    "lit_data.app.predict",
    "lit_data.app.prepare",
    "lit_data.app.run",
    "lit_data.app.show",
    "lit_data.app.terminal",
    "matplotlib.backends.backend_agg",
    "torch._dynamo",
    "torch.distributed",
    "torch.utils.tensorboard",
)
_PRELOADED_IF_INSTALLED = ("s3fs",)
"""Lightning imports it to ask each folder of checkpoints for its kind."""
_READ_AT_IMPORT = re.compile(
    r"PYTHON(?!PATH|SAFEPATH|WARNINGS|FAULTHANDLER|UNBUFFERED)|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|OPENCV_"
    r"|LC_|LANG|LD_PRELOAD|MALLOC_|MPL|PYTORCH_(?!NVML)|TORCH_(?!NCCL)"
)
_STARTS_OTHERS = re.compile(r"ddp|fsdp|devices=|^-m$|^--nn?odes|^--nproc|submitit")
_LARGEST_BYTES = 2**20
_LONGEST_S = 120.0
_POLL_S = 2.0
_SET_DEATH_SIGNAL, _SET_NAME, _SET_SUBREAPER = 1, 15, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)


class Command(NamedTuple):
    """What stands behind the interpreter on a command line.

    Attributes:
        options: Of the interpreter.
        program: Module, or path of a script.
        words: Arguments of the program.
    """

    options: list[str]
    program: str
    words: list[str]


def read_command(words: Sequence[str]) -> Command | None:
    """Return a command that may be forked, or None."""
    if not words or words[0] != sys.executable:
        return None
    options, rest = [], list(words[1:])
    while rest and rest[0] in ("-W", "-P", "-u"):
        option = rest.pop(0)
        if option == "-W" and rest.pop(0) != "ignore":
            return None
        options.append(option)
    if rest[:1] == ["-m"]:
        is_ours = rest[1] in _MODULES or rest[1].split(".")[0] == "benchmarks"
        return Command(options, rest[1], rest[2:]) if is_ours else None
    is_script = rest and rest[0].endswith(".py")
    return Command(options, rest[0], rest[1:]) if is_script else None


class Server:
    """The server of this process.

    Args:
        connection: To the server's process.
        environment: In which the server has imported all.
        process: The server's, where this process has started it.
    """

    def __init__(
        self,
        connection: socket.socket,
        environment: Mapping[str, str],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.environment = environment
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def close(self) -> None:
        """End the server, unless a command still comes from it."""
        self._connection.close()
        if self._process is not None:
            self._process.wait()

    def has_ended(self) -> bool:
        """Return True if a test has ended all children of this process, and the server with them."""
        is_ours = self._process is not None and os.getpid() == self._owner
        return is_ours and self._process.poll() is not None

    def fork(self, request: Mapping[str, object], streams: Sequence[int]) -> int | None:
        """Return the process id of a command, now a child of this process; None without a server.

        Raises:
            TimeoutError: The server does not answer.
        """
        if os.getpid() != self._owner:  # a forked worker
            return None
        message = json.dumps({**request, "parent": self._owner}).encode()
        with self._lock, _adopting():
            try:
                socket.send_fds(self._connection, [message], streams)
            except OSError:  # the server has just been killed, or the command is too long
                return None
            if not select.select([self._connection], [], [], _LONGEST_S)[0]:
                raise TimeoutError(f"the fork server does not answer within {_LONGEST_S:.0f} s")
            with suppress(ConnectionResetError):
                return int(self._connection.recv(16) or 0) or None
        return None


@contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of its grandchildren whose parents end."""
    _LIBC.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def install(find_server: Callable[[], Server | None]) -> None:
    """Let `subprocess.Popen` fork commands.

    Args:
        find_server: Return the server, which is asked for when a command is to be forked.
    """
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(start)

    def fork_or_start(process: Any, *arguments: Any) -> None:
        call = signature.bind(process, *arguments).arguments
        pid = _fork(call, find_server)
        if pid is None:
            start(process, *arguments)
            return
        process.pid = pid
        process._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(call[end] for end in ends))

    subprocess.Popen._execute_child = fork_or_start  # type: ignore[attr-defined]


def _fork(call: Mapping[str, Any], find_server: Callable[[], Server | None]) -> int | None:
    """Return the process id of a forked command; None where it needs an interpreter of its own."""
    is_plain = call["close_fds"] and not (call["pass_fds"] or call["preexec_fn"] or call["shell"])
    owners = [call["gid"], call["gids"], call["uid"], call["executable"]]
    if not is_plain or owners != [None] * 4 or call["umask"] != -1 or call["process_group"] != -1:
        return None
    arguments = call["args"]
    if isinstance(arguments, str | bytes | os.PathLike):
        return None
    command = read_command([os.fsdecode(word) for word in arguments])
    environment = dict(os.environ if call["env"] is None else call["env"])
    folder = Path.cwd() / (call["cwd"] or "")
    if command is None or not _may_be_forked(command, environment, folder):
        return None
    server = find_server()
    if server is None or _read_at_import(environment) != _read_at_import(server.environment):
        return None
    ends = (call["p2cread"], call["c2pwrite"], call["errwrite"])
    streams = [number if end == -1 else end for number, end in enumerate(ends)]
    request = {
        **command._asdict(),
        "environment": environment,
        "folder": str(folder),
        "is_session": call["start_new_session"],
        "umask": _read_umask(),
    }
    return server.fork(request, streams)


def _may_be_forked(command: Command, environment: Mapping[str, str], folder: Path) -> bool:
    """Return True if a command imports our `lit_data` and asks for nothing special."""
    asked = environment.get("TESTS_FORK", "")
    is_script = command.program.endswith(".py")
    is_foreign = is_script and ROOT / "tests" not in Path(command.program).parents
    if asked == "never" or (is_foreign and asked != "scripts") or not folder.is_dir():
        return False
    if environment.get("PYTHONWARNINGS", "ignore") != "ignore":
        return False
    sources = [path for path in _list_paths(command, environment, folder) if _holds_ours(path)]
    return bool(sources) and Path(sources[0]).resolve() == ROOT


def _holds_ours(folder: str) -> bool:
    return (Path(folder) / "lit_data" / "__init__.py").exists()


def _list_paths(command: Command, environment: Mapping[str, str], folder: Path) -> list[str]:
    """Folders of imports before those of the interpreter."""
    named = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [str(folder / path) for path in named]
    if "-P" in command.options or environment.get("PYTHONSAFEPATH"):
        return paths
    is_script = command.program.endswith(".py")
    first = (folder / command.program).parent if is_script else folder
    return [str(first), *paths]


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if _READ_AT_IMPORT.match(name)}


def _read_umask() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("Umask:")[2].split()[0], 8)


def make_starter() -> Callable[[], Server | None]:
    """Return the function that starts the server of the tests once one is needed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONWARNINGS", None)
    servers = []
    lock = threading.Lock()

    def find_server() -> Server | None:
        with lock:
            if not servers or (servers[-1] is not None and servers[-1].has_ended()):
                servers.append(_start_server(environment))
        return servers[-1]

    return find_server


def _start_server(environment: Mapping[str, str]) -> Server | None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(theirs.fileno())],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    theirs.close()
    server = Server(ours, environment, process)
    is_ready = ours.recv(16) == b"ready"
    atexit.register(server.close)
    return server if is_ready else None


# The server's side.


class _Request(NamedTuple):
    content: dict[str, Any]
    streams: list[int]


def _serve(connection: socket.socket) -> _Request:
    """Fork commands until the other side has gone; return in the process of a command."""
    parent = os.getppid()
    while os.getppid() == parent:
        if not select.select([connection], [], [], _POLL_S)[0]:
            continue
        message, streams, _, _ = socket.recv_fds(connection, _LARGEST_BYTES, 3)
        if not message:
            break
        # A parent that ends at once leaves its child to the process that asked.
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            return _Request(json.loads(message), streams)
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)
    os._exit(0)


def _settle(connection: socket.socket, request: _Request) -> None:
    """Take place in the group and with the streams that were asked for, then tell the starter."""
    until_s = time.monotonic() + _LONGEST_S
    while os.getppid() != request.content["parent"]:
        if time.monotonic() > until_s:
            os._exit(1)
        time.sleep(0.0002)
    if request.content["is_session"]:
        os.setsid()
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.content["folder"])
    _LIBC.prctl(_SET_NAME, b"python", 0, 0, 0)
    connection.send(str(os.getpid()).encode())
    connection.close()


def _become_command(connection: socket.socket) -> tuple[dict[str, Any], socket.socket | None]:
    """Serve; return the request, and the connection to a further server, in a command's process."""
    while True:
        request = _serve(connection)
        _settle(connection, request)
        words = [request.content["program"], *request.content["words"]]
        if not any(map(_STARTS_OTHERS.search, words)):
            return request.content, None
        ours, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = os.getpid()
        if os.fork():
            connection.close()
            return request.content, ours
        ours.close()
        _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != command:
            os._exit(0)
        _hide()


def _hide() -> None:
    """Hold no stream of a command, which would keep its readers waiting, and heed no Ctrl-C."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _LIBC.prctl(_SET_NAME, NAME.encode(), 0, 0, 0)


def _begin(request: Mapping[str, Any], by_imports: Mapping[str, str], base: Sequence[str]) -> None:
    """Make this process what an interpreter would be before it runs its program."""
    import numpy as np
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update({**by_imports, **request["environment"]})
    time.tzset()
    # Those of libraries, which all forks would share; `random` sees to its own.
    np.random.seed()  # noqa: NPY002
    torch.default_generator.seed()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())
    sys.argv = [request["program"], *request["words"]]
    sys.orig_argv = [sys.executable, *request["options"], *sys.argv]
    is_unbuffered = "-u" in request["options"] or "PYTHONUNBUFFERED" in os.environ
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=is_unbuffered)
    if "-W" in request["options"] or os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter("ignore", append=True)  # behind those of libraries, as always
        sys.warnoptions[:] = ["ignore"]
    command = Command(request["options"], request["program"], request["words"])
    paths = _list_paths(command, os.environ, Path.cwd())
    sys.path[:] = list(dict.fromkeys([*paths, *base]))
    if any((Path(path) / "sitecustomize.py").exists() for path in paths):
        sys.modules.pop("sitecustomize", None)
        import_module("sitecustomize")


def _leave_out_pictures() -> None:
    for place in PICTURES:
        module, _, name = place.rpartition(".")
        setattr(import_module(module), name, lambda *args, **options: None)


def _run(request: Mapping[str, Any]) -> None:
    if request["program"].endswith(".py"):
        runpy.run_path(request["program"], run_name="__main__")
    else:
        runpy.run_module(request["program"], run_name="__main__", alter_sys=True)


def _preload() -> None:
    """Import what commands import.

    Raises:
        RuntimeError: An import has started threads, which a fork would lose.
    """
    for name in _PRELOADED:
        import_module(name)
    for name in _PRELOADED_IF_INSTALLED:
        with suppress(ImportError):
            import_module(name)
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads after the imports")
    # Pages of what is never collected stay shared.
    gc.collect()
    gc.freeze()


def _leave(codes: list[int]) -> None:
    """End a command that said its code: taking apart all modules would copy their memory, for 0.6 s."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def main() -> None:
    """Serve on a connection that is an open file of this process; in a fork of it, run a command."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # the last of all that end with the process
    connection = socket.socket(fileno=int(sys.argv[1]))
    base = [path for path in sys.path if path != str(ROOT)]
    environment = dict(os.environ)
    _preload()
    by_imports = {name: os.environ[name] for name in os.environ.keys() - environment.keys()}
    _hide()
    connection.send(b"ready")
    request, further = _become_command(connection)
    server = None if further is None else Server(further, environment)
    install(lambda: server)
    if server is not None:
        atexit.register(server.close)
    _begin(request, by_imports, base)
    if os.environ.items() >= WITHOUT_PICTURES.items():
        _leave_out_pictures()
    try:
        _run(request)
    except SystemExit as end:
        if server is None and request["program"] == "lit_data" and isinstance(end.code, int):
            codes.append(end.code)
        raise


if __name__ == "__main__":
    main()
