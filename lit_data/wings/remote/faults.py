"""Faults of reading from a server: whether to retry, and messages without secrets.

Errors of clients contain addresses, which after a redirect may have signatures. So no such error is
ever chained to one of lit_data, and none is raised further.
"""

import asyncio
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lit_data.core.addresses import RemoteOptions
from lit_data.core.errors import DataError, LitDataError, StoreSpaceError, causes_of
from lit_data.core.files import NO_SPACE
from lit_data.core.secrets import WHERE_CREDENTIALS_BELONG, redact
from lit_inspect.counts import counted

log = logging.getLogger(__name__)


T = TypeVar("T")

_LONGEST_WAIT_S = 30.0
_TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
_LASTING = (
    ssl.SSLError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    NotImplementedError,
)
"""Errors without an answer of the server that a retry cannot fix."""
_SHOWN = 200

ACCESS_ADVICE = f"; {WHERE_CREDENTIALS_BELONG}; public S3 buckets need data.remote.anon=true"


class UnreachableError(DataError):
    """A server did not answer, or only with transient errors, in all tries."""


def too_large(what: str, most_bytes: int) -> DataError:
    """Return the error for a file that is larger than allowed."""
    return DataError(
        f"{what}: more than the allowed {most_bytes} bytes; it is being changed, or must be "
        "prepared again"
    )


class BrokenReadError(Exception):
    """Bytes that differ from those the server announced; a retry may fix it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Meaning of an error of a client.

    Args:
        passes: True if a retry may succeed.
        text: Text for a message.
    """

    passes: bool
    text: str


def describe_fault(error: BaseException) -> Fault:
    """Classify an error of fsspec or of a library below it.

    An error with a status is an answer of the server, and the status decides whether a retry may
    help. Without a status the connection is at fault, except for `_LASTING`.
    """
    chain = list(causes_of(error, contexts="shown"))
    status = _find_status(chain)
    has_no_credentials = any(type(link).__name__ == "NoCredentialsError" for link in chain)
    if status in (401, 403) or has_no_credentials:
        answer = "no credentials were found" if status is None else f"access denied ({status})"
        return Fault(False, f"{answer}{ACCESS_ADVICE}")
    if status in (404, 410):
        return Fault(
            False,
            f"not found ({status}); check data.root, or start again if the folder is being changed",
        )
    if isinstance(error, BrokenReadError):
        return Fault(True, str(error))
    reason = redact(str(error))[:_SHOWN] or "no reason given"
    if status is not None:
        return Fault(status in _TRANSIENT_STATUS, f"the server returns {status} ({reason})")
    if any(isinstance(link, ssl.SSLError) for link in chain):
        return Fault(False, f"no trusted connection ({type(error).__name__}: {reason})")
    if isinstance(error, _LASTING):
        return Fault(False, f"cannot be read ({type(error).__name__}: {reason})")
    if isinstance(error, TimeoutError):
        return Fault(True, "no answer before the timeout")
    return Fault(True, f"no connection ({reason})")


async def insist(call: Callable[[], Awaitable[T]], what: str, options: RemoteOptions) -> T:
    """Call until it works, with increasing waits, as long as errors are transient.

    Args:
        call: Starts over at each call.
        what: Address, for messages.
        options: Number of retries, and waiting time.

    Raises:
        UnreachableError: All tries failed.
        DataError: The error is permanent.
        StoreSpaceError: The local disk is full.
        OSError: A local file cannot be written.
    """
    fault = Fault(True, "")
    for number in range(options.retries + 1):
        if number:
            log.info("%s: %s; try %d of %d", what, fault.text, number + 1, options.retries + 1)
            longest_s = min(_LONGEST_WAIT_S, options.backoff_s * 2 ** (number - 1))
            # A random part, so that many readers do not retry at the same time; not from a
            # generator that training uses.
            await asyncio.sleep(longest_s * (0.5 + secrets.randbelow(1001) / 2000))
        try:
            return await call()
        except LitDataError:
            raise
        except Exception as error:  # clients of file systems raise any kind of error
            is_full = isinstance(error, OSError) and error.errno in NO_SPACE
            if isinstance(error, OSError) and error.filename is not None and not is_full:
                raise  # of a local file: errors of servers have no file name
            fault = describe_fault(error)
        if is_full:  # raised here and below, after the block, so that nothing is chained
            raise StoreSpaceError(
                f"{what}: the local disk is full; free some space, or set paths.cache=<folder>"
            )
        if not fault.passes:
            raise DataError(f"{what}: {fault.text}")
    # The first try is not a retry.
    raise UnreachableError(
        f"{what}: {fault.text}, {counted(options.retries + 1, 'time')}; try again later, or raise "
        "data.remote.retries or data.remote.timeout_s"
    )


def _find_status(chain: Sequence[BaseException]) -> int | None:
    """Return the HTTP status that an error of aiohttp or botocore has, or corresponds to."""
    for link in chain:
        status = getattr(link, "status", None)
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int) and not isinstance(status, bool) and 300 <= status < 600:
            return status
    if isinstance(chain[0], FileNotFoundError):
        return 404
    return 403 if isinstance(chain[0], PermissionError) else None
