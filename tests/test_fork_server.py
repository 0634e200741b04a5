"""Commands that the server of the tests forks are like those with an interpreter of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.families import ROOT, list_children
from tests.helpers.fork_server import FRESH, NAME

LIMIT_S = 100

# In the place of the command `show`: writes what its process is and sees, and may wait.
FACTS = """
import json, multiprocessing.process, os, random, sys, threading, time
import numpy, torch

def run(cfg):
    facts = {
        "words": sys.argv[1:],
        "program": [os.path.basename(sys.argv[0]), sys.modules["__main__"].__spec__.name, sys.warnoptions],
        "folders": [os.getcwd(), multiprocessing.process.ORIGINAL_DIR, *sys.path[:3]],
        "variables": {name: os.environ.get(name) for name in ("PYTHONPATH", "HOME", "NEW")},
        "is_leader": os.getpgid(0) == os.getsid(0) == os.getpid(),
        "umask": oct(os.umask(0o22)),
        "files": os.listdir("/proc/self/fd"),
        "threads": torch.get_num_threads(),
    }
    with open("facts", "a") as file:
        is_forked = b"fork_server" in open("/proc/self/cmdline", "rb").read()
        print(json.dumps([is_forked, facts]), file=file)
    with open("numbers", "a") as file:
        print(random.random(), numpy.random.rand(), torch.initial_seed(), file=file)
    if cfg.seed == 9:
        print("ready", flush=True)
        time.sleep(100)
    return {"test/parent": float(os.getppid())}
"""
SITE = """
import sys, types
module = types.ModuleType("lit_data.app.show")
exec({code!r}, module.__dict__)
sys.modules[module.__name__] = module
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the server asks Linux to adopt processes"),
]


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables of a command `show` that writes down what it is, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SITE.format(code=FACTS))
    paths = os.pathsep.join((str(tmp_path / "site"), str(ROOT)))
    return {**os.environ, "PYTHONPATH": paths, "NEW": "a=ä", "HOME": str(tmp_path)}


def _start(variables: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "lit_data", "show", "+experiment=stripe", *words],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _read_facts() -> list[tuple[bool, dict[str, Any]]]:
    return [json.loads(line) for line in Path("facts").read_text().splitlines()]


def test_a_forked_command_is_and_sees_what_a_new_interpreter_does(
    variables: dict[str, str],
) -> None:
    before = os.umask(0o27)
    outputs = []
    for more in ({}, FRESH, {}):
        process = _start(variables | more, "seed=3", "hydra.run.dir=run")
        outputs.append(process.communicate(timeout=LIMIT_S)[0])
        assert process.returncode == 0, outputs
        assert json.loads(Path("run/summary.json").read_text())["test/parent"] == os.getpid()
    os.umask(before)
    (is_forked, facts), (is_other_forked, facts_of_new), _ = _read_facts()
    assert (is_forked, is_other_forked) == (True, False)
    assert facts == facts_of_new
    assert (facts["variables"]["NEW"], facts["umask"]) == ("a=ä", "0o27")
    assert outputs[0] == outputs[1]
    assert len(set(Path("numbers").read_text().split())) == 9


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_forked_command_and_its_server_end_by_a_signal(
    variables: dict[str, str], number: signal.Signals, code: int
) -> None:
    process = _start(variables, "-m", "seed=9", "sweep.isolate=none", "hydra.sweep.dir=out")
    assert process.stdout is not None
    assert "ready\n" in iter(process.stdout.readline, "")
    [server] = psutil.Process(process.pid).children()
    assert server.name() == NAME
    assert list_children(process.pid) == []
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert psutil.wait_procs([server], timeout=10)[1] == []
