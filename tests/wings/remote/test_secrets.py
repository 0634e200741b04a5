"""Searches for secrets find them all, hide nothing else, and take time in proportion to a text."""

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from lit_data.core.errors import ConfigError
from lit_data.core.secrets import MASK, check_no_credentials, cut_secrets, redact

SECRET = "Zq8fJ2kLmN0pRsTu"
HALF = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f"pass the passwd: '{SECRET}'",
        f'{{"client_secret": "{SECRET}"}}',
        f"AccountName=x;AccountKey={SECRET}==;EndpointSuffix=core",
        f"Server=db;User Id=sa;Password={SECRET};",
        f"SharedAccessSignature={SECRET}",
        f"AWSAccessKeyId={SECRET}",
        f"apiKey: {SECRET}",
        f"{'x' * 200}.api_token = {SECRET}",
        f"https://h/x?X-Amz-Credential={SECRET}&X-Amz-Date=1",
        f"https://h/x?X-Amz-Signature={SECRET}",
        f"https://h/c/b?sv=2024&se=2027&sig={SECRET}",
        f"mongodb+srv://user:{SECRET}@cluster/db",
        f"postgresql://user:{SECRET}@h:5432/db and more",
        f"https://{SECRET}@github.com/a/b",
        f"http:/user:{SECRET}@h",
        f"Authorization: Bearer {SECRET}",
        f"Authorization: Basic {SECRET}",
        f"curl -H 'bearer {SECRET}'",
        f"Cookie: session={SECRET}",
        f"AKIAIOSFODNN7EXAMPLE {HALF}",
        f"{HALF}\nAKIAIOSFODNN7EXAMPLE",
        f"-----BEGIN PRIVATE KEY-----\nMII{SECRET}\n-----END PRIVATE KEY-----",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\nb3{SECRET}",
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{SECRET}",
        f"-eyJhbGciOiJIUzI1NiJ9 eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{SECRET}",
    ],
)
def test_secrets_are_cut_out(text: str) -> None:
    cut = cut_secrets(text)
    assert SECRET not in cut
    assert HALF not in cut
    assert MASK in cut
    assert cut_secrets(cut) == cut


@pytest.mark.parametrize(
    "text",
    [
        "key_ring: scratch, keyboard=us, monkey: 1, turkey=2",
        "token_length: 512 and max_tokens=77",
        "password_file: /run/secrets/db",
        "basic classification of images",
        "/data/Set1/images/AB12cd34EF56gh78IJ90kl12MN/part",
        "sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "http://host:8080/a@b, see me@example.org",
        "2026-01-01 10:20:30,123 INFO loss: 0.5",
        "s3://bucket/keys/key_ring.png",
    ],
)
def test_ordinary_texts_stay(text: str) -> None:
    assert cut_secrets(text) == text


def test_secrets_of_the_environment_are_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdefabcdef")
    monkeypatch.setenv("PASSWORD_STORE_DIR", "/home/me/passwords")
    assert cut_secrets("login abcdefabcdef in /home/me/passwords") == (
        f"login {MASK} in /home/me/passwords"
    )


PIECES = [
    "http:a:",
    "://a:",
    "://?",
    "://?a",
    "a://",
    "a@",
    "://u:p@",
    "http://@",
    "https://a?",
    "s3:",
    "http:   / ",
    "key=",
    "key   ",
    "key='",
    "auth",
    "=",
    "x.",
    "Ab",
    "&sig=",
    "bearer ",
    "'",
    "eyJ-",
    "-eyJa.",
    "sk-",
    "AKIA",
    "-----BEGIN PRIVATE KEY-----",
    "Aa0/" * 10 + " ",
    "\n",
]


@pytest.mark.parametrize("search", [cut_secrets, redact, lambda t: check_no_credentials(t, "k")])
@pytest.mark.parametrize("piece", PIECES)
def test_time_grows_with_the_text_and_not_with_its_square(
    piece: str, search: Callable[[str], object]
) -> None:
    short, long = (piece * (size // len(piece)) for size in (2_000, 32_000))
    # Of a square the ratio would be 256, of a line it is 16.
    assert _least_s(search, long) < 80 * _least_s(search, short) + 0.01


def _least_s(search: Callable[[str], object], text: str) -> float:
    times_s = []
    for _ in range(2):
        began_s = time.process_time()
        with suppress(ConfigError):
            search(text)
        times_s.append(time.process_time() - began_s)
    return min(times_s)
