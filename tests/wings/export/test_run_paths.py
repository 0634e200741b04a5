"""Paths of a run that is exported: the images that it was trained on, and their stores."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lit_data.wings.export.command import _settle_paths


def test_a_root_stays_as_it_was_typed_so_that_the_store_of_the_training_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = {"cache": "cache", "root": None}
    for folder, expected in ((tmp_path, "images"), (tmp_path / "b", f"{tmp_path}/b/images")):
        cfg = OmegaConf.create({"paths": {"cache": None}, "data": {"root": "images"}})
        _settle_paths(cfg, typed, folder)
        assert cfg.data.root == expected
