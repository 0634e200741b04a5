"""Detection of secrets in texts: refused in addresses, and removed from all output.

Each search scans a text once: no repetition in a pattern backtracks, and none restarts inside a
part that another one has scanned.
"""

import os
import re
from collections.abc import Iterator
from functools import lru_cache

from lit_data.core.errors import ConfigError, escape

WHERE_CREDENTIALS_BELONG = (
    "credentials belong to the environment (AWS_PROFILE, AWS_ACCESS_KEY_ID and so on), ~/.aws, "
    "~/.netrc or the configuration files of fsspec (~/.config/fsspec); see docs/remote.md"
)
MASK = "***"

_SECRET_WORDS = frozenset(
    (
        "apikey",
        "auth",
        "authorization",
        "cookie",
        "credential",
        "credentials",
        "jwt",
        "key",
        "passcode",
        "passphrase",
        "passwd",
        "password",
        "pwd",
        "secret",
        "secrets",
        "sig",
        "signature",
        "token",
    )
)
"""Words in the names of keys whose values are secrets."""
_ORDINARY_ENDS = frozenset(
    (
        "board",
        "count",
        "dir",
        "file",
        "folder",
        "frame",
        "frames",
        "hole",
        "kind",
        "length",
        "name",
        "path",
        "point",
        "points",
        "ring",
        "rings",
        "size",
        "stone",
        "type",
        "way",
    )
)
"""Last words of names with a secret word but without a secret: ``key_ring``, ``token_length``."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+")

# The secret half of an AWS key may hold slashes, so they do not end a password; digits up to one
# are a port.
_LOGIN = re.compile(r"(?P<address>://)(?!\[)[^/:]*+:(?!\d++(?:[/?]|\Z))")
_MISTYPED = re.compile(  # a slash or more too few, or a space: no address, and still a password
    r"(?i)\b(?P<address>(?:https?|s3a?|gc?s|az|abfss?|adl|s?ftp|webdavs?)"
    r"\s*+:\s*+(?:/{1,3}+\s*+)?+)[^/\s:\[]*+:(?!\d++(?:[/?]|\Z))"
)
_WEB_USER = re.compile(r"(?i)(https?://)[^/\s@?#'\"]++@")
_UP_TO_AT = re.compile(r"[^\s@'\"]++(@)?+")
_LINE_UP_TO_AT = re.compile(r"[^\n@'\"]++(@)?+")

_ADDRESS = re.compile(r"[A-Za-z0-9+.-]://")
_WITH_QUERY = re.compile(r"([^\s?#'\"<>]++)([?#][^\s'\"<>)]*+)?+")
_NOT_SPACE = re.compile(r"\S++")
_PARAMETER = re.compile(r"[?&;#]([\w.-]++)=")

_ANY_WORD = "|".join(sorted(_SECRET_WORDS, key=len, reverse=True))
_ASSIGNED = re.compile(
    rf"(?i)(?<![\w.+-])(?=[\w.+-]*?(?:{_ANY_WORD}))(?P<key>[\w.+-]++)['\"]?\s*+[=:]\s*+"
)
_VALUE = re.compile(r"(?i)(?:(?:bearer|basic)\s++)?+(?:'[^']*+'|\"[^\"]*+\"|[^\s,;&}\]]++)")
_NO_SECRETS = ("null", "None", "true", "false", "True", "False", MASK)
_BEARER = re.compile(r"(?i)\b(?P<kind>bearer|basic)\s++(?P<token>[\w.~+/=-]{8,}+)")
_PRIVATE_KEY = re.compile(
    r"(?s)-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
_ISSUED = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}+\b|\bgh[pousr]_\w{20,}+|\bgithub_pat_\w{20,}+|\bhf_\w{20,}+"
    r"|\bglpat-[\w-]{16,}+|\bxox[abprs]-[\w-]{10,}+|\bsk-[\w-]{20,}+"
    r"|(?<![\w-])eyJ[\w-]{10,}+\.[\w-]{10,}+\.[\w-]*+"
)
"""Patterns of AWS, GitHub, Hugging Face, GitLab, Slack and OpenAI keys, and of JSON web tokens."""
_ISSUED_STARTS = (
    "AKIA",
    "ASIA",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "hf_",
    "glpat-",
    "xox",
    "sk-",
    "eyJ",
)
_KEY_ID = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}+\b")
_OTHER_HALF = re.compile(r"(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])")
_SHORTEST_SECRET = 8
"""Length below which a value is a placeholder such as "test", which messages may have for other reasons."""


def check_no_credentials(text: str | None, key: str) -> None:
    """Refuse a text with credentials inside an address.

    Args:
        text: Any text.
        key: Key of the option for the message, which never repeats its value.

    Raises:
        ConfigError: There are credentials; the error names the option and where they belong.
    """
    if text and (_has_login(text) or ("://" in text and _has_secret_parameter(text))):
        raise ConfigError(
            f"{key}: the address holds a user name, password, token or signature, which would end "
            f"up in logs and run folders; write it without; {WHERE_CREDENTIALS_BELONG}"
        )


def redact(text: str) -> str:
    """Return a text of a library on one line, without possible secrets and queries of addresses."""
    text = _WITH_QUERY.sub(_mask_query, cut_secrets(text))
    return escape(text.strip().replace("\n", " "))


def cut_secrets(text: str) -> str:
    """Return a text without secrets.

    Secrets are logins in addresses, values after the names of secrets, texts that look like keys or
    private keys, and secrets of the environment.
    """
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _mask_logins(text)
    text = _mask_assigned(text)
    text = _BEARER.sub(_mask_bearer, text)
    if holds_key_id(text):
        text = _OTHER_HALF.sub(_mask_other_half, text)
    if any(start in text for start in _ISSUED_STARTS):
        text = _ISSUED.sub(MASK, text)
    for secret in _list_known():
        text = text.replace(secret, MASK)
    return text


def holds_key_id(text: str) -> bool:
    """Return True if a text has the public half of an AWS key, as the secret half is then near."""
    return _KEY_ID.search(text) is not None


def find_other_halves(text: str) -> list[str]:
    """Return texts that may be the secret half of an AWS key, judged only by their length."""
    halves: list[str] = _OTHER_HALF.findall(text)
    return [half for half in halves if _looks_random(half)]


def split_key(key: str) -> list[str]:
    """Return the words of a key in lower case: ``apiToken`` gives api and token."""
    return [word.lower() for word in _WORD.findall(key)]


def names_secret(key: str) -> bool:
    """Return True if the value of a key is a secret by the words of its name."""
    words = split_key(key)
    return not _SECRET_WORDS.isdisjoint(words) and words[-1] not in _ORDINARY_ENDS


def ends_in_secret(key: str) -> bool:
    """Return True if even a number is a secret there, unlike that of ``token_limit``."""
    return not _SECRET_WORDS.isdisjoint(split_key(key)[-1:])


def _find_logins(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each login before an @ in an address."""
    for parts, pattern in ((_UP_TO_AT, _LOGIN), (_LINE_UP_TO_AT, _MISTYPED)):
        for part in parts.finditer(text):
            if part[1] is None:
                continue
            login = pattern.search(text, part.start(), part.end())
            if login:
                yield login.end("address"), part.end() - 1


