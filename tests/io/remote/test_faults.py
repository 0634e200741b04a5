import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from botocore import exceptions as boto
from s3fs.errors import translate_boto_error

from lit_data.errors import DataError
from lit_data.io.remote import RemoteOptions, faults
from lit_data.io.remote.connection import call_each
from lit_data.io.remote.faults import UnreachableError, describe_fault, insist


def _s3(code: str, status: int) -> BaseException:
    metadata = {"HTTPStatusCode": status}
    answer = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": metadata}
    return translate_boto_error(boto.ClientError(answer, "GetObject"))


def _web(status: int) -> BaseException:
    info = aiohttp.RequestInfo("u", "GET", {}, "https://host/x?sig=hunter2SECRET")  # type: ignore[arg-type]
    return aiohttp.ClientResponseError(info, (), status=status, message="m")


@pytest.mark.parametrize(
    ("error", "passes", "text"),
    [
        (_s3("SlowDown", 503), True, "the server answers 503 ("),
        (_s3("InternalError", 500), True, "the server answers 500"),
        (_s3("AccessDenied", 403), False, "access denied (403); credentials belong"),
        (_s3("NoSuchBucket", 404), False, "not found (404)"),
        (_s3("SignatureDoesNotMatch", 403), False, "access denied (403)"),
        (_s3("PermanentRedirect", 301), False, "the server answers 301"),
        (boto.NoCredentialsError(), False, "no credentials were found; credentials belong"),
        (boto.EndpointConnectionError(endpoint_url="http://host"), True, "no connection"),
        (boto.ReadTimeoutError(endpoint_url="http://host"), True, "no connection (Read timeout"),
        (_web(503), True, "the server answers 503"),
        (_web(429), True, "the server answers 429"),
        (_web(401), False, "access denied (401)"),
        (_web(410), False, "not found (410)"),
        (_web(400), False, "the server answers 400"),
        (aiohttp.ClientPayloadError("cut"), True, "no connection (cut)"),
        (aiohttp.ServerDisconnectedError(), True, "no connection"),
        (aiohttp.InvalidURL("x"), False, "cannot be read (InvalidURL"),
        (ssl.SSLCertVerificationError("self-signed"), False, "no trusted connection"),
        (TimeoutError(), True, "no answer in time"),
        (ConnectionResetError("reset"), True, "no connection (reset)"),
        (socket.gaierror(-2, "unknown"), True, "no connection"),
        (FileNotFoundError("x"), False, "not found (404)"),
        (PermissionError("x"), False, "access denied (403)"),
        (
            ValueError("https://u:hunter2SECRET@h"),
            False,
            "cannot be read (ValueError: https://***@h)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_which_faults_pass(error: BaseException, passes: bool, text: str) -> None:
    fault = describe_fault(error)
    assert (fault.passes, fault.text[: len(text)]) == (passes, text)
    assert "hunter2SECRET" not in fault.text


def _failing(errors: list[Exception]) -> Callable[[], Any]:
    async def call() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    return call


@pytest.fixture
def waits_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(faults.asyncio, "sleep", sleep)
    return found


def test_tries_are_counted(waits_s: list[float]) -> None:
    with pytest.raises(
        UnreachableError, match=r"^x: no answer in time, 3 times; try again later"
    ) as caught:
        asyncio.run(insist(_failing([TimeoutError()] * 3), "x", RemoteOptions(retries=2)))
    assert caught.value.__context__ is None
    assert len(waits_s) == 2
    with pytest.raises(DataError, match=r"^x: access denied"):
        asyncio.run(insist(_failing([PermissionError()] * 2), "x", RemoteOptions(retries=2)))
    assert len(waits_s) == 2


def test_calls_are_bounded_and_end_with_the_first_that_fails() -> None:
    busy, ended = [0, 0], []

    async def call(number: int) -> int:
        busy[0] += 1
        busy[1] = max(busy)
        try:
            await asyncio.sleep(0)
            if number == 3:
                raise ValueError("three")
            await asyncio.sleep(3600 if number == 2 else 0)
        except asyncio.CancelledError:
            ended.append(number)
            raise
        finally:
            busy[0] -= 1
        return -number

    assert asyncio.run(call_each(call, [0, 1, 4, 5], 2)) == [0, -1, -4, -5]
    assert asyncio.run(call_each(call, [], 2)) == []
    with pytest.raises(ValueError, match="three"):
        asyncio.run(call_each(call, [2, 3, 4], 2))
    assert (busy, ended) == ([0, 2], [2])
