"""A proxy on loopback that loses some of the requests to a server."""

import http.client
import http.server
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager


class FaultyProxy:
    """Hands requests on to a server, and answers a part of them by itself.

    Attributes:
        url: Where to ask it.
        faults: Drawn from for each request: a status, `cut` (the connection breaks), or None.
        answered: How many requests got each of them.
        delay_s: Before each answer.
    """

    def __init__(self, url: str, faults: Sequence[int | str | None]) -> None:
        self.host = url.removeprefix("http://")
        self.faults = list(faults)
        self.answered = Counter()
        self.delay_s = 0.0
        self._draws, self._lock = random.Random(0), threading.Lock()
        self._server = _ProxyServer(("127.0.0.1", 0), _ProxyHandler)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["FaultyProxy"]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(10)

    def draw(self) -> int | str | None:
        with self._lock:
            fault = self._draws.choice(self.faults)
            self.answered[fault] += 1
        return fault


class _ProxyServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy = self.server.proxy
        fault = proxy.draw()
        time.sleep(proxy.delay_s)
        if fault == "cut":
            self.close_connection = True
        elif isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.ask(proxy, body)

    def ask(self, proxy: FaultyProxy, body: bytes) -> None:
        # Closed also where the one who asked has gone.
        with closing(http.client.HTTPConnection(proxy.host, timeout=30)) as connection:
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.headers["Content-Length"] if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = hand_on

    def log_message(self, format: str, *args: object) -> None:
        pass