def _has_login(text: str) -> bool:
    if "@" not in text:
        return False
    return next(_find_logins(text), None) is not None or _WEB_USER.search(text) is not None


def _mask_logins(text: str) -> str:
    if "@" not in text:
        return text
    pieces, end = [], 0
    for first, last in sorted(_find_logins(text)):
        if first >= end:
            pieces += [text[end:first], MASK]
        end = max(end, last)
    return _WEB_USER.sub(rf"\1{MASK}@", "".join([*pieces, text[end:]]))


def _has_secret_parameter(text: str) -> bool:
    for word in _NOT_SPACE.findall(text):
        _, scheme_end, rest = word.partition("://")
        if scheme_end and any(names_secret(name) for name in _PARAMETER.findall(rest)):
            return True
    return False


def _mask_query(match: re.Match[str]) -> str:
    if match[2] is None or not _ADDRESS.search(match[1]):
        return match[0]
    return f"{match[1]}{match[2][0]}{MASK}"


def _mask_assigned(text: str) -> str:
    """Mask the text after the name of a secret and an = or a colon."""
    pieces, end = [], 0
    for match in _ASSIGNED.finditer(text):
        if match.start() < end or not names_secret(match["key"]):
            continue
        value = _VALUE.match(text, match.end())
        if value and value[0] not in _NO_SECRETS:
            pieces += [text[end : match.end()], MASK]
            end = value.end()
    return "".join([*pieces, text[end:]])


def _mask_bearer(match: re.Match[str]) -> str:
    # "basic" is a word of any text as well.
    if match["kind"].lower() == "basic" and not _looks_random(match["token"]):
        return match[0]
    return f"{match['kind']} {MASK}"


def _mask_other_half(match: re.Match[str]) -> str:
    return MASK if _looks_random(match[0]) else match[0]


def _looks_random(token: str) -> bool:
    """Return True if a token mixes upper case, lower case and digits, unlike a word or a checksum."""
    kinds = (str.isupper, str.islower, str.isdigit)
    return all(any(map(kind, token)) for kind in kinds)


def _list_known() -> list[str]:
    """Return the secrets of the environment, by the names of its variables."""
    secrets = []
    for name, value in os.environ.items():
        is_path = value.startswith(("/", "~"))
        if len(value) >= _SHORTEST_SECRET and not is_path and _is_secret_variable(name):
            secrets.append(value)
    return sorted(secrets, key=len, reverse=True)


@lru_cache(maxsize=1024)
def _is_secret_variable(name: str) -> bool:
    return names_secret(name)
