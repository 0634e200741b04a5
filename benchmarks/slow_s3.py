"""Server that speaks as much S3 as readers ask for, late and slowly.

``python -m benchmarks.slow_s3 FOLDER LATENCY_MS MB_PER_S``: every request waits, and all answers
together get so many bytes a second. Prints its port; ``/count`` answers with the bytes that were
sent since it was asked last.
"""

import http.server
import sys
import threading
import time
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE_BYTES = 2**18
BUCKET = "bench"


class SlowServer(http.server.ThreadingHTTPServer):
    """Serves a folder as a bucket.

    Args:
        folder: Its files are the objects.
        latency_s: That each request waits.
        bytes_per_s: Of all answers together.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0  # when the line has sent what waits for it
        self._lock = threading.Lock()
        self._sent_bytes = 0

    def wait(self, nbytes: int) -> None:
        """Wait until there is room on the line for some bytes."""
        with self._lock:
            self._sent_bytes += nbytes
            begin_s = max(time.monotonic(), self._free_at_s)
            self._free_at_s = begin_s + nbytes / self._bytes_per_s
        time.sleep(max(0.0, begin_s - time.monotonic()))

    def count(self) -> int:
        """Return the bytes that were sent since the last call."""
        with self._lock:
            sent_bytes = self._sent_bytes
            self._sent_bytes = 0
        return sent_bytes


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, is_head: bool) -> None:
        server = cast(SlowServer, self.server)
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        if bucket == "count":
            self._send(200, str(server.count()).encode(), {})
            return
        time.sleep(server.latency_s)
        path = server.folder / key
        if not key:
            self._send(200, self._list(parse_qs(parts.query)), {"Content-Type": "application/xml"})
        elif path.is_file():
            self._send_file(path, is_head=is_head)
        else:
            self._send(404, b"", {})

    def _send_file(self, path: Path, *, is_head: bool) -> None:
        size = path.stat().st_size
        first, last = 0, size - 1
        asked_range = self.headers.get("Range")
        if asked_range:
            begin, _, end = asked_range.removeprefix("bytes=").partition("-")
            if not begin:  # the last bytes
                first = size - int(end)
            else:
                first = int(begin)
                last = min(int(end), last) if end else last
        count = last - first + 1
        headers = {
            "Content-Length": str(count),
            "ETag": f'"{size}-x"',
            "Accept-Ranges": "bytes",
            "Last-Modified": self.date_time_string(int(path.stat().st_mtime)),
        }
        if asked_range:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.send_response(206 if asked_range else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if not is_head:
            self._send_bytes(path, first, count)

    def _send_bytes(self, path: Path, first: int, count: int) -> None:
        with path.open("rb") as file:
            file.seek(first)
            while count:
                piece = file.read(min(count, _PIECE_BYTES))
                cast(SlowServer, self.server).wait(len(piece))
                self.wfile.write(piece)
                count -= len(piece)

    def _list(self, query: dict[str, list[str]]) -> bytes:
        folder = cast(SlowServer, self.server).folder
        prefix = query.get("prefix", [""])[0]
        rows = []
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name.startswith(prefix):
                size = path.stat().st_size
                rows.append(
                    f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size>"
                    f"<ETag>&quot;x-{size}&quot;</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        return (
            '<?xml version="1.0"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        ).encode()

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    folder, latency_ms, megabytes_per_s = sys.argv[1:]
    with SlowServer(
        Path(folder), float(latency_ms) / 1000, float(megabytes_per_s) * 1e6
    ) as running:
        print(running.server_address[1], flush=True)
        running.serve_forever()
