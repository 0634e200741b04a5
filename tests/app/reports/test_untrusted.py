"""A run folder may be anybody's: a page of it is made in seconds, of what lies in it, and with no traceback."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_data.app.report import write_report
from lit_data.app.reports.runs import read_run
from lit_data.app.untrusted import MASK, Masker, open_inside
from tests.app.reports.folders import make_run

pytestmark = pytest.mark.timeout(60)


def _link(name: str, target: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return put


def _fifo(name: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return put


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _yaml(text: str) -> Callable[[Path], object]:
    return _text(".hydra/config.yaml", text)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
WARNING = "2026-01-01 00:00:00,000 WARNING x: "
HOSTILE = {
    "references to itself": _yaml("b: '" + "${b}" * 12 + "'"),
    "references in a ring": _yaml("a: '${b}${b}${b}'\nb: '${a}${a}${a}'\nc: ${a}"),
    "alias bomb": _yaml(BOMB),
    "alias of itself": _yaml("a: &x [*x]"),
    "integer in hexadecimal": _yaml("a: 0x" + "f" * 5000),
    "integer in base 60": _yaml("a: 1" + ":0" * 1_000_000),
    "addresses that do not end": _text("fit.log", f"{WARNING}start\n{'http:a:' * 300_000}\n"),
    "address in a setting": _yaml("a: '" + "://a:" * 200_000 + "'"),
    "deep lists": _yaml("a: " + "[" * 900 + "]" * 900),
    "long digits": _text("summary.json", json.dumps({"command": "fit", "test/x": 10**400})),
    "deep json": _text("summary.json", "[" * 900 + "]" * 900),
    "deeper json": _text("summary.json", "[" * 200_000),
    "words of secrets": _text("fit.log", f"2026-01-01 00:00:00,000 INFO x: {'auth' * 50_000}\n"),
    "fifo as a summary": _fifo("summary.json"),
    "fifo as a log": _fifo("fit.log"),
    "fifo as a picture": _fifo("samples.png"),
    "fifo as figures": _fifo("csv/metrics.csv"),
    "endless file": _link("summary.json", "/dev/zero"),
    "endless log": _link("fit.log", "/dev/zero"),
    "link to a file of the machine": _link("oom-1.txt", "/etc/passwd"),
    "link as a picture": _link("samples.png", "/etc/passwd"),
    "picture that is none": _text("samples.png", "<svg onload=alert(1)>"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_page_of_a_hostile_folder_is_made_in_seconds(name: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    HOSTILE[name](folder)
    began_s = time.monotonic()
    page = Path(write_report([folder])).read_text(encoding="utf-8")
    assert time.monotonic() - began_s < 30
    assert "root:x:0" not in page
    assert "onload" not in page
    assert len(page) < 5 * 2**20


def test_a_folder_behind_a_link_is_not_read(tmp_path: Path) -> None:
    folder, outside = make_run(tmp_path / "run"), tmp_path / "outside"
    (folder / ".hydra").rename(outside)
    (folder / ".hydra").symlink_to(outside)
    with pytest.raises(OSError, match="it is behind a link"):
        open_inside(folder, folder / ".hydra/config.yaml")
    (tmp_path / "latest").symlink_to(folder)  # the folder itself may be one
    with open_inside(tmp_path / "latest", tmp_path / "latest/fit.log") as file:
        assert file.read()


def test_secrets_are_still_found_beside_long_words() -> None:
    text = Masker().mask_text("x" * 1000 + " api_token=abc123 " + "key" * 1000)
    assert "abc123" not in text


@pytest.mark.parametrize(
    "key", ["password", "api_key", "apiKey", "AWS_SECRET_ACCESS_KEY", "hf-token", "credentials"]
)
def test_value_of_a_secret_key_is_masked_there_and_wherever_it_comes_again(key: str) -> None:
    masker = Masker()
    masked = masker.mask_tree({"store": {key: "hunter22", "user": "me"}})
    assert masked == {"store": {key: MASK, "user": "me"}}
    assert masker.mask_text("cannot log in with hunter22!") == f"cannot log in with {MASK}!"


def test_both_halves_of_a_key_are_masked_wherever_they_stand() -> None:
    half = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    tree = {"a": half, "b": ["AKIAABCDEFGHIJKLMNOP"], "sum": "0123456789abcdef" * 4}
    masker = Masker()
    assert masker.mask_tree(tree) == {"a": MASK, "b": [MASK], "sum": tree["sum"]}
    assert masker.mask_text(f"with {half}.") == f"with {MASK}."


def test_a_key_over_several_lines_of_a_log_is_masked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE KEY-----\n"
    (folder / "fit.log").write_text(f"{WARNING}bad key\n{key}and more\n")
    page = Path(write_report([folder])).read_text(encoding="utf-8")
    assert "bad key" in page
    assert "MIIEowIBAAKCAQEA" not in page
    assert "and more" in page


def test_everything_below_a_secret_key_is_masked() -> None:
    masker = Masker()
    tree = {"credentials": {"a": ["first-one"], "b": 3}, "n": [{"token": "x"}]}
    assert masker.mask_tree(tree) == {"credentials": MASK, "n": [{"token": MASK}]}
    assert masker.mask_text("first-one") == MASK


def test_what_is_no_secret_stays() -> None:
    tree = {"max_tokens": 512, "token": None, "key": "", "keys": ["a"], "use_auth": False}
    assert Masker().mask_tree(tree) == tree
    text = "unknown key 'sed'. The key is wrong; keyboard=us, monkey=1, sort=key"
    assert Masker().mask_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:pass@host/bucket", f"s3://{MASK}@host/bucket"),
        ("s3://h/x?X-Amz-Signature=abc123&size=3", f"s3://h/x?X-Amz-Signature={MASK}&size=3"),
        ("+store={key:abc,secret:'d e',size:3}", f"+store={{key:{MASK},secret:{MASK},size:3}}"),
        ("data.storage.secret=abc", f"data.storage.secret={MASK}"),
        ('{"password": "a b"}', f'{{"password": {MASK}}}'),
        ("Authorization: Bearer abcdefgh123", "Authorization: "),
        ("AKIAABCDEFGHIJKLMNOP", MASK),
        ("hf_abcdefghijklmnopqrstuvwx", MASK),
    ],
)
def test_secrets_in_texts_are_masked(text: str, shown: str) -> None:
    masked = Masker().mask_text(text)
    assert masked.startswith(shown)
    assert "abc" not in masked


@pytest.mark.parametrize("name", ["summary.json", "machine.json", "splits.csv", "oom-1.txt"])
def test_a_pipe_in_the_place_of_a_file_is_noted(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    notes = read_run(tmp_path).notes
    assert any(name in note and "a named pipe" in note for note in notes)
