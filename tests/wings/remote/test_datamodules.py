"""Every datamodule reads a root on a server, and what it writes holds no credential."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lit_data.app.cli import main
from lit_data.core.addresses import RemoteOptions
from lit_data.core.errors import ConfigError
from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule, StripeDataModule
from lit_data.datamodules.base import BaseDataModule
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.gan import GANDataModule
from lit_data.wings.volumes import CTDataModule
from lit_data.wings.watermarks import WatermarkDataModule
from tests.wings.remote.servers import s3_server

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "hunter2SECRET/abc",
    "AWS_SESSION_TOKEN": "hunter2TOKENhunter2",
}
LOADER = LoaderOptions(batch_size=2, num_workers=0)

pytestmark = pytest.mark.timeout(240)


def _image(number: int, size_px: int = 64) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (size_px, size_px, 3), dtype=np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


def _mask() -> bytes:
    mask = np.zeros((64, 64), np.uint8)
    mask[10:20, 30:40] = 255
    return cv2.imencode(".png", mask)[1].tobytes()


def _volume(number: int) -> bytes:
    from io import BytesIO

    stream = BytesIO()
    np.save(stream, np.random.default_rng(number).integers(0, 900, (8, 8, 8)).astype(np.int16))
    return stream.getvalue()


IMAGES = {f"part/{number}.png": _image(number) for number in range(6)}
MASKED = (
    IMAGES | {f"marks/{number}.png": _mask() for number in range(6)} | {"raw.zip": b"not wanted"}
)
BOXES = {"classes.txt": b"one\ntwo\n"}
BOXES |= {f"images/{number}.png": _image(number) for number in range(6)}
BOXES |= {f"labels/{number}.txt": f"{number % 2} 0.5 0.5 0.4 0.4\n".encode() for number in range(6)}
POLYGONS = BOXES | {f"labels/{number}.txt": b"0 0.1 0.1 0.5 0.1 0.5 0.5\n" for number in range(6)}
LABELS = IMAGES | {
    "labels.csv": b"image,label\n" + b"".join(b"%d.png,kind%d\n" % (n, n % 2) for n in range(7))
}
LABELS |= {"part/6.png": _image(6)}
VOLUMES = {f"{number}.npy": _volume(number) for number in range(6)}


@pytest.fixture
def remote() -> Iterator[MemoryFileSystem]:
    fs = MemoryFileSystem()
    fs.store.clear()
    yield fs
    fs.store.clear()


OPTIONS = {
    StripeDataModule: {
        "masks": "marks",
        "synthesis": DefectSpec(),
        "patch_px": 32,
        "stride_px": 32,
    },
    WatermarkDataModule: {"masks": "marks", "patch_px": 32, "samples_per_image": 1},
    InspectionDataModule: {"patch_px": 32, "near_duplicates": "apart"},
    LabelledImageDataModule: {
        "classes": ["kind0", "kind1"],
        "size_px": 32,
        "near_duplicates": "apart",
    },
    DetectionDataModule: {"size_px": 32},
    GANDataModule: {"image_px": 32},
    CTDataModule: {"processes": 1},
}


def _make(kind: str, **options: Any) -> BaseDataModule[Any]:
    datamodule = KINDS[kind][0]
    return datamodule(loader=LOADER, **OPTIONS[datamodule], **options)


MORE_MASKED = {"part/6.png": _image(6), "marks/6.png": _mask()}
MORE_BOXES = {"images/6.png": _image(6), "labels/6.txt": b"0 0.5 0.5 0.4 0.4\n"}
MORE_POLYGONS = MORE_BOXES | {"labels/6.txt": b"1 0.1 0.1 0.5 0.1 0.5 0.5\n"}
MORE_LABELS = {"part/7.png": _image(7), "labels.csv": LABELS["labels.csv"] + b"7.png,kind1\n"}
VIEWS = {"views.json": b'{"views": "none"}'}
KINDS = {
    "stripe": (StripeDataModule, MASKED, MORE_MASKED),
    "watermark": (WatermarkDataModule, MASKED, MORE_MASKED),
    "polygons": (InspectionDataModule, POLYGONS, MORE_POLYGONS),
    "labels": (LabelledImageDataModule, LABELS, MORE_LABELS),
    "boxes": (DetectionDataModule, BOXES, MORE_BOXES),
    "gan": (GANDataModule, IMAGES | VIEWS, {"part/6.png": _image(6)}),
    "ct": (CTDataModule, VOLUMES, {"6.npy": _volume(6)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_datamodule_reads_a_root_on_a_server(
    kind: str, remote: MemoryFileSystem, tmp_path: Path
) -> None:
    _, files, more = KINDS[kind]
    remote.pipe({f"/{kind}/{name}": content for name, content in files.items()})
    options = {"root": f"memory://{kind}", "cache_dir": str(tmp_path)}

    def count(**changed: Any) -> int:
        datamodule = _make(kind, **options, **changed)
        datamodule.prepare_data()
        datamodule.setup("fit")
        assert len(list(datamodule.train_dataloader()))
        return sum(len(datamodule.dataset(split)) for split in ("train", "val", "test"))

    first = count()
    assert not list(tmp_path.rglob("*.zip"))
    assert _make(kind, **options).check_sources()
    remote.pipe({f"/{kind}/{name}": content for name, content in more.items()})
    other_rank = _make(kind, **options)
    other_rank.setup("fit")  # takes the mirror as it is
    assert sum(len(other_rank.dataset(split)) for split in ("train", "val", "test")) == first
    assert count() > first
    remote.store.clear()
    assert count(remote=RemoteOptions(offline="always")) > first


@pytest.mark.parametrize("kind", KINDS)
def test_every_datamodule_refuses_credentials_at_once(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.root: the address holds a user name"):
        _make(kind, root="s3://key:hunter2SECRET@bucket/folder")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    for name, value in (
        SECRETS | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    ).items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)

    def call(*words: str) -> dict[str, Any]:
        places = [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
        code = main([*words, *places, "hydra.verbose=true"])
        logging.getLogger().setLevel(logging.WARNING)
        assert code == 0
        summaries = (tmp_path / "runs").rglob("summary.json")
        newest = max(summaries, key=lambda path: path.stat().st_mtime_ns)
        said = "".join(capfd.readouterr()).encode()
        written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        for secret in [*SECRETS.values(), "hunter2"]:
            assert secret.encode() not in said + written
        return json.loads(newest.read_text())

    return call


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        server.client.create_bucket(Bucket="stripes")
        for name, content in MASKED.items():
            server.client.put_object(Bucket="stripes", Key=f"line 1/{name}", Body=content)
        yield server


@pytest.mark.slow
def test_commands_read_s3_and_write_no_credential(
    s3: SimpleNamespace, run: Callable[..., Any]
) -> None:
    words = [
        "+experiment=stripe",
        "trainer=cpu",
        "trainer.max_epochs=1",
        "data.patch_px=32",
        "data.loader.batch_size=2",
        "data.loader.num_workers=0",
        "data.stride_px=32",
        "data.root=s3://stripes/line 1",
        "data.masks=marks",
        "data.on_bad=error",
        f"data.remote.endpoint_url={s3.url}",
    ]
    prepared = run("prepare", *words)
    assert (prepared["prepare/images"], prepared["prepare/skipped"]) == (6, 0)
    assert run("fit", *words)["samples_sha256"]


@pytest.mark.parametrize(
    "words",
    [
        ["data.root=s3://key:hunter2/x@bucket/folder"],
        ["'data.root=\"https://host/data?X-Amz-Signature=hunter2\"'"],
        ["-m", "data.root=images,https://me:hunter2@host/x"],
        ["data.masks=https://me:hunter2@host/x"],
        ["+data.remote.secret=hunter2"],
    ],
)
def test_credentials_on_the_command_line_are_refused_before_anything_is_written(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
    assert main(["prepare", "+experiment=stripe", *words, *places]) == 2
    out, err = capfd.readouterr()
    assert "credentials belong to the environment" in err
    assert "hunter2" not in out + err
    assert not list(tmp_path.iterdir())
