"""No request goes to a link-local address, however it is written and whatever leads there."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from lit_data.core.addresses import RemoteOptions, parse_address
from lit_data.core.errors import ConfigError
from lit_data.core.hosts import open_socket
from lit_data.wings.remote.transport import open_transport

HOSTS = [
    "169.254.169.254",
    "169.254.1.1",
    "2852039166",
    "0xA9FEA9FE",
    "0251.0376.0251.0376",
    "169.254.43518",
    "169.254.169.254.",
    "[fe80::1]",
    "[fe80::1%25eth0]",
    "[fd00:ec2::254]",
    "[::ffff:169.254.169.254]",
    "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::]",
    "100.100.100.200",
]


@pytest.mark.parametrize("host", HOSTS)
def test_link_local_hosts_are_refused(host: str) -> None:
    for scheme in ("http", "https", "sftp"):
        with pytest.raises(ConfigError, match="link-local"):
            parse_address(f"{scheme}://{host}/latest")
    with pytest.raises(ConfigError, match="link-local"):
        parse_address(f"http://{host}:80/latest")
    with pytest.raises(ConfigError, match="link-local"):
        RemoteOptions(endpoint_url=f"http://{host}")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x", "s3://bucket/x", "http://a.b/c", "s3://2852039166/x"]
)
def test_other_hosts_pass(url: str) -> None:
    parse_address(url)


def test_no_socket_is_opened_for_what_a_name_leads_to() -> None:
    info = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 80))
    with pytest.raises(ConfigError, match="link-local"):
        open_socket(info)


class _Redirecting(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("Location", "http://169.254.169.254/latest/meta-data")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Redirecting)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/set"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.timeout(60)
def test_a_redirection_to_one_is_not_followed(address: str) -> None:
    options = RemoteOptions(retries=0, timeout_s=5)
    with (
        open_transport(address, options) as transport,
        pytest.raises(ConfigError, match="link-local"),
    ):
        transport.read("SHA256SUMS", 1000)
