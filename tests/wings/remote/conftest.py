"""Servers that the tests of files start."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.wings.remote.servers import WebServer, s3_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer().running() as server:
        yield server
