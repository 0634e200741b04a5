"""Runs at an address, in a store within this process."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lit_data.cli import main
from lit_data.commands import upload
from lit_data.commands.checkpoints import find_checkpoint, find_start
from lit_data.commands.run_choice import choose_unfinished
from lit_data.commands.upload import RunUpload
from lit_data.errors import ConfigError, DataError
from lit_data.io.remote.connection import ListedConnection
from lit_data.io.remote.options import parse_store
from tests.commands.reports.folders import make_run

Install = Callable[..., None]
RUNS = "memory://bucket/runs"
NAMES = ("last.ckpt", "interrupted.ckpt", "step.ckpt")


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


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are copied to a server, in order."""
    names = []
    put = ListedConnection.put

    async def note(self: ListedConnection, path: Path, name: str) -> None:
        await put(self, path, name)
        names.append(name)

    monkeypatch.setattr(ListedConnection, "put", note)
    return names


def _write(folder: Path, names: list[str]) -> None:
    for seconds, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))
        os.utime(path, (1000 + seconds, 1000 + seconds))


def _command(cfg: Any) -> dict[str, Any]:
    _write(Path(cfg.paths.run), ["checkpoints/last.ckpt", "checkpoints/best.ckpt", "a/b.png"])
    return {"test/dice": 0.5}


def test_a_run_is_copied_to_its_address_with_its_summary_last(
    install: Install, store: Any, puts: list[str], tmp_path: Path, capsys: Any
) -> None:
    install(_command)
    assert main(["show", "+experiment=stripe", f"paths.runs={RUNS}/"]) == 0
    address = capsys.readouterr().out.splitlines()[-1]
    assert address.startswith(f"{RUNS}/show/stripe/2")
    assert address.endswith("/summary.json")
    run = address.removesuffix("/summary.json").removeprefix("memory:/")
    (folder,) = (tmp_path / "cache/runs").glob("*/show/stripe/*")
    assert folder.name == run.rpartition("/")[2]
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert {f"{run}/{path.relative_to(folder)}" for path in paths} == set(store.find(run))
    for path in paths:
        assert store.cat(f"{run}/{path.relative_to(folder)}") == path.read_bytes()
    at_begin = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "show.log"}
    assert set(puts[:4]) == at_begin
    assert puts[4:6] == ["checkpoints/last.ckpt", "checkpoints/best.ckpt"]
    assert puts[-1] == "summary.json"
    assert json.loads(store.cat(f"{run}/summary.json"))["test/dice"] == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    overrides = store.cat(f"{run}/.hydra/overrides.yaml").decode()
    assert overrides == f"- +experiment=stripe\n- paths.runs={RUNS}/\n"


def test_two_runs_of_one_second_have_folders_of_their_own(install: Install, store: Any) -> None:
    install(_command)
    now = "hydra.run.dir=${paths.runs}/${command}/${name}/${now:%Y}"
    assert main(["show", "+experiment=stripe", f"paths.runs={RUNS}", now]) == 0
    assert main(["show", "+experiment=stripe", f"paths.runs={RUNS}", now]) == 0
    assert len(store.ls("/bucket/runs/show/stripe", detail=False)) == 2


def test_a_failed_run_is_copied_too(install: Install, store: Any) -> None:
    def fail(cfg: Any) -> dict[str, Any]:
        _command(cfg)
        raise DataError("bad.png: is bad")

    install(fail)
    assert main(["show", "+experiment=stripe", f"paths.runs={RUNS}"]) == 3
    names = {path.rpartition("/")[2] for path in store.find("/bucket/runs")}
    assert {"failure.json", "last.ckpt"} <= names
    assert "summary.json" not in names


