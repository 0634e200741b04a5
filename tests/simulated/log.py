"""What happens on the simulated device: where the host would wait, and what a real device would refuse or dislike."""

import linecache
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

_OURS = ("/lit_data/", "/callbacks/")


@dataclass
class Log:
    """Notes of (what, where) in the order in which they came.

    Attributes:
        waits: The host waited for the device.
        notes: Events, copies that do not block and the like.
        raise_waits: Make a wait an error, as ``torch.cuda.set_sync_debug_mode("error")`` does.
        kernels: Operations on the device.
        installed: Whether there is a simulated device in this process.
    """

    waits: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    raise_waits: bool = False
    kernels: int = 0
    installed: bool = False

    def clear(self) -> None:
        """Forget everything."""
        self.waits.clear()
        self.notes.clear()
        self.raise_waits, self.kernels = False, 0

    def wait(self, what: str) -> None:
        """Note that the host waits."""
        place = find_place()
        self.waits.append((what, place))
        if self.raise_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what} at {place}")

    def note(self, what: str) -> None:
        """Note anything else."""
        self.notes.append((what, find_place()))

    def count_waits(self) -> Counter[tuple[str, str]]:
        """How often the host waited, for what and where."""
        return Counter(self.waits)


LOG = Log()


def find_place() -> str:
    """``file:line source`` of the innermost frame of ours, and of a library's if that lies deeper; else of the test."""
    frames = [f for f in _list_frames() if "/tests/simulated/" not in f.filename]
    ours = [f for f in frames if f.is_ours]
    others = [
        f for f in frames if "/torch/" not in f.filename and "/lib/python3." not in f.filename
    ]
    inner = (ours or others or frames)[-1]
    name = inner.filename.rpartition("/lit_data/")[2]
    libraries = [f for f in frames if f.is_library]
    via = ""
    if libraries and frames.index(libraries[-1]) > frames.index(inner):
        via = (
            f" via {libraries[-1].filename.rpartition('site-packages/')[2]}:{libraries[-1].lineno}"
        )
    source = linecache.getline(inner.filename, inner.lineno).strip()
    return f"{name}:{inner.lineno} {source[:100]}{via}"


class _Frame(NamedTuple):
    filename: str
    lineno: int

    @property
    def is_library(self) -> bool:
        path = self.filename
        return "site-packages/" in path and "site-packages/torch/" not in path

    @property
    def is_ours(self) -> bool:
        path = self.filename
        return any(part in path for part in _OURS) and "site-packages" not in path


def _list_frames() -> list[_Frame]:
    """Return the frames of this call, the innermost last; `traceback` would read all their files."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        frames.append(_Frame(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]
