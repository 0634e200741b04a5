import ssl

import aiohttp
import pytest
from botocore import exceptions as boto
from s3fs.errors import translate_boto_error

from lit_data.wings.remote.faults import describe_fault


def _s3(code: str, status: int) -> BaseException:
    metadata = {"HTTPStatusCode": status}
    answer = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": metadata}
    return translate_boto_error(boto.ClientError(answer, "GetObject"))


def _web(status: int) -> BaseException:
    info = aiohttp.RequestInfo("u", "GET", {}, "https://host/x?sig=hunter2SECRET")
    return aiohttp.ClientResponseError(info, (), status=status, message="m")


@pytest.mark.parametrize(
    ("error", "passes", "text"),
    [
        (_s3("SlowDown", 503), True, "the server returns 503 ("),
        (_s3("AccessDenied", 403), False, "access denied (403); credentials belong"),
        (_s3("NoSuchBucket", 404), False, "not found (404)"),
        (_s3("PermanentRedirect", 301), False, "the server returns 301"),
        (boto.NoCredentialsError(), False, "no credentials were found; credentials belong"),
        (boto.EndpointConnectionError(endpoint_url="http://host"), True, "no connection"),
        (_web(503), True, "the server returns 503"),
        (_web(401), False, "access denied (401)"),
        (_web(400), False, "the server returns 400"),
        (aiohttp.ClientPayloadError("cut"), True, "no connection (cut)"),
        (aiohttp.InvalidURL("x"), False, "cannot be read (InvalidURL"),
        (ssl.SSLCertVerificationError("self-signed"), False, "no trusted connection"),
        (TimeoutError(), True, "no answer before the timeout"),
        (ConnectionResetError("reset"), True, "no connection (reset)"),
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
