"""Lines about jobs that run on other machines, whose own lines end up in files there."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_data.commands.sweep_record import Status, read_record

log = logging.getLogger(__name__)

_POLL_S = 2.0


class JobWatch(threading.Thread):
    """Says when the record of a job in a sweep's folder changes.

    Args:
        folder: of the sweep.
        total: how many jobs there are.
    """

    def __init__(self, folder: Path, total: int) -> None:
        super().__init__(name="job-watch", daemon=True)
        self._folder, self._total = folder, total
        self._seen: dict[Path, Status] = {}
        self._done = threading.Event()
        self.look(quiet=True)  # what an earlier start left is no news

    def run(self) -> None:
        """Look until it is enough."""
        while not self._done.wait(_POLL_S):
            self.look()

    def stop(self) -> None:
        """Look a last time."""
        self._done.set()
        self.join()
        self.look()

    def look(self, *, quiet: bool = False) -> None:
        """Say what is new."""
        for path in sorted(self._folder.rglob("job.json")):
            record = read_record(path.parent)
            if record is None or self._seen.get(path) == record.status:
                continue
            self._seen[path] = record.status
            if not quiet:
                label = f"job {record.number} ({record.number + 1} of {self._total})"
                told = f": {record.reason}" if record.reason else f": {' '.join(record.overrides)}"
                log.info("%s: %s%s", label, record.status, told)


@contextmanager
def watching_jobs(folder: Path, total: int) -> Iterator[None]:
    """Say what becomes of the jobs of a sweep while its launcher waits for them."""
    watch = JobWatch(folder, total)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
