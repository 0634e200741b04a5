import asyncio
import socket
import ssl
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from botocore import exceptions as boto
from s3fs.errors import translate_boto_error

from lit_data.errors import DataError
from lit_data.io import progress as bar
from lit_data.io.progress import ProgressBar
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


def test_an_error_that_is_hidden_says_nothing_of_the_fault() -> None:
    error = TimeoutError()
    error.__context__ = ssl.SSLError("of another try")
    assert not describe_fault(error).passes
    error.__suppress_context__ = True  # as by `from None`
    assert describe_fault(error).passes


def test_waits_grow_up_to_a_limit_and_differ(waits_s: list[float]) -> None:
    options = RemoteOptions(retries=9, backoff_s=1)
    assert asyncio.run(insist(_failing([TimeoutError()] * 9), "x", options)) == "done"
    longest_s = [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits_s, longest_s, strict=True))
    assert len({wait / most for wait, most in zip(waits_s, longest_s, strict=True)}) > 5


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


@pytest.mark.parametrize(("seconds_each", "shown"), [(1.1, True), (0.9, False)])
def test_the_bar_appears_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    seconds_each: float,
    shown: bool,
) -> None:
    now_s = iter([0.0, seconds_each, 2 * seconds_each])
    monkeypatch.setattr(bar, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    with ProgressBar("reading", 4000, in_bytes=True) as progress:
        progress.advance(1000)
        progress.advance(2000)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("reading" in err and "3.0/4.0 kB" in err) is shown
