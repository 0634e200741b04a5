"""Checkpoints and runs at an address, in a store within this process."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lit_data.app.checkpoints import find_checkpoint, find_start
from lit_data.app.cli import main
from lit_data.core.addresses import parse_store
from lit_data.core.errors import ConfigError, DataError
from tests.app.reports.folders import make_run
from tests.outputs import QUICK, STRIPES

Install = Callable[..., None]
RUNS = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def _work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def store() -> Iterator[Any]:
    """The file system of memory://, empty at first."""
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]
    yield file_system
    file_system.store.clear()


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("https://host/run", "https:// does not guarantee; mount it and name the folder"),
        ("sftp://host/run", "ckpt=sftp://host/run: results need an object store"),
        ("file:///data/run", "ckpt=file:///data/run: give a local folder as a plain path"),
        ("s3://bucket/../x", "ckpt=s3://bucket/../x: write it without '..'"),
    ],
)
def test_other_addresses_are_no_store(address: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_store(address, "ckpt")


def _train(path: Path, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, "loops": {}, "optimizer_states": [], "step": step}, path)


def _put(store: Any, path: Path, key: str, day: int) -> None:
    """Put a file into the store as if at that day."""
    store.put_file(str(path), key)
    file = store.store[key]
    file.created = file.modified = file.created.replace(year=2026, month=1, day=day)


def test_the_newest_checkpoint_at_an_address_is_gone_on_from(store: Any, tmp_path: Path) -> None:
    cache, runs = tmp_path / "cache", tmp_path / "runs"
    run, name = f"{RUNS}/mine", "/bucket/runs/mine/checkpoints"
    for step, file in enumerate(["interrupted.ckpt", "last.ckpt", "x.ckpt"]):
        _train(tmp_path / "a.ckpt", step)
        _put(store, tmp_path / "a.ckpt", f"{name}/{file}", 1 + step)
    found = find_start(None, None, run, runs, tmp_path, cache)
    assert found is not None
    assert found.is_relative_to(cache / "remote")
    assert torch.load(found)["step"] == 1
    named = find_checkpoint(f"{run}/checkpoints/x.ckpt", None, runs, cache)
    assert torch.load(named)["step"] == 2
    # What takes its place at the address is read anew.
    _train(tmp_path / "a.ckpt", 3)
    _put(store, tmp_path / "a.ckpt", f"{name}/x.ckpt", 4)
    again = find_checkpoint(f"{run}/checkpoints/x.ckpt", None, runs, cache)
    assert (again, torch.load(again)["step"]) == (named, 3)
    with pytest.raises(DataError, match=r"no best.ckpt below memory://bucket/runs/mine: run fit"):
        find_checkpoint(None, run, runs, cache)
    with pytest.raises(DataError, match=r"no such folder, or it is empty; check resume and"):
        find_start(None, None, f"{RUNS}/third", runs, tmp_path, cache)


