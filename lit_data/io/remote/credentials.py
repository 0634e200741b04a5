"""What of an address or a message may be shown to anybody.

Whatever a configuration holds ends up in run folders, summaries, checkpoints and tables, so credentials in an address
are refused and never repeated, not even in the error. What libraries say is shown with everything secret cut out.
"""

import os
import re
from typing import Final

from lit_data.errors import ConfigError, escape

WHERE_CREDENTIALS_BELONG: Final = (
    "credentials belong to the environment (AWS_PROFILE, AWS_ACCESS_KEY_ID and so on), ~/.aws, ~/.netrc or the "
    "configuration files of fsspec (~/.config/fsspec); see docs/remote.md"
)

# The secret half of an AWS key may hold slashes, so they do not end a password; digits up to one are a port.
_PASSWORD = re.compile(r"(://)(?!\[)[^/\s:@'\"]*:(?!\d+(?:/|\?|$))[^\s@'\"]*@")
_MISTYPED = re.compile(  # a slash or more too few, or a space: no address, and still a password
    r"(?i)\b((?:https?|s3a?|gc?s|az|abfss?|adl|s?ftp|webdavs?)\s*:\s*/{0,3}\s*)"
    r"[^/\s:@'\"\[]*:(?!\d+(?:/|\?|$))[^@\n'\"]*@"
)
_WEB_USER = re.compile(r"(?i)(https?://)[^/\s@?#'\"]+@")
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#'\"<>]*)([?#])[^\s'\"<>)]*")
_SECRET_PART = re.compile(
    r"(?i)://\S*[?&;#](?:sig|key|auth|pwd|"
    r"[\w.-]*(?:signature|credential|token|secret|password|passwd|api[_-]?key|access[_-]?key(?:id)?))="
)
_SECRET_FIELD = re.compile(
    r"(?i)\b((?:authorization|x-amz-security-token|secret[_-]?access[_-]?key|session[_-]?token|password)['\"]?\s*[:=]\s*)"
    r"['\"]?(?:(?:bearer|basic)\s+)?[^\s,'\"]+"
)
_AWS_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_SHORTEST_SECRET = 8
"""What is shorter is a stand-in such as "test", which messages may well hold for other reasons."""


def check_no_credentials(text: str | None, key: str) -> None:
    """Refuse a text with credentials inside an address.

    Args:
        text: Any text.
        key: Name of the option, for the message, which never repeats its value.

    Raises:
        ConfigError: Says which option it is and where credentials belong.
    """
    patterns = (_PASSWORD, _WEB_USER, _SECRET_PART)
    if text and (_MISTYPED.search(text) or ("://" in text and any(pattern.search(text) for pattern in patterns))):
        raise ConfigError(
            f"{key}: the address holds a user name, password, token or signature, which would end up in logs and run "
            f"folders; write it without; {WHERE_CREDENTIALS_BELONG}"
        )


def redact(text: str) -> str:
    """A text of a library with what may be secret cut out, on one line."""
    text = _PASSWORD.sub(r"\1***@", text)
    text = _MISTYPED.sub(r"\1***@", text)
    text = _WEB_USER.sub(r"\1***@", text)
    text = _QUERY.sub(r"\1\2***", text)
    text = _SECRET_FIELD.sub(r"\1***", text)
    text = _AWS_KEY.sub("***", text)
    for name in _SECRET_VARIABLES:
        if len(value := os.environ.get(name, "")) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return escape(text.strip().replace("\n", " "))
