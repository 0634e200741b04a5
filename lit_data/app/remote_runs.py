"""Checkpoints and runs at an address: what lies there is copied here before it is read.

Lightning itself writes checkpoints (``dirpath``) and logs (``save_dir``) to addresses.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lit_data.app.run_folder import Written
from lit_data.core.addresses import RemoteOptions, is_remote, parse_store
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.temp import scratch_folder
from lit_data.core.wings import find_part
from lit_data.images.roots import Root, Store
from lit_data.images.scope import Scope, find_fault

log = logging.getLogger(__name__)

_OPTIONS = RemoteOptions(offline="error", max_bytes=None)
_CURE = "and the credentials of this machine, see docs/remote.md"
RECORDS = Scope((".hydra/*.yaml", "multirun.yaml", "**/.hydra/*.yaml"), unhidden=(".hydra",))
"""How a run was started."""
RESULTS = Scope(
    (
        *RECORDS.patterns,
        "**/*.json",
        "**/*.csv",
        "**/*.log",
        "**/*.txt",
        "**/samples.png",
        "**/predictions.png",
        "**/worst.png",
        "**/worst_images.png",
        "**/families.png",
        "**/augment.png",
        "**/memory.png",
        "**/throughput.png",
        "**/images/*-*.png",
    ),
    unhidden=(".hydra",),
)
"""Everything that a report shows."""


def fetch_checkpoint(address: str, cache: Path, key: str) -> Path:
    """Return the local copy of a checkpoint at an address, brought up to date.

    Args:
        address: Of the file.
        cache: Below it the copy lies, once for each address.
        key: Of the option that names the address.

    Raises:
        ConfigError: The address cannot be read.
        DataError: It is not there, or cannot be read now.
    """
    folder, name = _split(address, key)
    return _fetch(folder, Scope(extensions=(), also=(name,)), cache / "remote", key) / name


def fetch_newest(run: str, names: Sequence[str], cache: Path, key: str) -> Path | None:
    """Return the local copy of the checkpoint of a run that was written last; None without any.

    Args:
        run: Address of its folder.
        names: Of the files.
        cache: As for `fetch_checkpoint`.
        key: Of the option that names the address.

    Raises:
        ConfigError: The address cannot be read.
        DataError: It cannot be read now.
    """
    written = _list_remote(run, names, key)
    if not written:
        return None
    checkpoint = f"{run.rstrip('/')}/{max(written).name}"
    log.info("checkpoint: %s", checkpoint)
    return fetch_checkpoint(checkpoint, cache, key)


def _list_remote(folder: str, names: Sequence[str], key: str) -> list[Written]:
    scope = Scope(tuple(f"checkpoints/{name}" for name in names))
    written = []
    with explaining_server(key), open_store(folder, key) as store:
        for name, mtime_s in store.list_times(scope).items():
            if find_fault(name) is None:  # keys may be anybody's
                rank = names.index(name.rpartition("/")[2])
                written.append(Written(mtime_s, rank, name))
    return written


@contextmanager
def fetching_runs(runs: Sequence[str], scope: Scope) -> Iterator[list[Path]]:
    """Give the folders of runs; of those at addresses copies that last as long as the context.

    Args:
        runs: Folders and addresses.
        scope: Files that are copied.

    Raises:
        ConfigError: An address cannot be read.
        DataError: There is nothing, or it cannot be read now.
    """
    with ExitStack() as stack:
        folders = []
        for run in runs:
            folder = Path(run)
            if is_remote(run):
                copies = stack.enter_context(scratch_folder())
                folder = _fetch(run, scope, copies, "RUN")
            folders.append(folder)
        yield folders


def put_file(path: Path, address: str, key: str) -> None:
    """Copy a local file to an address.

    Raises:
        ConfigError: The address cannot be read.
        DataError: It may not be written there, or the server does not answer.
    """
    folder, name = _split(address, key)
    with explaining_server(key), open_store(folder, key) as store:
        store.put(path, name)


def put_files(paths: Sequence[Path], folder: Path, address: str, key: str) -> None:
    """Copy files to an address, under their paths below a folder.

    Raises:
        ConfigError: The address cannot be read.
        DataError: One may not be written there, or the server does not answer.
    """
    with explaining_server(key), open_store(address, key) as store:
        store.put_all(paths, folder)


def open_store(address: str, key: str) -> Store:
    """Return the folder at an address that results lie in, which closes as a context manager.

    Raises:
        ConfigError: The address cannot be read.
    """
    kind: Callable[..., Store] = find_part("ROOTS", "store")
    return kind(parse_store(address, key), _OPTIONS)


def _split(address: str, key: str) -> tuple[str, str]:
    """Return the folder of a file and its name."""
    folder, _, name = address.rpartition("/")
    if not name or not is_remote(folder):
        raise ConfigError(f"{key}={address} does not name a file: write s3://BUCKET/FOLDER/FILE")
    return folder, name


def _fetch(address: str, scope: Scope, mirrors: Path, key: str) -> Path:
    parse_store(address, key)
    open_mirror: Callable[..., Root] = find_part("ROOTS", "mirror")
    root = open_mirror(address, mirrors, _OPTIONS, scope)
    with explaining_server(key):
        root.refresh()
        return root.folder


@contextmanager
def explaining_server(key: str) -> Iterator[None]:
    """Turn an error of a server, whose advice is that of `data.root`, into one of another option.

    Raises:
        DataError: There was one.
    """
    try:
        yield
    except ConfigError:
        raise
    except DataError as error:
        raise DataError(f"{describe_fault(error)}; check {key} {_CURE}") from error


def describe_fault(error: Exception) -> str:
    """Return the cause of an error of a server, without its advice."""
    lines = str(error).strip().splitlines()
    return lines[0].partition("; ")[0] if lines else type(error).__name__
