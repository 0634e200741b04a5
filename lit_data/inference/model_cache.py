"""`ModelCache`: models read from files, each content once."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from lit_data.errors import ConfigError, DataError, show_path
from lit_data.files import find_sha256


@dataclass(frozen=True, slots=True)
class _Facts:
    """What tells cheaply that a file is the one that was read."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "_Facts":
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(
                f"{show_path(path)}: the model cannot be read ({error.strerror})"
            ) from error
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class ModelCache:
    """Gives the model of a file, and reads the file only where its content is new.

    A file whose size and time are as before is not read; otherwise its SHA-256 decides, so a file
    that was copied or touched gives the model that is there already, and one that was trained on is
    read again. The models are shared: whoever changes one changes it for all.

    Args:
        build: Makes a model from a path.
        max_models: The most recently used are kept.

    Raises:
        ConfigError: `max_models` is below 1.
    """

    def __init__(self, build: Callable[[Path], nn.Module], *, max_models: int = 4) -> None:
        if max_models < 1:
            raise ConfigError(f"max_models={max_models} must be at least 1")
        self._build, self._max_models = build, max_models
        self._digests: dict[Path, tuple[_Facts, str]] = {}
        self._models: OrderedDict[str, nn.Module] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, path: str | os.PathLike[str]) -> nn.Module:
        """The model of a file.

        Raises:
            DataError: There is no such file, or it changed while it was read.
        """
        path = Path(path).resolve()
        with self._lock:
            digest = self._find_digest(path)
            if digest not in self._models:
                self._models[digest] = self._read(path)
            self._models.move_to_end(digest)
            while len(self._models) > self._max_models:
                self._models.popitem(last=False)
            return self._models[digest]

    def _find_digest(self, path: Path) -> str:
        facts = _Facts.of(path)
        known = self._digests.get(path)
        if known is not None and known[0] == facts:
            return known[1]
        digest = find_sha256(path)
        self._digests[path] = facts, digest
        return digest

    def _read(self, path: Path) -> nn.Module:
        model = self._build(path)
        if _Facts.of(path) != self._digests[path][0]:
            del self._digests[path]
            raise DataError(
                f"{show_path(path)}: the file changed while its model was read: try again"
            )
        return model
