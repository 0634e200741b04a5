"""`RunUpload`: copies the files of a run to the address of `paths.runs` while the run goes on.

Predictions are copied to that of `predict.folder` in the same way.

Every writer of the run, whoever's it is, writes into a local folder, each file at once or by
renaming. A thread looks for what is new every few seconds and copies it, each key as a whole:
checkpoints first, in the order of their times, journals and tables of the files in folders behind
these, `summary.json` last. So what is at the address is enough to go on from, whenever the machine
dies. Nothing is ever removed there.
"""

import logging
import os
import stat
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from omegaconf import DictConfig

from lit_data.commands.configuration.addresses import name_remote
from lit_data.commands.launcher import is_first_rank
from lit_data.commands.remote_runs import describe_fault
from lit_data.errors import ConfigError, LitDataError, StoreError, show_path
from lit_data.io.discovery import is_hidden
from lit_data.io.remote import RemoteOptions
from lit_data.io.remote.connection import Connection, call_each
from lit_data.io.remote.options import is_remote, parse_address
from lit_data.io.remote.transport import ServerTransport

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
_MOST_LOOKING = 20  # pauses for each time of looking, which takes the interpreter
_RETRY_AFTER_S = 60.0  # where the server did not answer, beside the tries of the transport
_AGAIN_AFTER_S = 60.0  # a file that grows, such as a log; checkpoints are copied at once
_CONNECTIONS = 8
_CHECKPOINT = ".ckpt"
_JOURNAL = ".jsonl"  # its lines name other files
_LAST = "summary.json"
_SHOWN_FOLDERS = (".hydra", ".shown")


class _File(NamedTuple):
    """A file as it is now: what takes its place has another time or inode."""

    name: str
    mtime_ns: int
    size_bytes: int
    inode: int

    @property
    def is_checkpoint(self) -> bool:
        return self.name.endswith(_CHECKPOINT)


@contextmanager
def uploading(cfg: DictConfig, folder: Path) -> Iterator["RunUpload | None"]:
    """Copy a run folder to its address, if it has one, until the run has ended.

    Args:
        cfg: The configuration.
        folder: Of the run.

    Raises:
        StoreError: Nothing can be written there, before anything of the run is done; or something
            is missing there at the end of a run that did not fail itself.
    """
    if not is_remote(cfg.paths.runs) or not is_first_rank():
        yield None
        return
    upload = RunUpload(folder, name_remote(folder, cfg.paths.runs, cfg.paths.cache))
    with upload.running():
        yield upload


