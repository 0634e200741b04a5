"""Damaged text and tables of every kind that we parse ourselves: read, or refused in our own words, soon."""

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml

from lit_data.annotations.coco import load_coco, read_coco_labels
from lit_data.annotations.labels import Frame
from lit_data.annotations.voc import read_voc_labels
from lit_data.annotations.yolo import read_class_names, read_data_yaml, read_yolo_labels
from lit_data.app.report import write_report
from lit_data.core.errors import LitDataError
from lit_data.images import DecodedStore, ImageDecoder, ImageSource
from lit_data.images.scope import parse_list
from lit_data.images.store.arrays import META_NAME
from lit_data.predict.journal import FINGERPRINT, Entry, Journal
from lit_data.wings.gan.dataset import LAYOUT_FILE, read_layout
from lit_data.wings.remote.fetching import MANIFEST_NAME, Manifest, MirroredFile
from lit_data.wings.remote.web import read_index
from tests.app.reports.folders import make_run

MUTANTS = 250
LONGEST_S = 5.0
"""Of the processor for one file: far more than any takes, far less than a hang."""
HOSTILE = [
    b"",
    b"-1",
    b"0",
    b"nan",
    b"inf",
    b"1e999",
    b"9" * 400,
    b"null",
    b"true",
    b'"x"',
    b"[]",
    b"{}",
    b"[" * 3000,
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\n",
    b"../" * 9,
    b"&a [*a, *a]",
    b"${b}",
    b"!!python/object:os.system",
    b"<!DOCTYPE a [<!ENTITY b 'c'>]>",
    b"auth" * 5000,
    b"1" * 20_000,
    b" " * 20_000,
    b"\r\n" * 500,
]
IMAGES = ["/root/images/a.png", "/root/images/b.png"]
FRAMES = [Frame((20, 30)), Frame((40, 50))]


class Case(NamedTuple):
    """A whole file, and what reads it."""

    path: Path
    parse: Callable[[], object]


def _text(path: Path, text: str, parse: Callable[[Path], object]) -> Case:
    path.write_text(text, encoding="utf-8")
    return Case(path, lambda: parse(path))


def _yolo(folder: Path) -> Case:
    text = "0 0.5 0.5 0.25 0.25\n1 0.5 0.5 0.125 0.5\n"
    read = lambda path: read_yolo_labels(IMAGES, FRAMES, [path, None], names=["a", "b"])  # noqa: E731
    return _text(folder / "a.txt", text, read)


def _voc(folder: Path) -> Case:
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
    size = "<size><width>30</width><height>20</height><depth>3</depth></size>"
    text = f"<annotation>{size}<object><name>a</name><difficult>0</difficult>{box}</object></annotation>"
    read = lambda path: read_voc_labels(IMAGES, FRAMES, [path, None])  # noqa: E731
    return _text(folder / "a.xml", text, read)


