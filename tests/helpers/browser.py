"""A headless Chromium, spoken to over two pipes."""

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-breakpad",  # no process that waits for crashes
    "--disable-crash-reporter",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-pipe",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
_LAUNCHER = """
import fcntl, os, sys
# Copied out of the way first: either may be 3 or 4 itself.
copies = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 64) for number in sys.argv[1:3]]
for source, target in zip(copies, (3, 4)):
    os.dup2(source, target)
os.execv(sys.argv[3], sys.argv[3:])
"""
_LIMIT_S = 60.0
_LAST_WORDS_S = 10.0
_STARTS = 3
_PAUSE_S = 2.0


class BrowserGone(Exception):
    """The browser ended by itself or is silent; its last words."""


class Browser:
    """One page; as a context it ends with all its processes.

    Attributes:
        events: What the browser told meanwhile: (method, params).
    """

    def __init__(self, folder: Path) -> None:
        self.events = []
        self._folder = folder
        self._numbers = itertools.count(1)

    def __enter__(self) -> "Browser":
        # Under load Chromium may die before it has seen a page, which is no fault of the page.
        for number in range(1, _STARTS + 1):
            try:
                return self._start(self._folder / str(number))
            except BrowserGone as gone:
                last_words = str(gone)
            if number < _STARTS:
                time.sleep(_PAUSE_S)
        pytest.skip(f"Chromium did not start in {_STARTS} attempts: {last_words}")

    def _start(self, folder: Path) -> "Browser":
        assert CHROMIUM is not None
        folder.mkdir(parents=True)
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        words = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        launcher = [sys.executable, "-c", _LAUNCHER, str(its_in), str(its_out)]
        self._log = folder / "log.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*launcher, *words],
                pass_fds=(its_in, its_out),
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
        os.close(its_in)
        os.close(its_out)
        self._rest, self._session = b"", ""
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        os.close(self._out)  # at which the browser ends
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        try:
            os.write(self._out, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise self._gone() from None
        while (answer := self._read()).get("id") != number:
            self.events.append((answer.get("method", ""), answer.get("params", {})))
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path) -> None:
        """Load a file and wait until all of it is there."""
        self.call("Page.navigate", url=path.absolute().as_uri())
        while "Page.loadEventFired" not in [name for name, _ in self.events]:
            answer = self._read()
            self.events.append((answer.get("method", ""), answer.get("params", {})))

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, or of the promise that it is."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _gone(self, remark: str = "") -> BrowserGone:
        return BrowserGone(remark + self._log.read_text(errors="replace")[-2000:])

    def _read(self) -> dict[str, Any]:
        until_s = time.monotonic() + _LIMIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                raise self._gone(f"no answer in {_LIMIT_S:.0f} s; ")
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise self._gone()
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
