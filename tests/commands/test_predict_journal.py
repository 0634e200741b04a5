"""What counts as done when a run goes on."""

from pathlib import Path
from typing import Any

import pytest

from lit_data.commands.predict_journal import Entry, Journal
from lit_data.errors import ConfigError, StoreError

IDENTITY: dict[str, Any] = {"checkpoint_sha256": "ab", "predict": {"tile_px": 512}}


def _add(journal: Journal, folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"pixels")
    journal.add(Entry(image=name, stamp=[6, 1], files=journal.measure([folder / name]), rows=[{"y": 1.5}], score=0.5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / "run", IDENTITY, resume=False)
    for name in ("a.png", "b.png"):
        _add(journal, tmp_path / "run", name)
    return tmp_path / "run"


def test_what_is_done_is_known_again(folder: Path) -> None:
    journal = Journal(folder, IDENTITY, resume=True)
    assert journal.holds("a.png", [6, 1])
    assert not journal.holds("a.png", [6, 2])  # its source changed
    assert not journal.holds("c.png", [6, 1])
    assert [(entry.image, entry.rows) for entry in journal.entries(["b.png", "c.png", "a.png"])] == [
        ("b.png", [{"y": 1.5}]),
        ("a.png", [{"y": 1.5}]),
    ]


@pytest.mark.parametrize("cut", [1, 10])
def test_half_a_line_does_not_count(folder: Path, cut: int) -> None:
    path = folder / "images.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(folder, IDENTITY, resume=True)
    assert journal.holds("a.png", [6, 1])
    assert not journal.holds("b.png", [6, 1])
    _add(journal, folder, "b.png")
    assert Journal(folder, IDENTITY, resume=True).holds("b.png", [6, 1])


@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_an_image_whose_file_is_not_whole_is_not_done(folder: Path, damage: str) -> None:
    (folder / "a.png").unlink() if damage == "remove" else (folder / "a.png").write_bytes(b"pix")
    journal = Journal(folder, IDENTITY, resume=True)
    assert [journal.holds(name, [6, 1]) for name in ("a.png", "b.png")] == [False, True]


def test_another_run_is_named_by_what_differs(folder: Path) -> None:
    other = {"checkpoint_sha256": "cd", "predict": {"tile_px": [512, 256]}}
    with pytest.raises(ConfigError, match=r"(?s)choose another predict.folder.*checkpoint_sha256: 'ab', now 'cd'"):
        Journal(folder, other, resume=True)
    assert not Journal(folder, other, resume=False).holds("a.png", [6, 1])
    assert not Journal(folder, other, resume=True).holds("a.png", [6, 1])


def test_leftovers_of_a_killed_run_go(folder: Path) -> None:
    (folder / "masks").mkdir()
    (folder / "masks" / ".0123.part").touch()
    Journal(folder, IDENTITY, resume=True)
    assert not list(folder.rglob("*.part"))


@pytest.mark.parametrize("name", ["images.jsonl", "fingerprint.json"])
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{not json}\n")
    with pytest.raises(StoreError, match=f"{name} is damaged: .*predict.resume=false"):
        Journal(folder, IDENTITY, resume=True)
