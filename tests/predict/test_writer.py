"""What counts as done when a run goes on, and for other processes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lit_data.core.errors import ConfigError, StoreBusyError, StoreError
from lit_data.core.files import write_json_once
from lit_data.predict.journal import Entry, Journal
from lit_data.predict.options import Share
from lit_data.predict.writer import PredictionWriter, Written

IDENTITY = {"checkpoint_sha256": "ab", "predict": {"tile_px": 512}}


def _add(journal: Journal, folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"pixels")
    files = journal.measure([folder / name])
    journal.add(Entry(image=name, stamp=[6, 1], files=files, rows=[{"y": 1.5}], score=0.5))


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
    assert journal.holds("b.png", [6, 1])
    entries = list(journal.entries(["b.png", "c.png", "a.png"]))
    assert [entry.image for entry in entries] == ["b.png", "a.png"]
    assert [entry.rows for entry in entries] == [[{"y": 1.5}]] * 2


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
    refused = r"(?s)choose another predict.folder.*checkpoint_sha256: 'ab', now 'cd'"
    with pytest.raises(ConfigError, match=refused):
        Journal(folder, other, resume=True)
    anew = Journal(folder, other, resume=False)
    assert not anew.holds("a.png", [6, 1])
    assert anew.earlier == {"a.png", "b.png"}  # whose files stay
    assert not Journal(folder, other, resume=True).holds("a.png", [6, 1])


@pytest.mark.parametrize("resume", [True, False])
def test_leftovers_of_a_killed_run_and_tables_of_an_earlier_one_go(
    folder: Path, resume: bool
) -> None:
    (folder / "masks").mkdir()
    left_over = folder / "masks" / ".lit_data-0123456789abcdef.part"
    names = ("masks/.download.part", ".thesis.part", ".lit_data-mine.part", "masks/images.csv")
    theirs = [folder / name for name in names]
    tables = [folder / name for name in ("images.csv", "defects.parquet", "predictions.png")]
    for path in (left_over, *theirs, *tables):
        path.touch()
    with pytest.raises(ConfigError):
        Journal(folder, {**IDENTITY, "checkpoint_sha256": "cd"}, resume=True)
    assert all(path.exists() for path in tables)
    Journal(folder, IDENTITY, resume=resume)
    assert not any(path.exists() for path in (left_over, *tables))
    assert all(path.exists() for path in theirs)


def test_nothing_is_removed_where_no_run_of_ours_has_been(tmp_path: Path) -> None:
    names = (".lit_data-0123456789abcdef.part", "images.part", "labels.csv")
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.touch()
    (tmp_path / "outside").mkdir()
    Journal(tmp_path, IDENTITY, resume=False)
    assert all(path.exists() for path in paths)


def test_no_link_is_followed_or_removed(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    kept = outside / ".lit_data-0123456789abcdef.part"
    kept.touch()
    (folder / "link").symlink_to(outside)
    (folder / ".lit_data-fedcba9876543210.part").symlink_to(kept)
    Journal(folder, IDENTITY, resume=True)
    assert kept.exists()
    assert (folder / ".lit_data-fedcba9876543210.part").is_symlink()


@pytest.mark.parametrize("name", ["images.jsonl", "fingerprint.json"])
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{not json}\n")
    with pytest.raises(StoreError, match=f"{name} is damaged: .*predict.resume=false"):
        Journal(folder, IDENTITY, resume=True)


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        '{"image": "a.png"}',
        '{"image": 3, "stamp": [1, 2], "files": {}, "rows": [], "score": 0.5}',
        '{"image": "a.png", "stamp": 7, "files": {}, "rows": [], "score": 0.5}',
        '{"image": "a.png", "stamp": [1, 2], "files": [], "rows": [], "score": 0.5}',
        '{"image": "a.png", "stamp": [1, 2], "files": {"x": "y"}, "rows": [], "score": 0.5}',
        '{"image": "a.png", "stamp": [1, 2], "files": {}, "rows": [3], "score": 0.5}',
        '{"image": "a.png", "stamp": [1, 2], "files": {}, "rows": [], "score": null}',
        "[" * 100_000,
        "\\xff",
    ],
    ids=range(10),
)
def test_a_damaged_journal_is_named(line: str, folder: Path) -> None:
    (folder / "images.jsonl").write_text(line + "\n")
    with pytest.raises(StoreError, match=r"images\.jsonl is damaged: remove it, or start again"):
        Journal(folder, IDENTITY, resume=True)


def test_processes_read_the_journals_of_each_other(tmp_path: Path) -> None:
    first, second = (
        Journal(tmp_path, IDENTITY, resume=False, share=Share(number=number, count=2, leads=False))
        for number in (0, 1)
    )
    _add(first, tmp_path, "a.png")
    _add(second, tmp_path, "b.png")
    with (tmp_path / "images-1-of-2.jsonl").open("ab") as file:
        file.write(b'{"image": "c.png"')  # the second is killed here
    again = Journal(tmp_path, IDENTITY, resume=False, share=Share(number=2, count=3, leads=False))
    assert [again.holds(name, [6, 1]) for name in ("a.png", "b.png")] == [True, True]
    assert [entry.image for entry in again.entries(["a.png", "b.png"])] == ["a.png", "b.png"]
    # Of an image that changed, the line that fits counts, whichever comes last.
    again.add(Entry(image="a.png", stamp=[6, 2], files={}, rows=[], score=0.25))
    leader = Journal(tmp_path, IDENTITY, resume=True)
    for stamp, score in (([6, 2], 0.25), ([6, 1], 0.5)):
        assert leader.holds("a.png", stamp)
        assert [entry.score for entry in leader.entries(["a.png"])] == [score]
    assert leader.count_shares() == {1, 2, 3}
    anew = Journal(tmp_path, IDENTITY, resume=False)
    assert not anew.holds("b.png", [6, 1])
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["images.jsonl"]


def test_bad_images_are_noted(tmp_path: Path) -> None:
    journal = Journal(tmp_path, IDENTITY, resume=False)
    journal.add(Entry(image="a.png", stamp=[6, 1], files={}, rows=[], score=0.0, bad="torn"))
    again = Journal(tmp_path, IDENTITY, resume=True)
    assert not again.holds("a.png", [6, 1])
    assert again.entries(["a.png"]) == []
    faults = [again.find_fault("a.png", stamp) for stamp in ([6, 1], [6, 2])]
    assert faults == ["torn", ""]


HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_journal_that_another_process_writes_is_left_alone(folder: Path) -> None:
    Journal(folder, IDENTITY, resume=True, share=Share(number=0, count=2, leads=False))
    path = folder / "images-0-of-2.jsonl"
    words = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        part = Share(number=0, count=2, leads=False)
        refused = r"another process is predicting into .* and writing images-0-of-2.jsonl: wait"
        for options in ({"resume": False}, {"resume": True}, {"resume": True, "share": part}):
            with pytest.raises(StoreBusyError, match=refused):
                Journal(folder, IDENTITY, **options)
        other = Share(number=1, count=2, leads=False)
        assert Journal(folder, IDENTITY, resume=False, share=other).holds("a.png", [6, 1])
        process.communicate()
    assert Journal(folder, IDENTITY, resume=True).holds("a.png", [6, 1])


def test_the_first_of_several_processes_names_the_run(tmp_path: Path) -> None:
    paths = [tmp_path / "fingerprint.json"] * 2
    for path, content in zip(paths, ({"a": 1}, {"a": 2}), strict=True):
        write_json_once(path, content)
    assert json.loads(paths[0].read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["fingerprint.json"]


def test_records_without_their_fingerprint_are_not_trusted(folder: Path) -> None:
    (folder / "fingerprint.json").unlink()
    with pytest.raises(ConfigError, match=r"holds images.jsonl of a run, but not its fingerprint"):
        Journal(folder, IDENTITY, resume=True, share=Share(number=0, count=2, leads=False))
    assert not (folder / "fingerprint.json").exists()


def test_inputs_that_differ_in_type_alone_keep_it() -> None:
    class Writer(PredictionWriter):
        names = ("a.jpg", "a.png", "b/a.png")

        def write(self, number: int, answer: object, seconds: float) -> Written:
            raise NotImplementedError

        def finish(self, entries: Sequence[Entry]) -> dict[str, Any]:
            raise NotImplementedError

    assert Writer().stems == {"a.jpg": "a.jpg", "a.png": "a.png", "b/a.png": "b/a"}
