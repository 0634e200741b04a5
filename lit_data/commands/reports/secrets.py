"""What must not stand in a page that is passed on: passwords, tokens, keys, and URLs with them."""

import re
from typing import Any, Final

MASK: Final = "•••"

_WORDS: Final = frozenset(
    [
        *("auth", "authorization", "apikey", "cookie", "credential", "credentials", "key", "passphrase", "passwd"),
        *("password", "pwd", "secret", "secrets", "sig", "signature", "token"),
    ]
)
_SPLIT: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_NAME: Final = r"[\w.+-]{0,64}(?:" + "|".join(sorted(_WORDS, key=len, reverse=True)) + r")[\w-]{0,64}"
_ASSIGNED: Final = re.compile(
    rf"(?i)(?<![\w.+-])(?P<key>{_NAME})(?P<to>['\"]?\s*[=:]\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^\s,;&}}\]]+)"
)
_URL_LOGIN: Final = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE)
_BEARER: Final = re.compile(r"(?i)\b(?P<kind>bearer|basic)\s+[\w.~+/=-]{8,}")
_ISSUED: Final = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bhf_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abprs]-[\w-]{10,}|\bsk-[\w-]{20,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
)
"""The looks of AWS, GitHub, Hugging Face, GitLab, Slack and OpenAI keys, and of JSON web tokens."""

_LEAST_KNOWN: Final = 6  # a shorter secret would be found inside of ordinary words


class Masker:
    """Takes secrets out of configurations and texts.

    Values found under the key of a secret are taken out of all later texts too, wherever they stand.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def mask_tree(self, tree: Any) -> Any:  # noqa: ANN401 - what YAML or JSON may hold
        """A copy of dicts and lists without secrets; what lies below the key of a secret is one as a whole.

        A number is a secret only where the key ends in the word, so ``max_tokens: 512`` stays.
        """
        if isinstance(tree, dict):
            return {self.mask_text(str(key)): self._mask_entry(str(key), value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.mask_tree(value) for value in tree]
        return self.mask_text(tree) if isinstance(tree, str) else tree

    def mask_text(self, text: str) -> str:
        """A text without secrets: known ones, assignments to such names, logins in URLs, keys that look like some."""
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, MASK)
        text = _ISSUED.sub(MASK, _BEARER.sub(rf"\g<kind> {MASK}", _URL_LOGIN.sub(rf"\g<scheme>{MASK}@", text)))
        return _ASSIGNED.sub(_mask_assignment, text)

    def _mask_entry(self, key: str, value: Any) -> Any:  # noqa: ANN401
        words = [word.lower() for word in _SPLIT.split(key) if word]
        names_it = bool(_WORDS.intersection(words))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if names_it and (isinstance(value, str | dict | list) or (is_number and words[-1] in _WORDS)):
            self._learn(value)
            return MASK if value not in ("", {}, []) else value
        return self.mask_tree(value)

    def _learn(self, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                self._learn(part)
        elif isinstance(value, str) and len(value) >= _LEAST_KNOWN and not value.startswith("${"):
            self._known.add(value)


def _mask_assignment(found: re.Match[str]) -> str:
    words = {word.lower() for word in _SPLIT.split(found["key"]) if word}
    if not words & _WORDS or found["value"] in ("null", "None", "true", "false", "True", "False", MASK):
        return found[0]
    return f"{found['key']}{found['to']}{MASK}"
