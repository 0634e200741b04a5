"""Runs on a bucket of a server on loopback that speaks S3, and processes that are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.families import ROOT, run_family
from tests.io.remote.proxy import FaultyProxy
from tests.io.remote.servers import KEYS_PER_PAGE, s3_server
from tests.outputs import NO_TIMELINES

SECRET = "hunter2SECRET/abc"
BUCKET = "bucket"
RUNS = f"s3://{BUCKET}/runs"
TOY = [
    *("data.samples.count=4", "data.patch_px=64", "data.loader.num_workers=0", "trainer=cpu"),
    *("model.net.width=4", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=1"),
    *NO_TIMELINES,
    "logger=csv",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with s3_server(tmp_path_factory.mktemp("s3"), longest_s=3000) as running:
        yield running


@pytest.fixture
def client(server: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """The server's client, with an empty bucket."""
    server.client.create_bucket(Bucket=BUCKET)
    yield server
    keys = [{"Key": key} for key in _list(server)]
    for first in range(0, len(keys), 1000):
        server.client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys[first : first + 1000]})
    server.client.delete_bucket(Bucket=BUCKET)


def _list(server: SimpleNamespace) -> dict[str, int]:
    pages = server.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}


def _read(server: SimpleNamespace, key: str) -> bytes:
    return server.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()


