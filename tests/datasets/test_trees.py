"""Folders as people have them are understood as docs/folders.md says, or refused with a cure."""

import logging
from pathlib import Path

import pytest

from lit_data.core.errors import LitDataError
from tests.datasets.trees import (
    PAGE,
    Tree,
    describe_tree,
    draw_tree,
    expand,
    read_trees,
    write_page,
)

TREES = read_trees()


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.experiment}: {tree.name}")
def test_a_folder_is_understood_as_the_page_says(
    tree: Tree, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lit_data")
    folder = tmp_path / "data"
    draw_tree(tree, folder)
    if tree.refused:
        with pytest.raises(LitDataError) as refusal:
            describe_tree(tree, folder, tmp_path / "cache")
        assert tree.refused in str(refusal.value)
    else:
        assert describe_tree(tree, folder, tmp_path / "cache") == tree.understood
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert [text for text in tree.logged if text not in logged] == [], logged


def test_names_of_trees_are_there_once() -> None:
    names = [(tree.experiment, tree.name) for tree in TREES]
    assert len(names) == len(set(names)) >= 60


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == write_page(TREES), "python -m tests.datasets.trees"


def test_patterns_stand_for_files() -> None:
    assert list(expand("{a,b}/{08-10}.png"))[:4] == ["a/08.png", "a/09.png", "a/10.png", "b/08.png"]


@pytest.mark.parametrize("name", ["LabelMe", "nolabel: images without a label file"])
def test_the_working_folder_is_understood_as_any_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = next(tree for tree in TREES if tree.name == name and tree.understood)
    draw_tree(tree, tmp_path / "data")
    expected = describe_tree(tree, tmp_path / "data", tmp_path / "cache")
    monkeypatch.chdir(tmp_path / "data")
    assert describe_tree(tree, Path(), tmp_path / "cache") == expected