def test_keys_of_strangers_lead_nowhere(store: Any, tmp_path: Path) -> None:
    for name in ("../../../../evil", "/", "a/../.."):
        key = f"/bucket/runs/mine/{name}/checkpoints/last.ckpt"
        store.store[key] = fsspec.implementations.memory.MemoryFile(store, key, b"evil")
    with pytest.raises(DataError, match=r"no last\.ckpt or interrupted\.ckpt or step\.ckpt below"):
        find_start(None, None, f"{RUNS}/mine", tmp_path, tmp_path, tmp_path / "cache")
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_checkpoint_that_is_cut_short_is_refused_in_one_line(
    store: Any, tmp_path: Path, capsys: Any
) -> None:
    _train(tmp_path / "a.ckpt", 1)
    content = (tmp_path / "a.ckpt").read_bytes()
    store.pipe_file("/bucket/runs/a/checkpoints/last.ckpt", content[: len(content) // 2])
    assert main(["fit", "+experiment=stripe", f"resume={RUNS}/a"]) == 4
    err = capsys.readouterr().err
    assert "last.ckpt is not a readable checkpoint" in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow  # trains
@pytest.mark.usefixtures("small_runs_are_fast", "without_pictures")
def test_lightning_writes_checkpoints_to_an_address_and_a_run_goes_on_from_there(
    store: Any, tmp_path: Path, capsys: Any
) -> None:
    folder = f"{RUNS}/mine/checkpoints"
    words = [*QUICK, *STRIPES, "+experiment=stripe", "model.net.width=4", "report=false"]
    words += [f"callbacks.{name}.dirpath={folder}" for name in ("checkpoint", "last")]
    assert main(["fit", *words]) == 0
    names = {key.rpartition("/")[2] for key in store.find("/bucket/runs/mine")}
    assert names == {"best.ckpt", "last.ckpt"}
    capsys.readouterr()
    more = ["trainer.max_epochs=2", f"resume={RUNS}/mine"]
    assert main(["fit", *words, *more]) == 0
    summary = json.loads(Path(capsys.readouterr().out.splitlines()[-1]).read_text())
    assert "test/average_precision" in summary
    best = f"ckpt={folder}/best.ckpt"
    assert main(["validate", *QUICK, *STRIPES, "+experiment=stripe", best]) == 0


def test_a_report_of_runs_at_an_address_is_put_there(
    store: Any, tmp_path: Path, capsys: Any
) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / "runs/stripe" / name)
    store.put(str(tmp_path / "runs/stripe"), "/bucket/runs/fit/stripe", recursive=True)
    store.pipe_file("/bucket/runs/fit/stripe/a/checkpoints/best.ckpt", b"not read")
    address = f"{RUNS}/fit/stripe"
    assert main(["report", address]) == 0
    assert capsys.readouterr().out == f"{address}/report.html\n"
    page = store.cat("/bucket/runs/fit/stripe/report.html").decode()
    assert page.count('<th scope="row">') == 2
    assert main(["report", f"{address}/a"]) == 0
    assert capsys.readouterr().out == f"{address}/a/report.html\n"
    page = store.cat("/bucket/runs/fit/stripe/a/report.html").decode()
    assert page.count("data:image/webp") == 2
    assert main(["report", f"{address}/a", "runs/stripe/b"]) == 2
    assert f"{address}/a is one of several runs: give --output FILE" in capsys.readouterr().err
    words = ["report", f"{address}/a", "runs/stripe/b", "--output", f"{RUNS}/two.html"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{RUNS}/two.html\n"
    assert store.exists("/bucket/runs/two.html")
    assert main(["report", f"{RUNS}/none"]) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"lit_data: {RUNS}/none: no such folder, or it is empty; check RUN ")
    assert not (tmp_path / "cache").exists()


def test_a_run_at_an_address_is_started_again(
    install: Install, store: Any, tmp_path: Path, capsys: Any
) -> None:
    install(lambda cfg: {})
    assert main(["show", "+experiment=stripe", "seed=3"]) == 0
    (run,) = (tmp_path / "runs/show/stripe").iterdir()
    store.put(str(run), "/bucket/runs/mine", recursive=True)
    capsys.readouterr()
    assert main(["rerun", f"{RUNS}/mine", "seed=4", "--print"]) == 0
    line = "lit-data show +experiment=stripe seed=4\n"
    assert capsys.readouterr().out.endswith(line)
    # Somebody's run does not choose where results go.
    assert main(["show", "+experiment=stripe", f"paths.runs={tmp_path}/there"]) == 0
    (other,) = (tmp_path / "there/show/stripe").iterdir()
    store.put(str(other), "/bucket/runs/other", recursive=True)
    capsys.readouterr()
    assert main(["rerun", f"{RUNS}/other", "--print"]) == 0
    assert "paths.runs" not in capsys.readouterr().out


def test_an_address_is_not_taken_from_another_key(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run=memory://bucket/r and ckpt=a.ckpt: give one of them"
    ):
        find_checkpoint("a.ckpt", "memory://bucket/r", tmp_path, tmp_path)
