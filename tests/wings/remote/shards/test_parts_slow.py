"""Parts that are killed at random, parts on a bucket that often answers 503, and parts as jobs of a sweep."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lit_data.app.cli import main
from lit_data.core.addresses import RemoteOptions
from lit_data.core.parts import Part
from lit_data.images.writing import write_png
from tests.helpers.families import run_family
from tests.helpers.reading import read_folder
from tests.wings.remote.proxy import FaultyProxy
from tests.wings.remote.shards.test_shards import draw, open_files, open_store

IMAGES = 64
SHARD_BYTES = 2 * 6_000  # two images of 60 x 100 grey pixels; sixteen are a group
PARTS = 3
SECRET = "hunter2SECRET/abc"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos") / "photos"
    for number in range(IMAGES):
        write_png(folder / "images" / f"{number:02}.png", draw(number))
        if number % 8 == 0:
            mask = (draw(number) > 250).astype(np.uint8) * np.uint8(255)
            write_png(folder / "masks" / f"{number:02}.png", mask)
    return folder


def publish(root: Path | str, cache: Path, address: Path | str, **options: Any) -> dict[str, int]:
    remote = options.pop("remote", RemoteOptions(backoff_s=0.01))
    return open_files(root, cache, remote=remote).publish(str(address), SHARD_BYTES, **options)


@pytest.mark.parametrize("encoding", ["decoded", "source"])
def test_killed_parts_go_on(photos: Path, tmp_path: Path, encoding: str) -> None:
    rng, context = random.Random(0), multiprocessing.get_context("fork")
    begin_s = time.monotonic()
    publish(photos, tmp_path / "one", tmp_path / "one.shards", encoding=encoding)
    whole_s = time.monotonic() - begin_s
    address = tmp_path / "set.shards"
    killed, done, rounds = 0, set[int](), 0
    while killed < 20 or len(done) < PARTS:
        rounds += 1
        assert rounds < 100
        number = rng.randrange(PARTS)
        cache = tmp_path / f"cache-{rng.randrange(2)}"  # of two machines
        options = {"part": Part(number, PARTS), "encoding": encoding}
        target, args = publish, (photos, cache, address)
        writers = [context.Process(target=target, args=args, kwargs=options) for _ in range(2)]
        for writer in writers:  # the same part twice at once
            writer.start()
        if killed < 20:
            time.sleep(rng.uniform(0, whole_s / PARTS))
            for writer in writers:
                os.kill(writer.pid or 0, signal.SIGKILL)
        for writer in writers:
            writer.join(60)
            killed += writer.exitcode == -signal.SIGKILL
            if writer.exitcode == 0:
                done.add(number)
        assert not (address / "set.json").exists()
    publish(photos, tmp_path / "last", address, finish=True, encoding=encoding)
    left = list(address.rglob(".build-*"))
    for path in left:  # of a part that was killed after the last that swept
        shutil.rmtree(path)
    assert read_folder(address) == read_folder(tmp_path / "one.shards")
    assert len(open_store(open_files(address, tmp_path / "reader"))) == IMAGES


@pytest.mark.parametrize("encoding", ["decoded", "source"])
def test_a_bucket_that_often_answers_503(
    photos: Path,
    tmp_path: Path,
    server: SimpleNamespace,
    encoding: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = f"line-{encoding}"
    server.client.create_bucket(Bucket=bucket)
    for path in photos.rglob("*.png"):
        key = f"photos/{path.relative_to(photos).as_posix()}"
        server.client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    root = f"s3://{bucket}/photos"
    calm = RemoteOptions(endpoint_url=server.url, region="us-east-1")
    publish(root, tmp_path / "one", tmp_path / "one.shards", remote=calm, encoding=encoding)
    with FaultyProxy(server.url, [503, *[None] * 4]).running() as proxy:
        remote = RemoteOptions(
            endpoint_url=proxy.url, region="us-east-1", backoff_s=0.01, retries=12
        )
        address = f"s3://{bucket}/sets/photos.shards"
        options = {"remote": remote, "encoding": encoding}
        for number in range(PARTS):
            cache = tmp_path / f"cache-{number}"
            publish(root, cache, address, part=Part(number, PARTS), **options)
            assert not list(cache.rglob("*.png"))
        publish(root, tmp_path / "last", address, finish=True, **options)
        assert proxy.answered[503] > 20
        written = {}
        pages = server.client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=bucket, Prefix="sets/photos.shards/"):
            for entry in page["Contents"]:
                body = server.client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
                written[entry["Key"].removeprefix("sets/photos.shards/")] = body
        assert written == read_folder(tmp_path / "one.shards")
        store = open_store(open_files(address, tmp_path / "reader", remote=remote))
        for number in range(IMAGES):
            np.testing.assert_array_equal(store[number][0], draw(number))
    printed = caplog.text + "".join(capfd.readouterr())
    assert SECRET not in printed
    assert SECRET not in "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*.json*") if path.is_file()
    )


def test_parts_are_jobs_of_a_sweep(photos: Path, tmp_path: Path) -> None:
    common = [
        "+experiment=segmentation", f"data.root={photos}", f"paths.runs={tmp_path}/runs",
        f"paths.cache={tmp_path}/cache", "data.patch_px=32", f"prepare.shard_bytes={SHARD_BYTES}",
    ]  # fmt: skip
    assert main(["prepare", *common, f"prepare.shards={tmp_path}/one.shards"]) == 0
    here = [*common, f"prepare.shards={tmp_path}/set.shards"]
    swept = ["prepare.part=range(0,3)", "prepare.of=3", f"hydra.sweep.dir={tmp_path}/sweep"]
    code, output = run_family(
        [sys.executable, "-m", "lit_data", "prepare", "-m", *here, *swept], limit_s=200
    )
    assert code == 0, output
    summaries = [
        json.loads((tmp_path / f"sweep/{number}/summary.json").read_text()) for number in range(3)
    ]
    assert sum(summary["prepare/images"] for summary in summaries) == IMAGES
    assert not (tmp_path / "set.shards/set.json").exists()
    assert main(["prepare", *here, "prepare.finish=true"]) == 0
    assert read_folder(tmp_path / "set.shards") == read_folder(tmp_path / "one.shards")
