"""The browser of the tests: a machine that cannot start it skips a test, a page that ends it fails one."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import browser
from tests.helpers.browser import Browser, BrowserGone

# Answers so many commands of each start as the file of their numbers says, then dies.
FAKE = """#!{python}
import json, os, sys
from pathlib import Path

numbers = Path("{numbers}")
first, *others = numbers.read_text().split()
numbers.write_text(" ".join(others))
print("start with", first, file=sys.stderr, flush=True)
with os.fdopen(3, "rb") as commands, os.fdopen(4, "wb") as answers:
    for _ in range(int(first)):
        text = b""
        while not text.endswith(b"\\0"):
            text += commands.read(1)
        answer = {{"id": json.loads(text[:-1])["id"], "result": {{"targetId": "a", "sessionId": "b"}}}}
        answers.write(json.dumps(answer).encode() + b"\\0")
        answers.flush()
"""
COMMANDS_OF_A_START = 6


def _fake(folder: Path, monkeypatch: pytest.MonkeyPatch, *answers: int) -> Path:
    numbers, program = folder / "numbers", folder / "chromium"
    numbers.write_text(" ".join(map(str, answers)))
    program.write_text(FAKE.format(python=sys.executable, numbers=numbers))
    program.chmod(0o755)
    monkeypatch.setattr(browser, "CHROMIUM", str(program))
    monkeypatch.setattr(browser, "_PAUSE_S", 0.0)
    return numbers


def test_a_browser_that_never_starts_skips_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = _fake(tmp_path, monkeypatch, 0, 1, 5)
    with pytest.raises(pytest.skip.Exception, match="in 3 attempts: start with 5"):
        Browser(tmp_path / "profile").__enter__()
    assert numbers.read_text() == ""


def test_numbers_of_pipes_that_are_taken_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake(tmp_path, monkeypatch, *[COMMANDS_OF_A_START] * 30)
    with ExitStack() as opened:
        for number in range(30):  # the pipes get higher numbers each time
            opened.enter_context((tmp_path / f"{number}.txt").open("w"))
            try:
                opened.enter_context(Browser(tmp_path / f"profile_{number}"))
            except pytest.skip.Exception as skipped:
                pytest.fail(str(skipped))


def test_a_death_after_the_start_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake(tmp_path, monkeypatch, 0, COMMANDS_OF_A_START)
    with (
        Browser(tmp_path / "profile") as started,
        pytest.raises(BrowserGone, match=f"start with {COMMANDS_OF_A_START}"),
    ):
        started.open(tmp_path / "page.html")