def _coco(folder: Path) -> Case:
    box = {"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 3.5, 4], "iscrowd": 0}
    image = {"id": 1, "file_name": "a.png", "height": 20, "width": 30}
    content = {"images": [image], "annotations": [box], "categories": [{"id": 3, "name": "a"}]}
    read = lambda path: read_coco_labels(IMAGES, FRAMES, [load_coco(path)])  # noqa: E731
    return _text(folder / "a.json", json.dumps(content), read)


def _data_yaml(folder: Path) -> Case:
    splits = {"path": ".", "train": ["images/train"], "val": "val"}
    text = yaml.safe_dump({"names": {0: "a", 1: "b"}, "nc": 2, **splits})
    return _text(folder / "data.yaml", text, read_data_yaml)


def _class_names(folder: Path) -> Case:
    read = lambda path: read_class_names(path.parent)  # noqa: E731
    return _text(folder / "classes.txt", "red cell\nwhite\n", read)


def _views(folder: Path) -> Case:
    text = json.dumps({"views": "sheet", "tiles": 3, "elevation_deg": [10, 20]})
    return _text(folder / LAYOUT_FILE, text, lambda path: read_layout(path.parent))


def _sums(folder: Path) -> Case:
    text = f"{'0a' * 32}  images/a.png\nimages/b.png\n# a remark\n"
    read = lambda path: parse_list(path.read_bytes(), "http://host/SHA256SUMS")  # noqa: E731
    return _text(folder / "SHA256SUMS", text, read)


def _page(folder: Path) -> Case:
    text = '<html><a href="a.png">a</a><a href="deep/">deep</a><a href="?C=N">by name</a></html>'
    read = lambda path: read_index(path.read_text("utf-8", "replace"), "http://host/set/")  # noqa: E731
    return _text(folder / "index.html", text, read)


def _manifest(folder: Path) -> Case:
    whole = Manifest(folder, "http://host/set")
    whole.begin()
    whole.add("a.png", MirroredFile("v1", 7, 8))
    whole.finish("scope", 1)
    return Case(folder / MANIFEST_NAME, lambda: Manifest(folder, "http://host/set"))


def _journal(folder: Path, name: str) -> Case:
    entry = Entry(image="a.png", stamp=(1, 2), files={"a.tif": 3}, rows=[{"number": 0}], score=0.5)
    Journal(folder, {"weights": "a"}, resume=False).add(entry)
    again = lambda: Journal(folder, {"weights": "a"}, resume=True)  # noqa: E731
    return Case(folder / name, lambda: again().holds("a.png", (1, 2)))


def _store(folder: Path, name: str) -> Case:
    np.save(folder / "a.npy", np.arange(30, dtype=np.uint8).reshape(5, 6))
    sources = [ImageSource((str(folder / "a.npy"),))]
    path = DecodedStore.build(sources, folder / "cache", decoder=ImageDecoder()).path
    return Case(path / name, lambda: DecodedStore(path)[0].sum())


def _run(folder: Path, name: str) -> Case:
    run = make_run(folder / "run")
    if "metrics" not in name:  # curves of figures that stay as they are take most of the time
        shutil.rmtree(run / "csv")
    return Case(run / name, lambda: write_report([run], output=folder / "report.html"))


CASES = {
    "yolo": _yolo,
    "voc": _voc,
    "coco": _coco,
    "data.yaml": _data_yaml,
    "classes.txt": _class_names,
    "views.json": _views,
    "sums": _sums,
    "page": _page,
    "manifest": _manifest,
    "journal": lambda folder: _journal(folder, "images.jsonl"),
    "fingerprint": lambda folder: _journal(folder, FINGERPRINT),
    "store meta": lambda folder: _store(folder, META_NAME),
    "store index": lambda folder: _store(folder, "files.npy"),
    "run: summary.json": lambda folder: _run(folder, "summary.json"),
    "run: metrics.csv": lambda folder: _run(folder, "csv/metrics.csv"),
    "run: config.yaml": lambda folder: _run(folder, ".hydra/config.yaml"),
    "run: fit.log": lambda folder: _run(folder, "fit.log"),
}


def _mutate(whole: bytes, draws: random.Random) -> bytes:
    """Cut, changed in some bytes, with a hostile text in some place, or with a piece many times."""
    kind, place = draws.randrange(4), draws.randrange(len(whole))
    end = min(len(whole), place + draws.choice([0, 1, 3, 8]))
    if kind == 0:
        return whole[:place]
    if kind == 1:
        mutant = bytearray(whole)
        for _ in range(draws.randrange(1, 4)):
            mutant[draws.randrange(len(whole))] = draws.randrange(256)
        return bytes(mutant)
    piece = draws.choice(HOSTILE) if kind == 2 else whole[place:end] * draws.choice([2, 100])
    return whole[:place] + piece + whole[end:]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("run")])
def test_a_mutant_is_read_or_refused_in_our_own_words(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path, MUTANTS)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("run")])
def test_a_mutant_of_a_run_is_reported_or_refused(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path, MUTANTS // 10)


def _check(name: str, tmp_path: Path, mutants: int) -> None:
    case, draws = CASES[name](tmp_path), random.Random(name)
    whole = case.path.read_bytes()
    case.parse()
    for _ in range(mutants):
        mutant = _mutate(whole, draws)
        case.path.write_bytes(mutant)
        began_s = time.process_time()
        try:
            case.parse()
        except LitDataError:
            pass
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} of {mutant[:300]!r}")
        assert time.process_time() - began_s < LONGEST_S, mutant[:300]
