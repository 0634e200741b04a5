"""Servers on loopback: a web server that can misbehave, and one that speaks S3."""

import http.server
import os
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import quote, unquote

LONGEST_S = 240
"""How long a server process lives even if its test is killed."""
KEYS_PER_PAGE = 100
"""Of a listing of the server that speaks S3; a tenth of what S3 gives, so that few keys have many pages."""


class WebServer:
    """Serves files from memory, and for each path first the faults that were asked for.

    Attributes:
        files: Content by path, without a slash in front.
        faults: For each path what goes wrong at its next requests: a status, `cut`, `hang`, or
            `wrong`.
        asked: How often each (method, path) was asked for.
        indexed: Whether folders are listed.
        tags: Whether answers have an ETag.
        headers: More headers of answers.
        pages: Index pages of one's own.
        redirects: For a path, where to send those who ask.
    """

    def __init__(self) -> None:
        self.files = {}
        self.faults = defaultdict(list)
        self.asked = Counter()
        self.headers = {}
        self.indexed, self.tags, self.closing = True, True, threading.Event()
        self.pages = {}
        self.last_authorization = None
        self.busy = self.most_busy = 0
        self.redirects = {}
        self.lock = threading.Lock()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["WebServer"]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join(10)

    def list_folder(self, folder: str) -> bytes | None:
        """The page of a folder as common servers write it."""
        if folder in self.pages:
            return self.pages[folder]
        below = {name[len(folder) :] for name in self.files if name.startswith(folder)}
        if not below or not self.indexed:
            return None
        entries = sorted({name.partition("/")[0] + ("/" if "/" in name else "") for name in below})
        links = "".join(f'<a href="{quote(entry)}">{entry}</a>\n' for entry in entries)
        return f'<html><a href="?C=M;O=A">time</a><a href="../">up</a><a href="/">top</a>\n{links}</html>'.encode()


class _Handler(http.server.BaseHTTPRequestHandler):
    @property
    def web(self) -> WebServer:
        return cast(_Server, self.server).web

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0]).removeprefix("/")
        with self.web.lock:
            self.web.asked[self.command, path] += 1
            self.web.last_authorization = self.headers["Authorization"]
            self.web.busy += 1
            self.web.most_busy = max(self.web.most_busy, self.web.busy)
        try:
            self.answer(
                path,
                self.web.faults[path].pop(0)
                if self.command == "GET" and self.web.faults[path]
                else None,
            )
        finally:
            with self.web.lock:
                self.web.busy -= 1

    def answer(self, path: str, fault: int | str | None) -> None:
        page = self.web.list_folder(path) if not path or path.endswith("/") else None
        content = self.web.files.get(path, page)
        if fault == "hang":
            self.web.closing.wait(30)
        elif path in self.web.redirects and self.command == "GET":
            self.send_head(302, {"Location": self.web.redirects[path], "Content-Length": "0"})
        elif isinstance(fault, int) or content is None:
            self.send_error(fault if isinstance(fault, int) else 404)
        else:
            self.send_content(
                content, "text/html" if content is page else "application/octet-stream", fault
            )

    def send_content(self, content: bytes, kind: str, fault: str | None) -> None:
        tag = {"ETag": f'"{md5(content).hexdigest()[:8]}"'} if self.web.tags else {}
        self.send_head(
            200,
            {"Content-Type": kind, "Content-Length": str(len(content)), **tag, **self.web.headers},
        )
        if self.command == "GET":
            sent = bytes(len(content)) if fault == "wrong" else content
            self.wfile.write(sent[: len(sent) // 2] if fault == "cut" else sent)

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = (
        128  # with the usual 5, one of many connections at once waits a second for its next try
    )

    def __init__(self, web: WebServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.web = web


@contextmanager
def s3_server(folder: Path, longest_s: int = LONGEST_S) -> Iterator[SimpleNamespace]:
    """A process that speaks S3, with an empty memory, and a client for it.

    Args:
        folder: For what it writes.
        longest_s: How long it lives even if its test is killed.
    """
    boto3, config = __import__("boto3"), __import__("botocore.config").config
    words = ["timeout", str(longest_s), sys.executable, "-m", "moto.server"]
    words += ["-H", "127.0.0.1", "-p", "0"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            words,
            env=os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(KEYS_PER_PAGE)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if b"Running on " in line)
            drain = threading.Thread(target=_copy, args=(process.stderr, log))
            drain.start()
            url = line.decode().split("Running on ")[1].strip()
            settings = config.Config(retries={"total_max_attempts": 1}, read_timeout=30)
            keys = {"aws_access_key_id": "writer", "aws_secret_access_key": "writer"}
            keys |= {"region_name": "us-east-1"}
            client = boto3.client("s3", endpoint_url=url, config=settings, **keys)
            yield SimpleNamespace(url=url, client=client)
            client.close()
        finally:
            process.terminate()
            process.wait(10)
            process.stderr.close()
        drain.join(10)


def _copy(source: object, target: object) -> None:
    try:
        for line in source:
            target.write(line)
    except ValueError:
        pass  # closed at the end
