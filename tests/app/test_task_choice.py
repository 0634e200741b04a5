"""Command lines without an experiment: which one a folder looks like."""

import shlex
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from lit_data.app import api
from lit_data.app.cli import main
from lit_data.core.errors import ConfigError

GREY = np.zeros((16, 16), np.uint8)
TREES = {
    "segmentation": ("images/a.png", "images/b.png", "masks/a.png", "masks/b.png"),
    "segmentation beside": ("a.png", "b.png", "a_mask.png", "b_mask.png"),
    "classification": ("cat/a.png", "cat/b.png", "dog/c.png", "dog/d.png"),
    "classification by a table": ("a.png", "b.png", "labels.csv"),
    "classification by lists": ("images/a.png", "images/b.png", "train.txt", "val.txt"),
    "anomaly": ("train/good/a.png", "train/good/b.png", "test/good/c.png", "test/dent/d.png"),
    "detection": ("images/a.jpg", "images/b.jpg", "labels/a.txt", "labels/b.txt", "classes.txt"),
    "detection of voc": ("JPEGImages/a.jpg", "JPEGImages/b.jpg", "Annotations/a.xml"),
    "ct": ("a.npy", "b.npy"),
    "ct_segmentation": ("a.npy", "a_labels.npy"),
}

TEXTS = {
    "classes.txt": "cell\n",
    "Annotations/a.xml": "cell\n",
    "labels.csv": "image,label\na.png,cat\nb.png,dog\n",
    "train.txt": "images/a.png cat\n",
    "val.txt": "images/b.png dog\n",
}


def _draw(root: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".png", ".jpg"):
            cv2.imwrite(str(path), GREY)
        elif path.suffix == ".npy":
            np.save(path, np.zeros((4, 8, 8), np.int16))
        else:
            path.write_text(TEXTS.get(name, "0 0.5 0.5 0.2 0.2\n"))


@pytest.mark.parametrize(
    ("folders", "layout", "files"),
    [
        (("target", "reference"), "pairs", '{target: "target/*", ref1: "reference/*"}'),
        (
            ("Targets", "ref_1", "ref_2"),
            "files",
            '{target: "Targets/*", ref1: "ref_1/*", ref2: "ref_2/*"}',
        ),
    ],
)
def test_folders_of_targets_and_references_are_no_masks(
    folders: tuple[str, ...], layout: str, files: str, tmp_path: Path
) -> None:
    root = tmp_path / "set"
    _draw(root, tuple(f"{folder}/{name}.png" for folder in folders for name in "ab"))
    with pytest.raises(ConfigError, match="set looks like stripe: ") as caught:
        api.start("fit", f"data.root={root}")
    words = shlex.split(str(caught.value).partition("stripe: ")[2])
    expected = ["lit-data", "fit", "experiment=stripe", f"data.layout={layout}"]
    assert words == [*expected, f"data.files={files}", f"data.root={root}"]


def test_a_folder_of_targets_beside_images_has_masks(tmp_path: Path) -> None:
    _draw(tmp_path, ("images/a.png", "images/b.png", "targets/a.png", "targets/b.png"))
    with pytest.raises(ConfigError, match=" looks like segmentation: "):
        api.start("fit", f"data.root={tmp_path}")


@pytest.mark.parametrize("kind", list(TREES))
@pytest.mark.parametrize("command", ["fit", "prepare"])
def test_the_experiment_that_a_folder_looks_like_is_proposed(
    kind: str, command: str, tmp_path: Path
) -> None:
    _draw(tmp_path / "set", TREES[kind])
    experiment = kind.partition(" ")[0]
    words = [f"data.root={tmp_path}/set", "seed=1"]
    message = f"set looks like {experiment}: lit-data {command} experiment={experiment} {words[0]}"
    with pytest.raises(ConfigError, match=message):
        api.start(command, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data.root=damaged", "no experiment is chosen, and damaged does not look like any: add"),
        (
            "data.root=empty",
            "no experiment is chosen, and empty does not look like any: add experiment",
        ),
        ("data.root=nowhere", "no experiment is chosen, and nowhere does not look like any: add"),
        (
            "data.root=s3://bucket/a",
            "no experiment is chosen, and s3://bucket/a does not look like any",
        ),
        ("seed=1", "no experiment is chosen: add experiment=NAME, one of anomaly, bccd,"),
    ],
)
def test_without_a_folder_that_tells_the_experiments_are_listed(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("damaged").mkdir()
    for name, content in {"a.npy": b"", "b.npy": b"\x93NUMPY ?"}.items():
        Path("damaged", name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        api.start("fit", *words.split())


def test_a_run_is_named_after_its_data_where_no_experiment_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    monkeypatch.chdir(tmp_path)
    install(lambda cfg: {})
    assert main(["show", "data=detection", "model=detector", "augment=none"]) == 0
    assert [path.name for path in (tmp_path / "runs/show").iterdir()] == ["detection"]


def test_nothing_is_made_where_no_experiment_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prepare"]) == 2
    assert not list(tmp_path.iterdir())