def test_where_nothing_can_be_written_nothing_is_done(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    async def refuse(self: ListedConnection, path: Path, name: str) -> None:
        raise DataError(f"{self.address.name(name)}: access denied (403); check data.root")

    monkeypatch.setattr(ListedConnection, "put", refuse)
    install(lambda cfg: pytest.fail("it was run"))
    assert main(["show", "+experiment=stripe", f"paths.runs={RUNS}"]) == 4
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert err.startswith(f"lit_data: cannot write {RUNS}/show/stripe/")
    assert "access denied (403); check paths.runs and the credentials of this machine" in err
    assert "data.root" not in err


def test_a_server_that_goes_away_does_not_end_the_run(
    install: Install, monkeypatch: pytest.MonkeyPatch, store: Any, tmp_path: Path, capsys: Any
) -> None:
    put = ListedConnection.put
    away = threading.Event()

    async def maybe(self: ListedConnection, path: Path, name: str) -> None:
        if away.is_set():
            raise DataError(f"{self.address.name(name)}: no answer in time, 6 times; try again")
        await put(self, path, name)

    def run(cfg: Any) -> dict[str, Any]:
        away.set()
        metrics = _command(cfg)
        until_s = time.monotonic() + 5
        while "not copied" not in capsys.readouterr().out and time.monotonic() < until_s:
            time.sleep(0.01)
        return metrics

    monkeypatch.setattr(ListedConnection, "put", maybe)
    monkeypatch.setattr(upload, "LOOK_EVERY_S", 0.01)
    install(run)
    assert main(["show", "+experiment=stripe", f"paths.runs={RUNS}"]) == 4
    err = capsys.readouterr().err
    (folder,) = (tmp_path / "cache/runs").glob("*/show/stripe/*")
    assert (folder / "summary.json").is_file()
    assert "no answer in time, 6 times; the run is whole in" in err
    assert f"{folder}: copy that folder to {RUNS}/show/stripe/{folder.name}\n" in err
    assert len(err.splitlines()) == 1
    assert not store.glob("/bucket/runs/**/summary.json")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("paths.runs=sftp://host/runs", "paths.runs=sftp://host/runs: results lie in an object st"),
        ("paths.runs=s3://me:pw@bucket/x", "'paths.runs': the address holds a user name"),
        (f"paths.runs={RUNS} hydra.run.dir=mine", "lies outside of paths.runs=memory://bucket/ru"),
        (f"paths.runs={RUNS} hydra.run.dir=s3://b/x", "/s3:/b/x is an address"),
        (f"paths.runs={RUNS} -m seed=1,2", "is an address, and a sweep reads what its jobs wrote"),
        (f"paths.runs={RUNS} logger=mlflow", "is a database, which cannot lie at an address"),
        ("ckpt=s3://bucket", "ckpt=s3://bucket names no file: write s3://BUCKET/FOLDER/FILE"),
    ],
)
def test_what_cannot_lie_at_an_address_is_one_line(
    words: str, text: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["fit", "+experiment=stripe", *words.split()]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert len(err.splitlines()) == 1
    assert "pw@" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("https://host/run", "https:// does not promise; mount it and name the folder"),
        ("sftp://host/run", "ckpt=sftp://host/run: results lie in an object store"),
        ("file:///data/run", "ckpt=file:///data/run: give a local folder as a plain path"),
        ("s3://bucket/../x", "ckpt=s3://bucket/../x: write it without '..'"),
    ],
)
def test_other_addresses_are_no_store(address: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_store(address, "ckpt")


def test_a_file_of_a_configuration_does_not_choose_an_address(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "conf/experiment").mkdir(parents=True)
    text = f"# @package _global_\npaths:\n  runs: {RUNS}\n"
    (tmp_path / "conf/experiment/evil.yaml").write_text(text)
    assert main(["show", "experiment=evil", "--config-dir", "conf"]) == 2
    assert "only the command line may choose where results go" in capsys.readouterr().err


# --- what is copied


def test_files_are_copied_again_as_they_change_and_links_not_followed(
    store: Any, puts: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    _write(folder, ["checkpoints/last.ckpt", "fit.log", ".lit_data-0123456789abcdef.part"])
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "checkpoints/best.ckpt").symlink_to("last.ckpt")
    (folder / "folder").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo")
    run = RunUpload(folder, f"{RUNS}/run")
    assert run.copy_changes() == ""
    assert sorted(puts) == ["checkpoints/best.ckpt", "checkpoints/last.ckpt", "fit.log"]
    puts.clear()
    assert run.copy_changes() == ""
    assert puts == []
    (folder / "checkpoints/last.ckpt").write_text("new")
    (folder / "fit.log").write_text("more")
    assert run.copy_changes() == ""
    assert sorted(puts) == ["checkpoints/best.ckpt", "checkpoints/last.ckpt"]  # a log waits
    run.start()
    run.finish()
    assert puts[2:] == ["fit.log"]
    assert store.cat("/bucket/runs/run/fit.log") == b"more"
    assert store.cat("/bucket/runs/run/checkpoints/best.ckpt") == b"new"


def test_a_journal_at_an_address_names_only_what_is_there(
    store: Any, puts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    _write(folder, ["maps/a.png", "images.csv"])
    (folder / "images.jsonl").write_bytes(b"a\n")
    put = ListedConnection.put

    async def go_on(self: ListedConnection, path: Path, name: str) -> None:
        """Predict the next image while files are copied."""
        if name == "maps/a.png":
            _write(folder, ["maps/b.png"])
            with (folder / "images.jsonl").open("ab") as journal:
                journal.write(b"b\n")
        await put(self, path, name)

    monkeypatch.setattr(ListedConnection, "put", go_on)
    run = RunUpload(folder, f"{RUNS}/run")
    assert run.copy_changes() == ""
    assert puts[0] == "maps/a.png"
    assert store.cat("/bucket/runs/run/images.jsonl") == b"a\n"
    assert run.copy_changes(ends=True) == ""
    assert store.cat("/bucket/runs/run/images.jsonl") == b"a\nb\n"
    assert sorted(puts[3:]) == ["images.jsonl", "maps/b.png"]
    assert puts[3] == "maps/b.png"


def test_a_checkpoint_in_pieces_is_not_copied_and_the_end_says_so(
    store: Any, tmp_path: Path, caplog: Any
) -> None:
    folder = tmp_path / "run"
    _write(folder, ["checkpoints/last.ckpt/.metadata", "checkpoints/last.ckpt/__0_0.distcp"])
    _write(folder, ["summary.json", os.fsdecode(b"\xff.png")])
    run = RunUpload(folder, f"{RUNS}/run")
    run.begin()
    message = r"run/.{4}\.png: the name is no UTF-8, as keys are \(2 such files\); the run is whole"
    run.finish()
    assert re.search(message, run.fault)
    assert store.find("/bucket/runs") == ["/bucket/runs/run/summary.json"]
    assert "checkpoints/last.ckpt is a checkpoint in pieces" in caplog.text


# --- what is read


def _train(path: Path, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, "loops": {}, "optimizer_states": [], "step": step}, path)


def test_the_newest_checkpoint_is_gone_on_from(store: Any, tmp_path: Path) -> None:
    runs, cache = f"{RUNS}/fit/stripe", tmp_path / "cache"
    for step, name in enumerate(
        ["first/checkpoints/last.ckpt", "second/checkpoints/last.ckpt", "second/checkpoints/x.ckpt"]
    ):
        _train(tmp_path / "a.ckpt", step)
        store.put_file(str(tmp_path / "a.ckpt"), f"/bucket/runs/fit/stripe/{name}")
        second = store.store[f"/bucket/runs/fit/stripe/{name}"]
        second.created = second.modified = second.created.replace(year=2026, day=1 + step)
    for run in ("first", "second"):
        (tmp_path / "config.yaml").write_text("command: fit")
        store.put_file(
            str(tmp_path / "config.yaml"), f"/bucket/runs/fit/stripe/{run}/.hydra/config.yaml"
        )
    found = find_start(None, None, "latest", runs, tmp_path, cache)
    assert found is not None
    assert found.is_relative_to(cache / "remote")
    assert torch.load(found)["step"] == 1
    assert torch.load(find_checkpoint("last", None, runs, cache))["step"] == 1
    first = find_start(None, None, f"{runs}/first", runs, tmp_path, cache)
    assert first is not None
    assert torch.load(first)["step"] == 0
    named = find_checkpoint(f"{runs}/second/checkpoints/x.ckpt", None, "runs", cache)
    assert torch.load(named)["step"] == 2
    # What takes its place at the address is read anew.
    _train(tmp_path / "a.ckpt", 3)
    store.put_file(str(tmp_path / "a.ckpt"), "/bucket/runs/fit/stripe/second/checkpoints/x.ckpt")
    again = find_checkpoint(f"{runs}/second/checkpoints/x.ckpt", None, "runs", cache)
    assert (again, torch.load(again)["step"]) == (named, 3)
    with pytest.raises(DataError, match=r"no best.ckpt below memory://bucket/runs/fit/stripe: run"):
        find_checkpoint(None, None, runs, cache)
    with pytest.raises(
        DataError, match=r"no such folder, or it holds no file; check resume and th"
    ):
        find_start(None, None, f"{runs}/third", runs, tmp_path, cache)


def test_keys_of_strangers_lead_nowhere(store: Any, tmp_path: Path) -> None:
    root = "/bucket/runs/fit/stripe"
    for name in ("../../../../evil", "/", "a/../..", ".git"):
        store.store[f"{root}/{name}/checkpoints/last.ckpt"] = (
            fsspec.implementations.memory.MemoryFile(
                store, f"{root}/{name}/checkpoints/last.ckpt", b"evil"
            )
        )
    folder = "memory://bucket/runs/fit/stripe"
    assert choose_unfinished(folder, NAMES, tmp_path / "cache", "resume") is None
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_checkpoint_that_is_cut_short_is_refused_in_one_line(
    store: Any, tmp_path: Path, capsys: Any
) -> None:
    _train(tmp_path / "a.ckpt", 1)
    content = (tmp_path / "a.ckpt").read_bytes()
    store.pipe_file("/bucket/runs/fit/stripe/a/checkpoints/last.ckpt", content[: len(content) // 2])
    store.pipe_file("/bucket/runs/fit/stripe/a/.hydra/config.yaml", b"command: fit")
    assert main(["fit", "+experiment=stripe", f"paths.runs={RUNS}", "resume=latest"]) == 4
    err = capsys.readouterr().err
    assert "last.ckpt is no checkpoint that can be read" in err
    assert len(err.splitlines()) == 1


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
    assert page.count("data:image/webp") == 4  # two pictures of each run
    assert main(["report", f"{address}/a", "runs/stripe/b"]) == 2
    assert f"{address}/a is one of several runs: give --output FILE" in capsys.readouterr().err
    words = ["report", f"{address}/a", "runs/stripe/b", "--output", f"{RUNS}/two.html"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{RUNS}/two.html\n"
    assert store.exists("/bucket/runs/two.html")
    assert main(["report", f"{RUNS}/none"]) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"lit_data: {RUNS}/none: no such folder, or it holds no file; check RUN ")
    assert not (tmp_path / "cache").exists()


def test_a_run_at_an_address_is_started_again(install: Install, store: Any, capsys: Any) -> None:
    install(_command)
    assert main(["show", "+experiment=stripe", f"paths.runs={RUNS}", "seed=3"]) == 0
    run = capsys.readouterr().out.splitlines()[-1].removesuffix("/summary.json")
    assert main(["rerun", run, "seed=4", "--print"]) == 0
    line = f"python -m lit_data show +experiment=stripe paths.runs={RUNS} seed=4\n"
    assert capsys.readouterr().out.endswith(line)
    assert main(["rerun", run]) == 0
    assert len(store.ls("/bucket/runs/show/stripe", detail=False)) == 2
    # Somebody's run does not choose where results go.
    store.copy(f"{run}/", "memory://other/runs/show/stripe/x/", recursive=True)
    capsys.readouterr()
    (other,) = store.ls("/other/runs/show/stripe", detail=False)
    assert main(["rerun", f"memory:/{other}"]) == 2
    assert "only the command line may choose where results go" in capsys.readouterr().err


def test_an_address_is_not_taken_from_another_key(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run=memory://bucket/r and ckpt=a.ckpt: give one of them"
    ):
        find_checkpoint("a.ckpt", "memory://bucket/r", "runs", tmp_path)


def test_checkpoints_of_an_earlier_start_do_not_replace_those_at_the_address(
    store: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    _write(folder, ["checkpoints/last.ckpt", "fit.log"])
    store.pipe_file("/bucket/runs/run/checkpoints/last.ckpt", b"of another machine")
    run = RunUpload(folder, f"{RUNS}/run")
    run.begin()
    assert store.cat("/bucket/runs/run/checkpoints/last.ckpt") == b"of another machine"
    assert store.cat("/bucket/runs/run/fit.log") == b"fit.log"
    (folder / "checkpoints/last.ckpt").write_text("new")
    run.finish()
    assert run.fault == ""
    assert store.cat("/bucket/runs/run/checkpoints/last.ckpt") == b"new"


def test_a_run_goes_on_by_itself_from_what_is_at_its_address(store: Any, tmp_path: Path) -> None:
    runs, cache = f"{RUNS}/fit/stripe", tmp_path / "cache"
    store.pipe_file("/bucket/runs/fit/stripe/mine/fit.log", b"just begun")
    assert find_start(None, None, "auto", runs, f"{runs}/mine", cache) is None
    _train(tmp_path / "a.ckpt", 7)
    name = "/bucket/runs/fit/stripe/mine/checkpoints/interrupted.ckpt"
    store.put_file(str(tmp_path / "a.ckpt"), name)
    start = find_start(None, None, "auto", runs, f"{runs}/mine", cache)
    assert start is not None
    assert torch.load(start)["step"] == 7
