"""``python -m benchmarks.slow_s3 FOLDER LATENCY_MS MB_PER_S``: a server that speaks as much S3 as
readers ask for.

Every request waits, and all answers together get so many bytes a second. Prints its port;
``/count`` answers how many bytes were sent since it was asked last.
"""

import http.server
import sys
import threading
import time
from pathlib import Path
from typing import Final, cast
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE_BYTES: Final = 2**18
BUCKET: Final = "bench"


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
        self.folder, self.latency_s, self._bytes_per_s = folder, latency_s, bytes_per_s
        self._free_at_s, self._lock, self._sent = 0.0, threading.Lock(), 0

    def wait(self, nbytes: int) -> None:
        """Until there is room on the line for so many bytes."""
        with self._lock:
            self._sent += nbytes
            begin_s = max(time.monotonic(), self._free_at_s)
            self._free_at_s = begin_s + nbytes / self._bytes_per_s
        time.sleep(max(0.0, begin_s - time.monotonic()))

    def count(self) -> int:
        """Bytes since the last call."""
        with self._lock:
            sent, self._sent = self._sent, 0
        return sent


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, is_head: bool) -> None:
        server, parts = cast(SlowServer, self.server), urlsplit(self.path)
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
        size, asked = path.stat().st_size, self.headers.get("Range")
        first, last = 0, size - 1
        if asked:
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = (
                (int(begin), int(end) if end else last) if begin else (size - int(end), last)
            )
        count = min(last, size - 1) - first + 1
        self.send_response(206 if asked else 200)
        headers = {"Content-Length": str(count), "ETag": f'"{size}-x"', "Accept-Ranges": "bytes"}
        headers |= {"Last-Modified": self.date_time_string(int(path.stat().st_mtime))}
        headers |= {"Content-Range": f"bytes {first}-{first + count - 1}/{size}"} if asked else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with path.open("rb") as file:
            file.seek(first)
            while count and not is_head:
                piece = file.read(min(count, _PIECE_BYTES))
                cast(SlowServer, self.server).wait(len(piece))
                self.wfile.write(piece)
                count -= len(piece)

    def _list(self, query: dict[str, list[str]]) -> bytes:
        folder, prefix = cast(SlowServer, self.server).folder, query.get("prefix", [""])[0]
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{path.stat().st_size}</Size><ETag>&quot;x-{path.stat().st_size}&quot;"
            "</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for path in files
            if (name := path.relative_to(folder).as_posix()).startswith(prefix)
        )
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
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