class RunUpload(threading.Thread):
    """Copies files of a folder to an address as they appear and change.

    Args:
        folder: Of the run.
        address: Of the run.
        key: Of the option that names the address.

    Attributes:
        fault: Once it has ended, a line on what is missing at the address; empty if nothing is.
    """

    def __init__(self, folder: Path, address: str, key: str = "paths.runs") -> None:
        super().__init__(daemon=True, name="lit_data upload")
        self.fault = ""
        self._folder = folder
        self._key = key
        self._address = parse_address(address, key)
        options = RemoteOptions(connections=_CONNECTIONS)
        self._server = ServerTransport(self._address, options)
        self._copied: dict[str, _File] = {}
        self._copied_s: dict[str, float] = {}
        self._unsuitable: dict[str, str] = {}
        self._ending = threading.Event()
        self._looking_s = 0.0  # time that it takes to look at all files

    def begin(self, fetched: Collection[str] = ()) -> None:
        """Copy what is there already, and go on in a thread.

        Checkpoints of an earlier start in this folder are not copied: the run may have gone on
        elsewhere since, and what is at the address counts.

        Args:
            fetched: Names of files that are as they are at the address.

        Raises:
            StoreError: It cannot be written there.
        """
        for file in self._list_changed(ends=True):
            if file.is_checkpoint or file.name in fetched:
                self._copied[file.name] = file
        if fault := self.copy_changes():
            raise StoreError(
                f"cannot write {fault}; check {self._key} and the credentials of this machine, see "
                "docs/remote.md"
            )
        self.start()

    @contextmanager
    def running(self, fetched: Collection[str] = ()) -> Iterator[None]:
        """Copy while the block runs, and the rest at its end.

        Args:
            fetched: See `begin`.

        Raises:
            StoreError: It cannot be written there, or something is missing there at the end of a
                block that did not fail itself.
        """
        self.begin(fetched)
        try:
            yield
        except BaseException:
            self.finish()
            if self.fault:
                log.warning("%s", self.fault)  # the error of the block says more
            raise
        self.finish()
        if self.fault:
            raise StoreError(self.fault)

    def run(self) -> None:
        """Copy what changes until the run ends; a server that is away is asked again."""
        pause_s, last_fault = LOOK_EVERY_S, ""
        while not self._ending.wait(pause_s):
            fault = self.copy_changes()
            if fault and not last_fault:
                log.warning(
                    "not copied: %s; the run goes on in %s, and its files are copied later",
                    fault,
                    show_path(self._folder),
                )
            elif last_fault and not fault:
                log.info("%s: all files of the run are there again", self._address)
            pause_s = max(LOOK_EVERY_S, _MOST_LOOKING * self._looking_s)
            if fault:
                pause_s = _RETRY_AFTER_S
            last_fault = fault

    def finish(self) -> None:
        """Copy the rest, once, after the last file of the run is written."""
        if self._ending.is_set():
            return
        self._ending.set()
        log.info("copying the last files to %s", self._address)
        self.join()
        with self._server:
            fault = self.copy_changes(ends=True)
        if not fault and self._unsuitable:
            name, reason = next(iter(self._unsuitable.items()))
            fault = f"{self._address.name(name)}: {reason} ({len(self._unsuitable)} such files)"
        if fault:
            self.fault = (
                f"not copied: {fault}; the run is whole in {show_path(self._folder)}: copy that "
                f"folder to {self._address}"
            )

    def name_file(self, path: Path) -> str:
        """Return the address of a file of the run, for messages."""
        return self._address.name(path.relative_to(self._folder).as_posix())

    def copy_changes(self, *, ends: bool = False) -> str:
        """Copy what is new; return why it could not be, empty if it could."""
        try:
            changed = self._list_changed(ends=ends)
            # One after the other: the last one at the address is the last that was written.
            for file in sorted(changed, key=lambda file: file.mtime_ns):
                if file.is_checkpoint:
                    self._copy([file])
            others = [file for file in changed if not file.is_checkpoint]
            self._copy([file for file in others if "/" in file.name])
            self._copy([file for file in others if "/" not in file.name and file.name != _LAST])
            self._copy([file for file in others if file.name == _LAST])
        except ConfigError:  # a package is missing, say
            raise
        except LitDataError as error:
            return describe_fault(error)
        except OSError as error:  # of a local file
            return f"{show_path(str(error.filename))}: {error.strerror}"
        return ""

    def _copy(self, files: Sequence[_File]) -> None:
        if files:
            self._server.call(partial(self._copy_each, files))

    async def _copy_each(self, files: Sequence[_File], connection: Connection) -> None:
        await call_each(partial(self._copy_one, connection), files, _CONNECTIONS)

    async def _copy_one(self, connection: Connection, file: _File) -> None:
        # A file may be removed since, as a checkpoint that is no more the best.
        with suppress(FileNotFoundError), self._freezing(file) as path:
            await connection.put(path, file.name)
        self._copied[file.name] = file
        self._copied_s[file.name] = time.monotonic()

    @contextmanager
    def _freezing(self, file: _File) -> Iterator[Path]:
        """Give a path of a file; of a journal that of its lines when it was listed.

        It was listed before the files that these name, which have been copied by now.
        """
        path = self._folder / file.name
        if not file.name.endswith(_JOURNAL):
            yield path
            return
        with TemporaryDirectory() as folder, path.open("rb") as journal:
            frozen = Path(folder) / path.name
            frozen.write_bytes(journal.read(file.size_bytes))
            yield frozen

    def _list_changed(self, *, ends: bool) -> list[_File]:
        """Return files that are new or not as they were copied."""
        changed = []
        now_s = time.monotonic()
        for file in self._list_files():
            is_recent = now_s - self._copied_s.get(file.name, float("-inf")) < _AGAIN_AFTER_S
            waits = is_recent and not ends and not file.is_checkpoint
            if self._copied.get(file.name) != file and not waits:
                changed.append(file)
        self._looking_s = time.monotonic() - now_s
        return changed

    def _list_files(self) -> Iterator[_File]:
        for parent, folders, names in os.walk(self._folder):
            for name in list(folders):
                if name.endswith(_CHECKPOINT):
                    self._refuse(
                        Path(parent) / name,
                        "is a checkpoint in pieces, of which a part "
                        "could be taken for all: trainer.strategy.state_dict_type=full",
                    )
                if name.endswith(_CHECKPOINT) or (is_hidden(name) and name not in _SHOWN_FOLDERS):
                    folders.remove(name)
            for name in names:
                path = Path(parent) / name
                # Hidden ones are not whole yet, see `lit_data.files.replacing`.
                if not is_hidden(name) and (file := self._look_at(path)) is not None:
                    yield file

    def _look_at(self, path: Path) -> _File | None:
        """Return a file as it is now; None for what is none, is gone, or lies elsewhere."""
        name = path.relative_to(self._folder).as_posix()
        try:
            is_elsewhere = path.is_symlink() and not self._holds(path.resolve())
            status = path.stat()
        except OSError:
            return None
        if is_elsewhere or not stat.S_ISREG(status.st_mode):
            return None
        try:
            name.encode()
        except UnicodeEncodeError:
            self._refuse(path, "the name is no UTF-8, as keys are")
            return None
        return _File(name, status.st_mtime_ns, status.st_size, status.st_ino)

    def _holds(self, path: Path) -> bool:
        return path.is_relative_to(self._folder.resolve())

    def _refuse(self, path: Path, reason: str) -> None:
        name = path.relative_to(self._folder).as_posix()
        if name not in self._unsuitable:
            self._unsuitable[name] = reason
            log.warning("not copied: %s %s", show_path(path), reason)
