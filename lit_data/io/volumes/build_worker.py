"""Processes that index volumes: plain children of this one, told by lines of JSON what to do.

Not multiprocessing: a script that builds a store needs no ``if __name__ == "__main__"`` so, threads and devices of this
process are not forked, and a child whose parent dies reads the end of its input and goes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lit_data import errors
from lit_data.errors import DataError, LitDataError, WorkerDiedError, show_path
from lit_data.io.volumes.indexing import IndexOptions
from lit_data.io.volumes.resampling import Resolution
from lit_data.io.volumes.sources import VolumeSource
from lit_data.io.volumes.sparse_writer import write_volume


class WorkerPool:
    """As many processes, each of which works on one volume at a time; ask it from as many threads."""

    def __init__(self, processes: int) -> None:
        self._free: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._all = [_start(environment) for _ in range(processes)]
        for process in self._all:
            self._free.put(process)

    def write(self, source: VolumeSource, target: Path, options: IndexOptions) -> None:
        """Let a process do what ``write_volume`` does.

        Raises:
            DataError: the volume is bad.
            StoreError: or one of its kinds: the file cannot be written.
            WorkerDiedError: the process died.
        """
        process = self._free.get()
        task = {"source": asdict(source), "target": os.fspath(target), "options": asdict(options)}
        answer = _ask(process, json.dumps(task))
        self._free.put(process)  # a dead one too: whoever takes it is told so, instead of waiting for ever
        if answer is None:
            raise WorkerDiedError(
                f"{show_path(source.path)}: the process that indexed it died (exit code {process.wait()}); if memory "
                "ran out, lower processes=, and see the messages above"
            )
        if answer:
            raise getattr(errors, answer["error"])(answer["text"])

    def close(self) -> None:
        """End the processes, also while they work."""
        for process in self._all:
            process.terminate()
        for process in self._all:
            process.communicate()


@contextmanager
def open_pool(processes: int) -> Iterator[WorkerPool]:
    """Start processes, and end them at the end of the block."""
    pool = WorkerPool(processes)
    try:
        yield pool
    finally:
        pool.close()


def main() -> None:
    """Index volumes as told on stdin, and answer each with a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_work(json.loads(line))) + "\n")
        answers.flush()


def _work(task: dict[str, Any]) -> dict[str, str]:
    fields, options = task["source"], task["options"]
    source = VolumeSource(**(fields | {"files": tuple(fields["files"])}))
    settings = IndexOptions(**(options | {"resolution": Resolution(**options["resolution"])}))
    try:
        write_volume(source, Path(task["target"]), settings)
    except LitDataError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except MemoryError:
        return {"error": DataError.__name__, "text": f"{show_path(source.path)}: no memory for a slab of it"}
    return {}


def _start(environment: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", "from lit_data.io.volumes.build_worker import main; main()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _ask(process: "subprocess.Popen[str]", line: str) -> dict[str, str] | None:
    """Its answer; None if it died."""
    if process.stdin is None or process.stdout is None:
        return None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    text = process.stdout.readline()
    answer: dict[str, str] | None = json.loads(text) if text.endswith("\n") else None
    return answer