def _machine(folder: Path, url: str) -> dict[str, str]:
    """The environment of a machine of its own."""
    folder.mkdir(exist_ok=True)
    return {
        "LIT_DATA_CACHE": str(folder / "cache"),
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "AWS_DEFAULT_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }


def _fit(folder: Path, url: str, *words: str, command: str = "fit") -> tuple[int, str]:
    line = [sys.executable, "-m", "lit_data", command, *words]
    environment = _machine(folder, url)
    code, output = run_family(line, limit_s=240, cwd=folder, **environment)
    assert SECRET not in output
    assert "AKIA" not in output
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert SECRET.encode() not in written
    return code, output


def _summary(server: SimpleNamespace, output: str) -> dict[str, object]:
    address = output.strip().splitlines()[-1]
    assert address.startswith(f"{RUNS}/")
    return json.loads(_read(server, address.removeprefix(f"s3://{BUCKET}/")))


def test_lost_requests_only_slow_a_run_and_all_commands_read_it(
    client: SimpleNamespace, tmp_path: Path
) -> None:
    words = ["+experiment=stripe", *TOY, "trainer.max_epochs=2", "trainer.deterministic=true"]
    code, output = _fit(tmp_path / "local", client.url, *words)
    assert code == 0, output
    local = json.loads(Path(tmp_path / "local" / output.strip().splitlines()[-1]).read_text())
    with FaultyProxy(client.url, [503, *[None] * 9]).running() as proxy:
        code, output = _fit(tmp_path / "one", proxy.url, *words, f"paths.runs={RUNS}")
        assert code == 0, output
        summary = _summary(client, output)
        for name in ("samples_sha256", "test/average_precision", "val/average_precision"):
            assert summary[name] == local[name]
        (folder,) = (tmp_path / "one/cache/runs").glob("*/fit/stripe/*")
        prefix = f"runs/fit/stripe/{folder.name}"
        copied = {key.removeprefix(f"{prefix}/") for key in _list(client)}
        paths = [path for path in folder.rglob("*") if path.is_file()]
        assert copied == {path.relative_to(folder).as_posix() for path in paths}
        for path in paths:
            content = _read(client, f"{prefix}/{path.relative_to(folder)}")
            assert path.read_bytes().startswith(content)  # tries of its own copy are logged
            assert path.suffix == ".log" or path.read_bytes() == content
        # Another machine.
        two = tmp_path / "two"
        overrides = ["+experiment=stripe", *TOY, f"paths.runs={RUNS}"]
        code, output = _fit(two, proxy.url, *overrides, "trainer.max_epochs=3", "resume=latest")
        assert code == 0, output
        assert f"checkpoint: s3://{BUCKET}/{prefix}/checkpoints/last.ckpt" in output
        run = f"run=s3://{BUCKET}/{prefix}"
        code, output = _fit(two, proxy.url, *overrides, run, command="predict")
        assert code == 0, output
        _predict_at_an_address(client, proxy.url, tmp_path, [*overrides, run])
        code, output = _fit(two, proxy.url, f"{RUNS}/fit/stripe", command="report")
        assert code == 0, output
        assert output.splitlines()[-1] == f"{RUNS}/fit/stripe/report.html"
        assert len(_read(client, "runs/fit/stripe/report.html")) > 50_000
        assert proxy.answered[503] > 10


def _predict_at_an_address(
    client: SimpleNamespace, url: str, folder: Path, words: list[str]
) -> None:
    """Predict a part, and go on with all in another run folder, as one process does."""
    place = "predict.folder=s3://bucket/results"
    for options in (
        [f"predict.folder={folder}/alone"],
        [place, "predict.part=0/2"],
        [place, "predict.resume=true"],
    ):
        code, output = _fit(folder / "two", url, *words, *options, command="predict")
        assert code == 0, output
    half = len(list((folder / "alone/maps").rglob("*.png"))) // 2
    assert _summary(client, output)["predict/images_kept"] == half
    keys = [key for key in _list(client) if key.startswith("results/") and ".jsonl" not in key]
    paths = [path for path in (folder / "alone").rglob("*") if path.is_file()]
    local = {path.relative_to(folder / "alone").as_posix(): path.read_bytes() for path in paths}
    del local["images.jsonl"]
    assert {key.removeprefix("results/"): _read(client, key) for key in keys} == local


@pytest.mark.usefixtures("without_pictures")
def test_what_a_killed_machine_copied_is_enough_to_go_on_elsewhere(
    client: SimpleNamespace, tmp_path: Path
) -> None:
    draws = random.Random(7)
    words = ["+experiment=stripe", *TOY, f"paths.runs={RUNS}", "trainer.max_epochs=400"]
    words += ["callbacks=safe", "callbacks.often.every_n_train_steps=3"]
    steps = [0]
    for number in range(3):
        folder = tmp_path / f"machine{number}"
        before = _list(client)
        line = [sys.executable, "-m", "lit_data", "fit", *words]
        line += ["resume=latest"] if number else []
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | _machine(folder, client.url),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until_s = time.monotonic() + 120
        while time.monotonic() < until_s:
            new = [key for key in _list(client) if key not in before and key.endswith(".ckpt")]
            if new:
                break
            time.sleep(0.05)
        time.sleep(draws.uniform(0, 3))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        keys = [key for key in _list(client) if key.endswith(".ckpt")]
        newest = []
        for key in keys:
            (tmp_path / "a.ckpt").write_bytes(_read(client, key))
            content = torch.load(tmp_path / "a.ckpt", weights_only=True)  # whole, each of them
            newest.append(content["global_step"])
        assert max(newest) > steps[-1]
        steps.append(max(newest))
    words += [f"trainer.max_steps={steps[-1] + 3}", "resume=latest"]
    code, output = _fit(tmp_path / "last", client.url, *words)
    assert code == 0, output
    _summary(client, output)


@pytest.mark.parametrize(
    ("runs", "faults", "variables", "text"),
    [
        ("s3://nobody/runs", [None], {}, "not found (404); check paths.runs"),
        (RUNS, [403], {}, "access denied (403); check paths.runs"),
        (RUNS, [None], {"AWS_ACCESS_KEY_ID": ""}, "no credentials were found; check paths.runs"),
        (RUNS, ["cut"], {}, "6 times; check paths.runs"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_trained(
    runs: str,
    faults: list[int | str | None],
    variables: dict[str, str],
    text: str,
    client: SimpleNamespace,
    tmp_path: Path,
) -> None:
    with FaultyProxy(client.url, faults).running() as proxy:
        environment = _machine(tmp_path / "one", proxy.url) | variables
        if variables:
            del environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
        line = [sys.executable, "-m", "lit_data", "fit", "+experiment=stripe", *TOY]
        code, output = run_family(
            [*line, f"paths.runs={runs}"], limit_s=120, cwd=tmp_path, **environment
        )
    assert code == 4, output
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"lit_data: cannot write {runs}/fit/stripe/")
    assert text in last
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_server_that_goes_away_is_named_at_the_end(
    client: SimpleNamespace, tmp_path: Path
) -> None:
    with FaultyProxy(client.url, [None]).running() as proxy:
        folder = tmp_path / "one"
        words = ["+experiment=stripe", *TOY, f"paths.runs={RUNS}", "trainer.max_epochs=1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "lit_data", "fit", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | _machine(folder, proxy.url),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # The last of the files that are copied before anything is trained.
        while not any(key.endswith("/fit.log") for key in _list(client)):
            time.sleep(0.05)
        proxy.faults = [403]
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 4, output
    (run,) = (folder / "cache/runs").glob("*/fit/stripe/*")
    assert (run / "summary.json").is_file()
    last = output.strip().splitlines()[-1]
    assert f"access denied (403); the run is whole in {run}: copy that folder to {RUNS}/" in last
    assert SECRET not in output


def test_a_large_listing_and_keys_of_strangers(client: SimpleNamespace, tmp_path: Path) -> None:
    for number in range(3 * KEYS_PER_PAGE):
        key = f"runs/fit/stripe/{number}/../../a/{number}.ckpt"
        client.client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    evil = "runs/fit/stripe/../../../../tmp/checkpoints/last.ckpt"
    client.client.put_object(Bucket=BUCKET, Key=evil, Body=b"evil")
    with FaultyProxy(client.url, [503, *[None] * 4]).running() as proxy:
        words = ["+experiment=stripe", *TOY, f"paths.runs={RUNS}", "resume=latest"]
        code, output = _fit(tmp_path / "one", proxy.url, *words)
    assert code == 3, output
    last = output.strip().splitlines()[-1]
    assert last.startswith("lit_data: no last.ckpt or interrupted.ckpt or step.ckpt below s3://")
    assert not list(tmp_path.rglob("last.ckpt"))


def test_an_upload_that_is_killed_in_its_middle_leaves_no_half_checkpoint(
    client: SimpleNamespace, tmp_path: Path
) -> None:
    key = "runs/fit/stripe/a/checkpoints/last.ckpt"
    client.client.put_object(Bucket=BUCKET, Key=key, Body=b"as it was")
    path = tmp_path / "large.ckpt"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)
    code = (
        "from pathlib import Path\nfrom lit_data.commands.remote_runs import put_file\n"
        f"put_file(Path({str(path)!r}), 's3://{BUCKET}/{key}', 'ckpt')"
    )
    with FaultyProxy(client.url, [None]).running() as proxy:
        proxy.delay_s = 0.2
        for parts in (2, 5, 9):
            proxy.answered.clear()
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | _machine(tmp_path / "one", proxy.url),
            )
            until_s = time.monotonic() + 60
            while proxy.answered[None] < parts and time.monotonic() < until_s:
                time.sleep(0.01)
            process.kill()
            process.wait()
            assert proxy.answered[None] >= parts
            assert _list(client) == {key: 9}
            assert _read(client, key) == b"as it was"
